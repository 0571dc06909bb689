"""The aggregate stage: one row for each key and epoch from Spark, merged with the key's row in the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from anabranch.core.eventtime import EventTime
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, INDEX, StageSpec
from anabranch.engine.late import LateKind, carried_columns, project_and_carry, time_type
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import PARTITION, TaskEpoch, place, run_in_tasks
from anabranch.operators.aggregate.functions import AggregateFunction
from anabranch.operators.aggregate.merge import How, merge_columns, null_where_overflowed
from anabranch.operators.grouping import rows_of_other_keys
from anabranch.operators.keys import key_name, key_names, nullable_field
from anabranch.operators.stage import KeyedStage
from anabranch.operators.state import MAX_ROWS_PER_BATCH, state_rows_of, timely_rows, write_changes
from anabranch.wire.routed import Answers, RoutedState, StageAccess

#: The state variable of an aggregate stage.
VARIABLE = "aggregates"
#: The key of an aggregation over everything.
ALL = "_all"
#: Below this many rows in an epoch a second shuffle costs more than it saves.
_FEW_ROWS = 100_000
#: From this many rows of one key in an epoch on, it is worth while to combine them before they are moved.
_REPEATS_TO_COMBINE = 4


#: For each buffer how it is merged, and how far on the buffer is that tells whether it has seen a value.
Merges = tuple[tuple[How, int], ...]


class Emits(Enum):
    """Which rows an aggregation gives out."""

    #: Update mode: those that this epoch has changed.
    CHANGED = "changed"
    #: Append mode: those that the watermark has passed.
    OVER = "over"
    #: Complete mode.
    ALL = "all"


@dataclass(frozen=True)
class AggregateStage(KeyedStage):
    """groupBy(keys).agg(functions)."""

    spec: StageSpec
    parallelism: int | None
    #: Spark's fields of the key; the names are the user's.
    key_fields: tuple[StructField, ...]
    functions: tuple[AggregateFunction, ...]
    ansi: bool
    #: Expressions of the key columns; bound to the stage's input.
    key_columns: tuple[Column, ...]
    #: The key column with the event time, if there is a watermark on it; its field, for a window.
    event_time: tuple[int, str] | None

    @property
    def clock(self) -> StageClock:
        return StageClock.NONE if self.event_time is None else StageClock.EVENT_TIME

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        """Runs the stateless half: key columns and the inputs of the aggregates, under names of our own."""
        del side
        keys = [column.alias(key_name(i)) for i, column in enumerate(self.key_columns)]
        inputs = [
            argument.alias(_input(i, j))
            for i, function in enumerate(self.functions)
            for j, argument in enumerate(function.arguments)
        ]
        if carry:
            return project_and_carry(rows, [*keys, *inputs])
        return rows.select(*keys, *inputs) if keys or inputs else rows.select(F.lit(1).alias("_row"))

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        if self.event_time is None or complete:
            return ()
        position, field = self.event_time
        kind = time_type(self.key_fields[position].dataType, field)
        return (LateKind(key_name(position), field, kind, carried_columns(arriving)),)

    def variant(self, context: EpochContext) -> str:
        return "placed first" if self._places_first(context) else "combined first"

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        # In complete mode the result keeps everything, and nothing is late.
        event_time = None if context.complete else self.event_time
        emits = Emits.ALL if context.complete else Emits.OVER if context.append else Emits.CHANGED
        task = _MergeTask(self.spec, merges_of(self.functions), self.ansi, emits, event_time, self.task_schema.names)
        placed = self._placed_first(rows, access) if self._places_first(context) else self._combined_first(rows, access)
        return self.finished(run_in_tasks(placed, access, task, self.task_schema))

    def finished(self, merged: DataFrame) -> DataFrame:
        """Makes the result of keys and merged partial aggregates."""
        return merged if self._is_final else merged.select(*self.results)

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """Returns the state as the query's result would show it."""
        del variable
        return state.toDF(HASH, *key_names(len(self.key_fields)), *self.buffer_names).select(*self.results)

    def _places_first(self, context: EpochContext) -> bool:
        """Tells whether moving all rows costs less than combining them before: one shuffle instead of two.

        It does for few rows, and where keys hardly repeat. The epoch before tells.
        """
        rows, keys = context.previous_rows, context.previous_changes
        if rows is None or not self.key_columns:
            return False
        return rows <= _FEW_ROWS or rows < _REPEATS_TO_COMBINE * keys

    def _placed_first(self, rows: DataFrame, access: StageAccess) -> DataFrame:
        # Rows of a key are in one partition already, which Spark sees by PARTITION, so this needs no shuffle.
        names = key_names(len(self.key_fields))
        return place(rows, names, access).groupBy(PARTITION, HASH, *names).agg(*self.partials)

    def _combined_first(self, rows: DataFrame, access: StageAccess) -> DataFrame:
        if self.key_columns:
            combined = rows.groupBy(*key_names(len(self.key_fields))).agg(*self.partials)
        else:
            combined = rows.agg(*self.partials).select(F.lit(0).cast("byte").alias(key_name(0)), "*")
        return place(combined, key_names(len(self.key_fields)), access)

    # Columns and schemas are the same in every epoch, and each costs round trips to the JVM.

    @cached_property
    def partials(self) -> list[Column]:
        partials = []
        for i, function in enumerate(self.functions):
            inputs = [F.col(_input(i, j)) for j in range(len(function.arguments))]
            partials += [b.partial(inputs).cast(b.type).alias(_buffer(i, j)) for j, b in enumerate(function.buffers)]
        return partials

    @cached_property
    def results(self) -> list[Column]:
        keys = [
            F.col(key_name(i)).alias(field.name, metadata=field.metadata)
            for i, field in enumerate(self.key_fields)
            if self.key_columns
        ]
        results = [
            function.finish([F.col(_buffer(i, j)) for j in range(len(function.buffers))]).alias(function.output_name)
            for i, function in enumerate(self.functions)
        ]
        return [*keys, *results]

    @cached_property
    def _is_final(self) -> bool:
        """Whether tasks emit the result itself, under its own names, which saves Spark a projection."""
        names = [*(field.name for field in self.key_fields), *(function.output_name for function in self.functions)]
        plain = all(function.plain for function in self.functions)
        return plain and bool(self.key_columns) and len(set(names)) == len(names)

    @cached_property
    def task_schema(self) -> StructType:
        fields = []
        for i, field in enumerate(self.key_fields):
            name = field.name if self._is_final else key_name(i)
            fields.append(StructField(name, nullable_field(field).dataType, True, field.metadata))
        for i, function in enumerate(self.functions):
            for j, buffer in enumerate(function.buffers):
                fields.append(StructField(function.output_name if self._is_final else _buffer(i, j), buffer.type))
        return StructType(fields)

    @cached_property
    def buffer_names(self) -> list[str]:
        return [_buffer(i, j) for i, function in enumerate(self.functions) for j in range(len(function.buffers))]


@dataclass(frozen=True)
class _MergeTask:
    """What a task does with its partition: read, merge, write, emit."""

    spec: StageSpec
    merges: Merges
    ansi: bool
    emits: Emits
    #: The key column with the event time that a watermark passes; its field, for a window.
    event_time: tuple[int, str] | None
    #: Of the columns that go out.
    names: list[str]

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: RoutedState, epoch: TaskEpoch
    ) -> Iterator[pa.RecordBatch]:
        layout = self.spec.layouts[VARIABLE]
        # Keys that the watermark had passed before have been let go of, and must not come back.
        timely = timely_rows(state, batches, self.event_time, epoch.late_watermark_ms)
        partials = state_rows_of(timely, layout)
        expiry = self._expiry(epoch)
        every = self.emits is Emits.ALL
        keys = partials.select(layout.keys.names)
        if len(partials) or every or expiry:
            answers = state.ask(keys, rest=every, expiries=[expiry] if expiry else [])
        else:
            answers = Answers({}, {}, {})
        merged = self._merge(partials, answers.found)
        over, kept = layout.rows.empty_table(), merged
        if expiry is not None:
            # Passed only since the epoch before: such keys take these rows, and are over with them.
            is_over = EventTime(expiry.column, expiry.field).is_over(merged, expiry.up_to)
            over, kept = merged.filter(is_over), merged.filter(pc.invert(is_over))
        expired = answers.expired.get(VARIABLE, layout.rows.empty_table())
        write_changes(state, layout, puts=[kept], deletes=[expired])
        outputs = {
            Emits.CHANGED: lambda: [merged],
            Emits.OVER: lambda: [over, rows_of_other_keys(expired, over.select(layout.keys.names))],
            Emits.ALL: lambda: [merged, answers.rest.get(VARIABLE, layout.rows.empty_table())],
        }
        for table in outputs[self.emits]():
            yield from table.drop_columns([HASH]).rename_columns(self.names).to_batches(MAX_ROWS_PER_BATCH)

    def _expiry(self, epoch: TaskEpoch) -> Expiry | None:
        """Returns what the watermark has passed."""
        if self.event_time is None or epoch.watermark_ms is None:
            return None
        position, field = self.event_time
        # What is only let go of may be found later, when it has arrived: it makes no difference, late rows are dropped.
        whole = self.emits is Emits.OVER
        return Expiry(VARIABLE, self.spec.key.names[position], field, epoch.watermark_ms * 1000, whole=whole)

    def _merge(self, partials: pa.Table, answers: Mapping[str, pa.Table]) -> pa.Table:
        answer = answers.get(VARIABLE)
        if answer is None or not len(answer):
            return partials
        layout = self.spec.layouts[VARIABLE]
        positions = np.full(len(partials), -1, dtype=np.int64)
        positions[answer.column(INDEX).to_numpy()] = np.arange(len(answer))
        take = pa.array(positions, mask=positions < 0)
        first = len(layout.keys)
        old = [answer.column(1 + number).combine_chunks().take(take) for number in range(len(self.merges))]
        new = [partials.column(first + number).combine_chunks() for number in range(len(self.merges))]
        columns = [*partials.columns[:first], *merge_buffers(self.merges, old, new, ansi=self.ansi)]
        return pa.table(columns, schema=layout.rows)


def merges_of(functions: Sequence[AggregateFunction]) -> Merges:
    return tuple((buffer.merge, buffer.seen) for function in functions for buffer in function.buffers)


def merge_buffers(merges: Merges, old: Sequence[pa.Array], new: Sequence[pa.Array], *, ansi: bool) -> list[pa.Array]:
    """Merges all columns of partial aggregates, row by row."""
    columns = []
    for number, (how, seen) in enumerate(merges):
        merged = merge_columns(how, old[number], new[number], ansi=ansi)
        if seen:
            for total, values in ((old[number], old[number + seen]), (new[number], new[number + seen])):
                merged = null_where_overflowed(merged, total, values)
        columns.append(merged)
    return columns


def _input(i: int, j: int) -> str:
    return f"_in{i}_{j}"


def _buffer(i: int, j: int) -> str:
    return f"_buf{i}_{j}"
