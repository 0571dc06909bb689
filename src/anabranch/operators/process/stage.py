"""The process stage: Spark's own StatefulProcessor, run key by key against a local copy of its keys' state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from anabranch.core.errors import EpochError
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import StageSpec
from anabranch.engine.batches import ONLY_EPOCH, Batch
from anabranch.engine.late import LateKind, kept_columns, time_type
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import TaskEpoch, place, run_in_tasks
from anabranch.operators.keys import key_names, normalised, with_keys
from anabranch.operators.process.program import Program, TimeMode
from anabranch.operators.process.task import Runner
from anabranch.operators.stage import KeyedStage, watermarked
from anabranch.operators.state import StageState, timely_rows
from anabranch.wire.routed import StageAccess

_ROW, _INITIAL = "_row", "_initial"
_CLOCKS = {
    TimeMode.NONE: StageClock.NONE,
    TimeMode.EVENT_TIME: StageClock.EVENT_TIME,
    TimeMode.PROCESSING_TIME: StageClock.PROCESSING_TIME,
}


@dataclass(frozen=True)
class ProcessStage(KeyedStage):
    """groupBy(keys).transformWithState(processor), transformWithStateInPandas or applyInPandasWithState."""

    parallelism: int | None
    #: Expressions of the key columns; bound to the stage's input.
    key_columns: tuple[Column, ...]
    key_fields: tuple[StructField, ...]
    program: Program
    runner: type[Runner]
    #: The position among the user's columns of the one under a watermark; its field, for a window.
    event_time: tuple[int, str] | None = None
    initial: InitialState | None = None
    #: The only output mode that the query may have; None for any.
    output_mode: str | None = None
    #: The broadcast tables that the processor can read.
    tables: tuple[str, ...] = ()

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
        return run_in_tasks(place(rows, key_names(len(self.key_fields)), access), access, task, self.program.output)

    def apply_to_batch(self, rows: DataFrame, batch: Batch) -> DataFrame:
        """Returns the result on all rows at once, without any state before."""
        rows, task = self._prepared(rows, ONLY_EPOCH)
        return batch.run(rows, key_names(len(self.key_fields)), task, self.program.output)

    def _prepared(self, rows: DataFrame, context: EpochContext) -> tuple[DataFrame, _ProcessTask]:
        """Returns what tasks get, with the initial state if it is time for that, and what they do with it."""
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
        late_by = self._time_in_tasks()
        return rows, _ProcessTask(program, self.runner, late_by, united, emitted)

    def _initial(self, context: EpochContext) -> InitialState | None:
        """Returns the initial state in the first epoch of all, also if that is run again."""
        return self.initial if context.epoch == 0 else None

    def _time_in_tasks(self) -> tuple[int, str] | None:
        """Returns the column by which tasks tell late rows, and its field, if timers go by event time.

        They must not see rows any more that the watermark has passed.
        """
        if self.event_time is None or self.program.time_mode is not TimeMode.EVENT_TIME:
            return None
        position, field = self.event_time
        return len(self.key_fields) + position, field


@dataclass(frozen=True)
class EmittedTimes:
    """The event times of what a processor gives out: as in Spark, it must not be too late for the stages after it."""

    column: str

    @classmethod
    def of(cls, output: StructType) -> Self | None:
        """Returns None if no column of the output is one of event time."""
        return next((cls(output[position].name) for position, _ in watermarked(output.fields)), None)

    def checked(
        self, batches: Iterable[pa.RecordBatch], stage: str, watermark_ms: int | None
    ) -> Iterator[pa.RecordBatch]:
        """Gives the batches, up to one with a row that the watermark has passed."""
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
    runner: type[Runner]
    #: The column behind HASH with the time by which rows are late, and its field; None if none are.
    late_by: tuple[int, str] | None
    united: UnitedRows | None
    #: Only if its rows must not be older than the watermark.
    emitted: EmittedTimes | None

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: StageState, epoch: TaskEpoch
    ) -> Iterable[pa.RecordBatch]:
        initial: list[pa.RecordBatch] = []
        if self.united is not None:
            batches, initial = self.united.split(batches)
        if self.late_by is not None:
            timely = timely_rows(state, batches, self.late_by, epoch.late_watermark_ms)
            batches = [batch for batch in timely if batch.num_rows]
        times = self.program.times(epoch.processing_time_ms, epoch.watermark_ms)
        output = self.runner.run_task(batches, self.program, state, times, initial)
        if self.emitted is None:
            return output
        return self.emitted.checked(output, self.program.spec.name, epoch.late_watermark_ms)


@dataclass(frozen=True)
class InitialState:
    """What handleInitialState is given, before the first rows."""

    rows: DataFrame
    #: Expressions of the key columns; bound to the rows.
    key_columns: tuple[Column, ...]

    def united_with(self, rows: DataFrame, key_fields: Sequence[StructField]) -> DataFrame:
        """Returns key columns, and in one of two structs a row of the input or of the initial state."""
        keys = key_names(len(key_fields))
        initial_keys = [
            normalised(column, field.dataType).cast(field.dataType).alias(key)
            for column, field, key in zip(self.key_columns, key_fields, keys, strict=True)
        ]
        values = rows.columns[len(keys) :]
        # By position: names may occur twice, which the fields of a struct must not.
        numbered = rows.toDF(*keys, *_numbered(len(values)))
        row = F.struct(*[F.col(name) for name in _numbered(len(values))]).alias(_ROW)
        ours = numbered.select(*keys, row)
        width = len(self.rows.columns)
        named = self.rows.select(*initial_keys, "*").toDF(*keys, *_numbered(width))
        theirs = named.select(*keys, F.struct(*[F.col(name) for name in _numbered(width)]).alias(_INITIAL))
        nothing = [F.lit(None).cast(frame.schema[-1].dataType) for frame in (ours, theirs)]
        return ours.select(*keys, _ROW, nothing[1].alias(_INITIAL)).union(
            theirs.select(*keys, nothing[0].alias(_ROW), _INITIAL)
        )


@dataclass(frozen=True)
class UnitedRows:
    """How a task tells rows of the input from those of the initial state. Travels to the task."""

    keys: int
    names: tuple[str, ...]
    initial_names: tuple[str, ...]

    def split(self, batches: Sequence[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
        """Returns batches of input and of initial state, with HASH and the key in front."""
        rows, initial = [], []
        for batch in batches:
            is_initial = batch.column(self.keys + 2).is_valid()
            rows.append(self._unpacked(batch.filter(pc.invert(is_initial)), self.keys + 1, self.names))
            initial.append(self._unpacked(batch.filter(is_initial), self.keys + 2, self.initial_names))
        return [part for part in rows if part.num_rows], [part for part in initial if part.num_rows]

    def _unpacked(self, batch: pa.RecordBatch, position: int, names: Sequence[str]) -> pa.RecordBatch:
        front = list(range(self.keys + 1))
        columns = [*(batch.column(i) for i in front), *batch.column(position).flatten()]
        return pa.RecordBatch.from_arrays(columns, names=[*(batch.schema.names[i] for i in front), *names])


def _numbered(count: int) -> list[str]:
    return [f"_column{number}" for number in range(count)]
