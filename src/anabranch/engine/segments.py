"""Recorded DataFrame operations, and the stretches of a query from one stateful stage to the next: a tree of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.engine.stages import Clock, StatefulStage
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
    """A stateful stage and the operations between it and the next one, or the sink.

    Or a union of streams in place of the stage, which needs no state.
    """

    stage: StatefulStage | None
    after: tuple[Operation, ...] = ()
    #: Where rows come from, for each input of the stage: the position of another segment, or what Spark reads. None at
    #: all stand for the segment before, or for the rows of the epoch if there is none.
    inputs: tuple[int | DataFrame, ...] = ()
    #: How the inputs are united, if there is no stage: an operation on the first one, to which the second is added.
    union: Operation | None = None
    #: No rows, with the columns that the stage or the union gives out.
    sample: DataFrame | None = None
    #: The columns of the stage's input, as the user knows them; none for a join, which has two inputs.
    arriving: StructType = field(default_factory=StructType)

    @property
    def one_to_one(self) -> bool:
        # Rows that pass the stage of broadcast tables can be computed as often as one likes: no task keeps state there.
        return isinstance(self.stage, TableStage) or all(operation.method in ONE_TO_ONE for operation in self.after)

    def feeders(self, position: int) -> tuple[int, ...]:
        """The positions of the segments whose output this one gets, which is at a position itself."""
        if not self.inputs:
            return (position - 1,) if position else ()
        return tuple(each for each in self.inputs if isinstance(each, int))

    def united(self, left: DataFrame, right: DataFrame) -> DataFrame:
        assert self.union is not None
        return Operation(self.union.method, (right, *self.union.arguments), self.union.keywords).apply(left)


def _as_of(value: Any, rows: DataFrame, tables: EpochTables | None) -> Any:
    if not isinstance(value, TableArgument):
        return value
    return F.broadcast(value.sample if tables is None else tables.frame(rows.sparkSession, value.name))


def is_chain(segments: Sequence[Segment]) -> bool:
    """Whether each segment has nothing but the output of the one before."""
    return all(segment.feeders(i) == ((i - 1,) if i else ()) for i, segment in enumerate(segments))


def watermark_delays_ms(segments: Sequence[Segment]) -> dict[int, int | None]:
    """By stage, how far its watermark is behind that of the stream; None if no watermark reaches it.

    A join gives rows out up to so long after the watermark has passed them: to the stages after it, they are not late.
    After a stage that goes by the time of day nothing is known about event times, so Spark lets no watermark pass. What
    has several inputs goes by the one that is furthest behind, of those that have a watermark.
    """
    delays_ms: dict[int, int | None] = {}
    behind_ms: list[int | None] = []
    for position, segment in enumerate(segments):
        feeders = segment.feeders(position)
        is_read = len(feeders) < max(len(segment.inputs), 1)
        known = [each for feeder in feeders if (each := behind_ms[feeder]) is not None] + [0] * is_read
        delay_ms = max(known, default=None)
        if segment.stage is not None:
            delays_ms[segment.stage.spec.number] = delay_ms
            if segment.stage.clock is Clock.PROCESSING_TIME:
                delay_ms = None
            elif delay_ms is not None:
                delay_ms += segment.stage.output_delay_ms
        behind_ms.append(delay_ms)
    return delays_ms


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
