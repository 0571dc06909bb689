"""The aggregate stage: one row for each key and epoch from Spark, merged with the key's row in the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from anabranch.core.eventtime import EventTime
from anabranch.core.schemas import HASH, INDEX, Op, StageSpec
from anabranch.engine.placement import PARTITION, place
from anabranch.engine.stages import Clock, EpochContext
from anabranch.engine.taskepoch import TaskEpoch
from anabranch.engine.tasks import run_in_tasks
from anabranch.operators.aggregate.functions import AggregateFunction
from anabranch.operators.aggregate.merge import How, merge_columns, null_where_overflowed
from anabranch.operators.keys import key_name, nullable_field
from anabranch.wire.routed import Answers, Expiry, RoutedState, StageAccess

#: The state variable of an aggregate stage.
VARIABLE = "aggregates"
#: The key of an aggregation over everything.
ALL = "_all"
#: Below so many rows in an epoch a second shuffle costs more than it saves.
_FEW_ROWS = 100_000
#: So many rows of one key in an epoch make it worth while to combine them before they are moved.
_REPEATS_TO_COMBINE = 4


@dataclass(frozen=True)
class AggregateStage:
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
    def clock(self) -> Clock:
        return Clock.NONE if self.event_time is None else Clock.EVENT_TIME

    def project(self, rows: DataFrame) -> DataFrame:
        """The stateless half: key columns and the inputs of the aggregates, under names of our own."""
        keys = [column.alias(key_name(i)) for i, column in enumerate(self.key_columns)]
        inputs = [
            argument.alias(_input(i, j))
            for i, function in enumerate(self.functions)
            for j, argument in enumerate(function.arguments)
        ]
        return rows.select(*keys, *inputs) if keys or inputs else rows.select(F.lit(1).alias("_row"))

    def variant(self, context: EpochContext) -> str:
        return "placed first" if self._places_first(context) else "combined first"

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        # In complete mode the result keeps everything, and nothing is late.
        event_time = None if context.complete else self.event_time
        merges = tuple((buffer.merge, buffer.seen) for function in self.functions for buffer in function.buffers)
        task = _MergeTask(self.spec, merges, self.ansi, context.complete, event_time, self._task_schema.names)
        placed = self._placed_first(rows, access) if self._places_first(context) else self._combined_first(rows, access)
        merged = run_in_tasks(placed, access, task, self._task_schema)
        return merged if self._is_final else merged.select(*self._results)

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """The state as the query's result would show it."""
        del variable
        return state.toDF(HASH, *self._key_names, *self._buffer_names).select(*self._results)

    def _places_first(self, context: EpochContext) -> bool:
        """Whether moving all rows costs less than combining them before: one shuffle instead of two.

        It does for few rows, and where keys hardly repeat. The epoch before tells.
        """
        rows, keys = context.previous_rows, context.previous_changes
        if rows is None or not self.key_columns:
            return False
        return rows <= _FEW_ROWS or rows < _REPEATS_TO_COMBINE * keys

    def _placed_first(self, rows: DataFrame, access: StageAccess) -> DataFrame:
        # Rows of a key are in one partition already, which Spark sees by PARTITION, so this needs no shuffle.
        return place(rows, self._key_names, access).groupBy(PARTITION, HASH, *self._key_names).agg(*self._partials)

    def _combined_first(self, rows: DataFrame, access: StageAccess) -> DataFrame:
        if self.key_columns:
            combined = rows.groupBy(*self._key_names).agg(*self._partials)
        else:
            combined = rows.agg(*self._partials).select(F.lit(0).cast("byte").alias(key_name(0)), "*")
        return place(combined, self._key_names, access)

    # Columns and schemas are the same in every epoch, and each costs round trips to the JVM.

    @cached_property
    def _partials(self) -> list[Column]:
        partials = []
        for i, function in enumerate(self.functions):
            inputs = [F.col(_input(i, j)) for j in range(len(function.arguments))]
            partials += [b.partial(inputs).cast(b.type).alias(_buffer(i, j)) for j, b in enumerate(function.buffers)]
        return partials

    @cached_property
    def _results(self) -> list[Column]:
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
    def _task_schema(self) -> StructType:
        fields = []
        for i, field in enumerate(self.key_fields):
            name = field.name if self._is_final else key_name(i)
            fields.append(StructField(name, nullable_field(field).dataType, True, field.metadata))
        for i, function in enumerate(self.functions):
            for j, buffer in enumerate(function.buffers):
                fields.append(StructField(function.output_name if self._is_final else _buffer(i, j), buffer.type))
        return StructType(fields)

    @cached_property
    def _key_names(self) -> list[str]:
        return [key_name(i) for i in range(len(self.key_fields))]

    @cached_property
    def _buffer_names(self) -> list[str]:
        return [_buffer(i, j) for i, function in enumerate(self.functions) for j in range(len(function.buffers))]


@dataclass(frozen=True)
class _MergeTask:
    """What a task does with its partition: read, merge, write, emit."""

    spec: StageSpec
    #: For each buffer how it is merged, and how far on the buffer is that tells whether it has seen a value.
    merges: tuple[tuple[How, int], ...]
    ansi: bool
    complete: bool
    #: The key column with the event time that a watermark passes; its field, for a window.
    event_time: tuple[int, str] | None
    #: Of the columns that go out.
    names: list[str]

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: RoutedState, epoch: TaskEpoch
    ) -> Iterator[pa.RecordBatch]:
        layout = self.spec.layouts[VARIABLE]
        partials = pa.Table.from_batches(batches).combine_chunks() if batches else layout.rows.empty_table()
        partials = partials.rename_columns(layout.rows.names).cast(layout.rows)
        expiry = self._expiry(epoch)
        if expiry is not None:
            # Keys that the watermark has passed have been let go of, and must not come back.
            late = EventTime(expiry.column, expiry.field).is_over(partials, expiry.up_to)
            partials = partials.filter(pc.invert(late))
        keys = partials.select(layout.keys.names)
        if len(partials) or self.complete or expiry:
            answers = state.ask(keys, rest=self.complete, expiries=[expiry] if expiry else [])
        else:
            answers = Answers({}, {}, {})
        merged = self._merge(partials, answers.found)
        changes = [_as_changes(merged, Op.PUT, layout.changes)]
        if VARIABLE in answers.expired:
            changes.append(_as_changes(answers.expired[VARIABLE], Op.DELETE, layout.changes))
        changed = pa.concat_tables(changes)
        state.write({VARIABLE: changed} if len(changed) else {})
        for table in (merged, answers.rest.get(VARIABLE, layout.rows.empty_table())):
            yield from table.drop_columns([HASH]).rename_columns(self.names).to_batches(_MAX_ROWS_PER_BATCH)

    def _expiry(self, epoch: TaskEpoch) -> Expiry | None:
        """What the watermark has passed."""
        if self.event_time is None or epoch.watermark_ms is None:
            return None
        position, field = self.event_time
        # What has not arrived is let go of later: nobody can tell, as rows that are late are dropped before.
        return Expiry(VARIABLE, self.spec.key.names[position], field, epoch.watermark_ms * 1000, whole=False)

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
        columns = partials.columns[:first]
        for number, (how, seen) in enumerate(self.merges):
            merged = merge_columns(how, old[number], new[number], ansi=self.ansi)
            if seen:
                for total, values in ((old[number], old[number + seen]), (new[number], new[number + seen])):
                    merged = null_where_overflowed(merged, total, values)
            columns.append(merged)
        return pa.table(columns, schema=layout.rows)


#: Spark turns record batches into rows one at a time: larger ones cost fewer round trips, smaller ones less memory.
_MAX_ROWS_PER_BATCH = 65_536


def _as_changes(rows: pa.Table, op: int, schema: pa.Schema) -> pa.Table:
    ops = pa.array(np.full(len(rows), op, dtype=np.int8))
    return pa.table([rows.column(0), ops, *rows.columns[1:]], schema=schema)


def _input(i: int, j: int) -> str:
    return f"_in{i}_{j}"


def _buffer(i: int, j: int) -> str:
    return f"_buf{i}_{j}"
