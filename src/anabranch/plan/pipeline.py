"""A query as Anabranch sees it: a tree of numbered stages, and between stateful ones DataFrame operations to replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.ids import StageNumber
from anabranch.engine.segments import Operation, Segment
from anabranch.engine.spark.expressions import tracks_watermark
from anabranch.engine.stages import StatefulStage, table_stage


@dataclass(frozen=True)
class LogicalStage:
    """An operator of the job, as the user named and wrote it."""

    number: StageNumber
    name: str
    #: What it does, one text for each operation.
    operations: tuple[str, ...] = ()
    parallelism: int | None = None
    stateful: bool = False
    #: Opened by `.stage(...)`: takes the operations that follow, up to and including a stateful one.
    opened: bool = False
    #: The numbers of the stages that it follows, if several come together in it; else it follows the one before.
    follows: tuple[StageNumber, ...] = ()
    #: What its state goes by, if that is another number: the one that it had when the checkpoint was new.
    state_number: StageNumber | None = None

    def moved(self, by: int) -> LogicalStage:
        """Returns the same, to stand after this many other stages."""
        number = StageNumber(self.number + by)
        name = f"stage{number}" if self.name == f"stage{self.number}" else self.name
        return replace(self, number=number, name=name, follows=tuple(StageNumber(n + by) for n in self.follows))


@dataclass(frozen=True)
class Pipeline:
    """The whole query except its sink."""

    #: The streaming DataFrame with everything before the first stateful stage applied, by Spark itself. If several come
    #: together, one of them.
    source: DataFrame
    stages: tuple[LogicalStage, ...]
    #: Each comes after those whose output it gets.
    segments: tuple[Segment, ...] = ()

    @property
    def stateful_stages(self) -> tuple[StatefulStage, ...]:
        return tuple(segment.stage for segment in self.segments if segment.stage is not None)

    @property
    def table_names(self) -> tuple[str, ...]:
        """The broadcast tables."""
        stage = table_stage(self.stateful_stages)
        return () if stage is None else tuple(stage.table_keys)

    @property
    def has_watermark(self) -> bool:
        """Whether Spark tracks a watermark: on any of the sources, and whether or not its column is still there."""
        read = [each for segment in self.segments for each in segment.inputs if not isinstance(each, int)]
        return any(tracks_watermark(rows) for rows in read or [self.source])

    def with_operation(self, operation: Operation) -> Pipeline:
        """Appends a stateless operation: applied at once before the first stateful stage, recorded after it."""
        if not self.segments:
            return replace(self, source=operation.apply(self.source))
        *earlier, last = self.segments
        last = replace(last, after=(*last.after, operation))
        return replace(self, segments=(*earlier, last))

    def with_stage(self, text: str) -> Pipeline:
        """Numbers an operation: it joins a stage that `.stage(...)` has opened, or is a stage of its own."""
        last = self.stages[-1]
        if last.opened:
            joined = replace(last, operations=(*last.operations, text))
            return replace(self, stages=(*self.stages[:-1], joined))
        return self.open_stage(None, None, opened=False, operations=(text,))

    def open_stage(
        self, name: str | None, parallelism: int | None, *, opened: bool = True, operations: tuple[str, ...] = ()
    ) -> Pipeline:
        number = StageNumber(len(self.stages))
        stage = LogicalStage(number, name or f"stage{number}", operations, parallelism, opened=opened)
        return replace(self, stages=(*self.stages, stage))

    @property
    def output(self) -> int | DataFrame:
        """Where rows come from for what follows: the last segment, or what Spark reads."""
        return len(self.segments) - 1 if self.segments else self.source

    def with_stateful(
        self,
        stage: StatefulStage,
        sample: DataFrame | None = None,
        inputs: tuple[int | DataFrame, ...] = (),
        *,
        arriving: StructType | None = None,
    ) -> Pipeline:
        """Appends a stateful stage, for the logical stage that was numbered last.

        The sample is empty rows of its result; `arriving` are the columns of its input.
        """
        segment = Segment(stage, inputs=inputs or (self.output,), sample=sample, arriving=arriving or StructType())
        return self._with_segment(segment)

    def with_union(self, union: Operation, sample: DataFrame, inputs: tuple[int | DataFrame, ...]) -> Pipeline:
        """Appends a union of streams."""
        return self._with_segment(Segment(None, inputs=inputs, union=union, sample=sample))

    def _with_segment(self, segment: Segment) -> Pipeline:
        last = replace(self.stages[-1], stateful=segment.stage is not None, opened=False)
        return replace(self, stages=(*self.stages[:-1], last), segments=(*self.segments, segment))

    def meeting(self, other: Pipeline, text: str) -> tuple[Pipeline, tuple[int | DataFrame, int | DataFrame]]:
        """Returns both in one, with a numbered stage in which they come together, and where the rows of both come from.

        The stages of the other one are numbered after these. If it has no state, it adds none: what it does belongs to
        the stage in which they come together.
        """
        if other.table_names:
            raise UnsupportedError(
                "The second of two streams that come together has broadcast tables. Give the tables to the first one, "
                "with withBroadcast, or let it be the second."
            )
        if not other.segments:
            return self.with_stage(text), (self.output, other.source)
        own = self.stages[:-1] if self.stages[-1].opened else self.stages
        moved = other.moved(len(own), len(self.segments))
        both = replace(self, stages=(*own, *moved.stages), segments=(*self.segments, *moved.segments))
        if self.stages[-1].opened:
            both = replace(both, stages=(*both.stages, self.stages[-1].moved(len(moved.stages))))
        both = both.with_stage(text)
        follows = tuple(stages[-1].number for stages in (own, moved.stages) if stages)
        last = replace(both.stages[-1], follows=follows)
        return replace(both, stages=(*both.stages[:-1], last)), (self.output, len(both.segments) - 1)

    def moved(self, stages: int, segments: int) -> Pipeline:
        """Returns the same, to stand after this many other stages and segments."""
        logical = {stage.number: stage.moved(stages) for stage in self.stages}
        moved = []
        for segment in self.segments:
            stage = segment.stage
            if stage is not None:
                named = logical[stage.spec.number]
                stage = stage.numbered(named.number, named.name)
            inputs = tuple(each + segments if isinstance(each, int) else each for each in segment.inputs)
            moved.append(replace(segment, stage=stage, inputs=inputs))
        return replace(self, stages=tuple(logical.values()), segments=tuple(moved))

    def with_former_places(self, places: Sequence[tuple[StageNumber, str]]) -> Pipeline:
        """Returns the same with the numbers and names that its stateful stages had before: a pair for each."""
        former = dict(zip((stage.spec.number for stage in self.stateful_stages), places, strict=True))
        segments, stages = list(self.segments), list(self.stages)
        for i, segment in enumerate(segments):
            if segment.stage is not None:
                segments[i] = replace(segment, stage=segment.stage.numbered(*former[segment.stage.spec.number]))
        for i, stage in enumerate(stages):
            if stage.number in former:
                number, name = former[stage.number]
                stages[i] = replace(stage, name=name, state_number=number)
        return replace(self, stages=tuple(stages), segments=tuple(segments))

    def with_batch(self, rows: DataFrame, *, stateful: bool) -> Pipeline:
        """Replaces the rows by what the logical stage that was numbered last has made of a batch."""
        last = replace(self.stages[-1], stateful=stateful, opened=False)
        return replace(self, stages=(*self.stages[:-1], last), source=rows)
