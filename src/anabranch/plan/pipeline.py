"""A query as Anabranch sees it: numbered stages, and between stateful ones the DataFrame operations to replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.core.ids import StageNumber
from anabranch.engine.segments import Operation, Segment
from anabranch.engine.stages import StatefulStage, table_stage

#: The node of Spark's plans that tracks a watermark.
_WATERMARK = "EventTimeWatermark"


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


@dataclass(frozen=True)
class Pipeline:
    """The whole query except its sink."""

    #: The streaming DataFrame with everything before the first stateful stage applied, by Spark itself.
    source: DataFrame
    stages: tuple[LogicalStage, ...]
    segments: tuple[Segment, ...] = ()

    @property
    def stateful_stages(self) -> tuple[StatefulStage, ...]:
        return tuple(segment.stage for segment in self.segments)

    @property
    def table_names(self) -> tuple[str, ...]:
        """The broadcast tables."""
        stage = table_stage(self.stateful_stages)
        return () if stage is None else tuple(stage.table_keys)

    @property
    def has_watermark(self) -> bool:
        """Whether Spark tracks a watermark: on any of the sources, and whether or not its column is still there."""
        return _tracks_watermark(self.source._jdf.queryExecution().analyzed())

    def with_operation(self, operation: Operation) -> Pipeline:
        """Append a stateless operation: applied at once before the first stateful stage, recorded after it."""
        if not self.segments:
            return replace(self, source=operation.apply(self.source))
        *earlier, last = self.segments
        last = replace(last, after=(*last.after, operation))
        return replace(self, segments=(*earlier, last))

    def with_stage(self, text: str) -> Pipeline:
        """Number an operation: it joins a stage that `.stage(...)` has opened, or is a stage of its own."""
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

    def with_stateful(self, stage: StatefulStage, arriving: StructType | None = None) -> Pipeline:
        """Append a stateful stage, for the logical stage that was numbered last; `arriving` are its input's columns."""
        last = replace(self.stages[-1], stateful=True, opened=False)
        segment = Segment(stage, arriving=arriving or StructType())
        return replace(self, stages=(*self.stages[:-1], last), segments=(*self.segments, segment))


def _tracks_watermark(plan: Any) -> bool:
    if plan.nodeName() == _WATERMARK:
        return True
    children = plan.children()
    return any(_tracks_watermark(children.apply(i)) for i in range(children.size()))
