"""The process stage: Spark's own StatefulProcessor, run key by key against a local copy of its keys' state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import ClassVar, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import StructField, StructType

from anabranch.core.errors import EpochError
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import HASH, StageSpec
from anabranch.engine.batches import ONLY_EPOCH, Batch
from anabranch.engine.late import LateKind, kept_columns, time_type
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import TaskEpoch, place, run_in_tasks
from anabranch.operators.keys import WATERMARK, key_name, with_keys
from anabranch.operators.process.initial import InitialState, UnitedRows
from anabranch.operators.process.program import Program, TimeMode
from anabranch.operators.state import StageState, note_dropped
from anabranch.wire.routed import StageAccess

_CLOCKS = {
    TimeMode.NONE: StageClock.NONE,
    TimeMode.EVENT_TIME: StageClock.EVENT_TIME,
    TimeMode.PROCESSING_TIME: StageClock.PROCESSING_TIME,
}


class Run(Protocol):
    """Runs a program in a task, for one form of user code: rows, frames, or frames with a GroupState."""

    def __call__(
        self,
        batches: Iterable[pa.RecordBatch],
        program: Program,
        state: StageState,
        timers: TimerValues | None = None,
        initial: Iterable[pa.RecordBatch] = (),
    ) -> Iterable[pa.RecordBatch]: ...


@dataclass(frozen=True)
class ProcessStage:
    """groupBy(keys).transformWithState(processor), transformWithStateInPandas or applyInPandasWithState."""

    parallelism: int | None
    #: Expressions of the key columns; bound to the stage's input.
    key_columns: tuple[Column, ...]
    key_fields: tuple[StructField, ...]
    program: Program
    run: Run
    #: The position among the user's columns of the one under a watermark; its field, for a window.
    event_time: tuple[int, str] | None = None
    initial: InitialState | None = None
    #: The only output mode that the query may have; None for any.
    output_mode: str | None = None
    #: The broadcast tables that the processor can read.
    tables: tuple[str, ...] = ()

    output_delay_ms: ClassVar[int] = 0

    @property
    def spec(self) -> StageSpec:
        return self.program.spec

    @property
    def clock(self) -> StageClock:
        return _CLOCKS[self.program.time_mode]

    def numbered(self, number: StageNumber, name: str) -> Self:
        return replace(self, program=replace(self.program, spec=self.spec.numbered(number, name)))

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        del side, carry  # all columns are there
        return with_keys(rows, self.key_columns, self.key_fields)

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        del complete
        if self.event_time is None or self.program.time_mode is not TimeMode.EVENT_TIME:
            return ()
        position, field = self.event_time
        time = arriving.fields[position]
        return (LateKind(time.name, field, time_type(time.dataType, field), kept_columns(arriving)),)

    def variant(self, context: EpochContext) -> str:
        return "process" if self._initial(context) is None else "process with initial state"

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        rows, task = self._prepared(rows, context)
        return run_in_tasks(place(rows, self._key_names, access), access, task, self.program.output)

    def apply_to_batch(self, rows: DataFrame, batch: Batch) -> DataFrame:
        """The result on all rows at once, without any state before."""
        rows, task = self._prepared(rows, ONLY_EPOCH)
        return batch.run(rows, self._key_names, task, self.program.output)

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """The entries with their key; the hash is ours alone."""
        del variable
        return state.drop(HASH)

    @property
    def _key_names(self) -> list[str]:
        return [key_name(i) for i in range(len(self.key_fields))]

    def _prepared(self, rows: DataFrame, context: EpochContext) -> tuple[DataFrame, _ProcessTask]:
        """What tasks get, with the initial state if it is time for that, and what they do with it."""
        united = None
        if (initial := self._initial(context)) is not None:
            keys = len(self.key_fields)
            united = UnitedRows(keys, tuple(rows.columns[keys:]), tuple(initial.rows.columns))
            rows = initial.united_with(rows, self.key_fields)
        program = self.program
        if context.tables is not None and self.tables:
            shared = {name: context.tables.shared(rows.sparkSession, name) for name in self.tables}
            program = replace(program, tables=shared)
        emitted = None if self.spec.number in context.may_emit_late else EmittedTimes.of(program.output)
        return rows, _ProcessTask(program, self.run, self._late_rows(), united, emitted)

    def _initial(self, context: EpochContext) -> InitialState | None:
        """The initial state, in the first epoch of all; whoever runs that again begins with it again."""
        return self.initial if context.epoch == 0 else None

    def _late_rows(self) -> LateRows | None:
        if self.event_time is None or self.program.time_mode is not TimeMode.EVENT_TIME:
            return None
        position, field = self.event_time
        return LateRows(1 + len(self.key_fields) + position, field)


@dataclass(frozen=True)
class LateRows:
    """Rows that the watermark has passed, which timers that go by event time must not see any more."""

    column: int
    field: str

    def dropped(self, batches: Sequence[pa.RecordBatch], watermark_ms: int | None) -> list[pa.RecordBatch]:
        if watermark_ms is None:
            return list(batches)
        kept = []
        for batch in batches:
            times = batch.column(self.column)
            if self.field:
                times = pc.struct_field(times, self.field)
            late = pc.fill_null(pc.less_equal(times.cast(pa.int64()), watermark_ms * 1000), False)
            kept.append(batch.filter(pc.invert(late)))
        return [batch for batch in kept if batch.num_rows]


@dataclass(frozen=True)
class EmittedTimes:
    """The event times of what a processor gives out: as in Spark, it must not be too late for the stages after it."""

    column: str

    @classmethod
    def of(cls, output: StructType) -> Self | None:
        """None if no column of the output is one of event time."""
        return next((cls(field.name) for field in output.fields if WATERMARK in (field.metadata or {})), None)

    def checked(
        self, batches: Iterable[pa.RecordBatch], stage: str, watermark_ms: int | None
    ) -> Iterator[pa.RecordBatch]:
        """The batches, up to one with a row that the watermark has passed."""
        for batch in batches:
            earliest = None if watermark_ms is None else pc.min(batch.column(self.column).cast(pa.int64())).as_py()
            if watermark_ms is not None and earliest is not None and earliest <= watermark_ms * 1000:
                raise EpochError(
                    f"[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] The stage {stage!r} gave out a row with "
                    f"{self.column} at {_shown(earliest)}, which is not after the watermark, "
                    f"{_shown(watermark_ms * 1000)}: stages after it would drop the row. Let the processor give out "
                    "later times, or leave out eventTimeColumnName if no later stage goes by them. Where a later "
                    "stage drops late rows, writeStream.lateRows(...) keeps such rows instead."
                )
            yield batch


def _shown(time_us: int) -> str:
    return f"{datetime(1970, 1, 1) + timedelta(microseconds=time_us)} UTC"


@dataclass(frozen=True)
class _ProcessTask:
    """What a task does with its partition."""

    program: Program
    run: Run
    late: LateRows | None
    united: UnitedRows | None
    #: Only if its rows must not be older than the watermark.
    emitted: EmittedTimes | None

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: StageState, epoch: TaskEpoch
    ) -> Iterable[pa.RecordBatch]:
        initial: list[pa.RecordBatch] = []
        if self.united is not None:
            batches, initial = self.united.split(batches)
        if self.late is not None:
            timely = self.late.dropped(batches, epoch.late_watermark_ms)
            note_dropped(state, batches, timely)
            batches = timely
        times = self.program.times(epoch.processing_time_ms, epoch.watermark_ms)
        output = self.run(batches, self.program, state, times, initial)
        if self.emitted is None:
            return output
        return self.emitted.checked(output, self.program.spec.name, epoch.late_watermark_ms)
