"""Recorded DataFrame operations, and the stretches of a query from one stateful stage to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from anabranch.engine.stages import StatefulStage

#: Operations that keep Spark's partitions one to one and read their input once (a repartition by range does not: it
#: draws a sample first). After others, a stage's output is materialised, so that state logic runs once, in tasks of its
#: own.
ONE_TO_ONE = frozenset(
    {
        "alias", "colRegex", "drop", "dropna", "fillna", "filter", "hint", "mapInArrow", "mapInPandas", "replace",
        "select", "selectExpr", "to", "toDF", "where", "withColumn", "withColumnRenamed", "withColumns",
        "withColumnsRenamed", "withMetadata", "unpivot", "melt", "repartition",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """A DataFrame method call, recorded to be replayed on every epoch's rows."""

    method: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, rows: DataFrame) -> DataFrame:
        result: DataFrame = getattr(rows, self.method)(*self.arguments, **self.keywords)
        return result

    def __str__(self) -> str:
        parts = [_shown(value) for value in self.arguments]
        parts += [f"{name}={_shown(value)}" for name, value in self.keywords.items()]
        return f"{self.method}({', '.join(parts)})"


@dataclass(frozen=True)
class Segment:
    """A stateful stage and the operations between it and the next one, or the sink."""

    stage: StatefulStage
    after: tuple[Operation, ...] = ()

    @property
    def one_to_one(self) -> bool:
        return all(operation.method in ONE_TO_ONE for operation in self.after)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
