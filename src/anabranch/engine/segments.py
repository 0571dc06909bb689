"""Recorded DataFrame operations, and the stretches of a query from one stateful stage to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.engine.stages import StatefulStage
from anabranch.engine.tables import EpochTables, TableStage

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
class TableArgument:
    """Stands for a broadcast table in an operation."""

    name: str
    #: Without rows.
    sample: DataFrame

    def __repr__(self) -> str:
        return f"broadcast {self.name}"


@dataclass(frozen=True)
class Operation:
    """A DataFrame method call, recorded to be replayed on every epoch's rows."""

    method: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, rows: DataFrame, tables: EpochTables | None = None) -> DataFrame:
        """On rows; a broadcast table among the arguments is what it is in the epoch."""
        arguments = [_as_of(value, rows, tables) for value in self.arguments]
        result: DataFrame = getattr(rows, self.method)(*arguments, **self.keywords)
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
    #: The columns of the stage's input, as the user knows them; none for a join, which has two inputs.
    arriving: StructType = field(default_factory=StructType)

    @property
    def one_to_one(self) -> bool:
        # Rows that pass the stage of broadcast tables can be computed as often as one likes: no task keeps state there.
        return isinstance(self.stage, TableStage) or all(operation.method in ONE_TO_ONE for operation in self.after)


def _as_of(value: Any, rows: DataFrame, tables: EpochTables | None) -> Any:
    if not isinstance(value, TableArgument):
        return value
    return F.broadcast(value.sample if tables is None else tables.frame(rows.sparkSession, value.name))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
