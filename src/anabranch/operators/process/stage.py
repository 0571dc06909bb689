"""The process stage: Spark's own StatefulProcessor, run key by key against a local copy of its keys' state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import StructField

from anabranch.core.schemas import HASH, StageSpec
from anabranch.engine.placement import place
from anabranch.engine.stages import Clock, EpochContext
from anabranch.engine.taskepoch import TaskEpoch
from anabranch.engine.tasks import run_in_tasks
from anabranch.operators.keys import key_name, normalised
from anabranch.operators.process.frames import run_frames
from anabranch.operators.process.program import Program
from anabranch.operators.process.rows import run_rows
from anabranch.wire.routed import RoutedState, StageAccess


@dataclass(frozen=True)
class ProcessStage:
    """groupBy(keys).transformWithState(processor) or transformWithStateInPandas(processor)."""

    parallelism: int | None
    #: Expressions of the key columns; bound to the stage's input.
    key_columns: tuple[Column, ...]
    key_fields: tuple[StructField, ...]
    program: Program
    pandas: bool

    @property
    def spec(self) -> StageSpec:
        return self.program.spec

    @property
    def clock(self) -> Clock:
        return Clock.NONE

    def project(self, rows: DataFrame) -> DataFrame:
        keys = [
            normalised(column, field).alias(key_name(i))
            for i, (column, field) in enumerate(zip(self.key_columns, self.key_fields, strict=True))
        ]
        return rows.select(*keys, "*")

    def variant(self, context: EpochContext) -> str:
        del context
        return "process"

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        del context
        names = [key_name(i) for i in range(len(self.key_fields))]
        task = _ProcessTask(self.program, self.pandas)
        return run_in_tasks(place(rows, names, access), access, task, self.program.output)

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """The entries with their key; the hash is ours alone."""
        del variable
        return state.drop(HASH)


@dataclass(frozen=True)
class _ProcessTask:
    """What a task does with its partition."""

    program: Program
    pandas: bool

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: RoutedState, epoch: TaskEpoch
    ) -> Iterable[pa.RecordBatch]:
        del epoch  # timers need it; the supported time mode "none" shows no times to a processor
        run = run_frames if self.pandas else run_rows
        return run(batches, self.program, state, TimerValues())
