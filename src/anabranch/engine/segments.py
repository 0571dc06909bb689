"""The parts of a query: recorded DataFrame operations, segments from one stateful stage to the next, and their inputs.

Segments form a tree. All that Spark reads for them is one streaming DataFrame, of which each gets its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.engine.late import LateRows
from anabranch.engine.stages import StageClock, StatefulStage
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
        """Makes the call on rows; a broadcast table among the arguments is what it is in the epoch."""
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
        """Returns the positions of the segments whose output this one gets, given its own position."""
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
    """Tells whether each segment gets the output of the one before, and nothing else."""
    return all(segment.feeders(i) == ((i - 1,) if i else ()) for i, segment in enumerate(segments))


def watermark_delays_ms(segments: Sequence[Segment]) -> dict[int, int | None]:
    """Returns, by stage, how far its watermark is behind that of the stream; None if no watermark reaches it.

    A join gives rows out some time after the watermark has passed them: to the stages after it, they are not late.
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
            if segment.stage.clock is StageClock.PROCESSING_TIME:
                delay_ms = None
            elif delay_ms is not None:
                delay_ms += segment.stage.output_delay_ms
        behind_ms.append(delay_ms)
    return delays_ms


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


#: Which part a row belongs to, if there are several; each is in a column of its own.
_PART = "_part"
_ROW = "_row"

#: A segment, and which of its inputs; for a stage, which unites its inputs itself, always the first.
Place = tuple[int, int]
_FIRST: Place = (0, 0)


class StreamInputs:
    """The inputs of segments that no other segment gives them."""

    def __init__(self, segments: Sequence[Segment], late: LateRows | None = None) -> None:
        self._segments = segments
        #: What is projected for a stage of which late rows are wanted is what these are shown with, too.
        self._late = late

    @property
    def one(self) -> bool:
        """Tells whether all that Spark reads goes to one place."""
        return len(self._parts) <= 1

    @property
    def stages(self) -> list[int]:
        """The numbers of the stages that get some of what Spark reads."""
        fed = [self._segments[position].stage for position, _ in self._parts or [_FIRST]]
        return [stage.spec.number for stage in fed if stage is not None]

    def read(self) -> DataFrame:
        """Returns the streaming DataFrame to run the query on: projected by the stages that it goes to."""
        parts = list(self._parts.values())
        if self.one:
            return parts[0]
        # Struct fields must not have the same names, and columns may.
        packed = [part.toDF(*_numbered(part)).select(F.struct(*_numbered(part)).alias(_ROW)) for part in parts]
        kinds = [rows.schema[0].dataType for rows in packed]
        tagged = []
        for number, rows in enumerate(packed):
            columns = [F.col(_ROW) if i == number else F.lit(None).cast(kind) for i, kind in enumerate(kinds)]
            named = [column.alias(f"{_PART}{i}") for i, column in enumerate(columns)]
            tagged.append(rows.select(F.lit(number).alias(_PART), *named))
        return reduce(DataFrame.union, tagged)

    def split(self, rows: DataFrame) -> Mapping[Place, DataFrame]:
        """Returns the rows of an epoch by the place that they go to."""
        if self.one:
            return {next(iter(self._parts), _FIRST): rows}
        return {
            place: rows.where(F.col(_PART) == number).select(f"{_PART}{number}.*").toDF(*part.columns)
            for number, (place, part) in enumerate(self._parts.items())
        }

    @cached_property
    def _parts(self) -> dict[Place, DataFrame]:
        parts: dict[Place, DataFrame] = {}
        for position, segment in enumerate(self._segments):
            for side, rows in enumerate(segment.inputs):
                if isinstance(rows, int):
                    continue
                if segment.stage is None:
                    parts[position, side] = rows
                else:
                    carry = self._late is not None and segment.stage.spec.number in self._late.kinds
                    projected = segment.stage.project(rows, side, carry=carry)
                    earlier = parts.get((position, 0))
                    parts[position, 0] = projected if earlier is None else earlier.union(projected)
        return parts


def _numbered(rows: DataFrame) -> list[str]:
    return [f"_c{number}" for number in range(len(rows.columns))]
