"""The aggregate stage: one row for each key and epoch from Spark, merged with the key's row in the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from anabranch.core.schemas import HASH, INDEX, Op, StageSpec
from anabranch.engine.placement import place, with_hash
from anabranch.engine.stages import EpochContext
from anabranch.engine.tasks import run_in_tasks
from anabranch.operators.aggregate.functions import AggregateFunction
from anabranch.operators.aggregate.merge import Merge, merge_columns
from anabranch.operators.keys import key_name, nullable_field
from anabranch.wire.routed import RoutedState, StageAccess

#: The state variable of an aggregate stage.
VARIABLE = "aggregates"
#: The key of an aggregation over everything.
ALL = "_all"


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

    def project(self, rows: DataFrame) -> DataFrame:
        """The stateless half: key columns and the inputs of the aggregates, under names of our own."""
        keys = [column.alias(key_name(i)) for i, column in enumerate(self.key_columns)]
        inputs = [
            argument.alias(_input(i, j))
            for i, function in enumerate(self.functions)
            for j, argument in enumerate(function.arguments)
        ]
        return rows.select(*keys, *inputs) if keys or inputs else rows.select(F.lit(1).alias("_row"))

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        merged = run_in_tasks(
            place(with_hash(self._pre_aggregate(rows), self._key_names()), access),
            access,
            _MergeTask(
                self.spec, tuple(b.merge for f in self.functions for b in f.buffers), self.ansi, context.complete
            ),
            self._task_schema(),
        )
        return self._finish(merged)

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """The state as the query's result would show it."""
        del variable
        return self._finish(state.toDF(HASH, *self._key_names(), *self._buffer_names()))

    def _pre_aggregate(self, rows: DataFrame) -> DataFrame:
        partials = []
        for i, function in enumerate(self.functions):
            inputs = [F.col(_input(i, j)) for j in range(len(function.arguments))]
            partials += [b.partial(inputs).cast(b.type).alias(_buffer(i, j)) for j, b in enumerate(function.buffers)]
        if not self.key_columns:
            return rows.agg(*partials).select(F.lit(0).cast("byte").alias(key_name(0)), "*")
        return rows.groupBy(*self._key_names()).agg(*partials)

    def _task_schema(self) -> StructType:
        fields = [StructField(HASH, LongType())]
        fields += [StructField(key_name(i), nullable_field(field).dataType) for i, field in enumerate(self.key_fields)]
        fields += [
            StructField(_buffer(i, j), buffer.type)
            for i, function in enumerate(self.functions)
            for j, buffer in enumerate(function.buffers)
        ]
        return StructType(fields)

    def _finish(self, merged: DataFrame) -> DataFrame:
        keys = [
            F.col(key_name(i)).alias(field.name, metadata=field.metadata)
            for i, field in enumerate(self.key_fields)
            if field.name != ALL
        ]
        results = [
            function.finish([F.col(_buffer(i, j)) for j in range(len(function.buffers))]).alias(function.output_name)
            for i, function in enumerate(self.functions)
        ]
        return merged.select(*keys, *results)

    def _key_names(self) -> list[str]:
        return [key_name(i) for i in range(len(self.key_fields))]

    def _buffer_names(self) -> list[str]:
        return [_buffer(i, j) for i, function in enumerate(self.functions) for j in range(len(function.buffers))]


@dataclass(frozen=True)
class _MergeTask:
    """What a task does with its partition: read, merge, write, emit."""

    spec: StageSpec
    merges: tuple[Merge, ...]
    ansi: bool
    complete: bool

    def __call__(self, batches: Sequence[pa.RecordBatch], state: RoutedState) -> Iterator[pa.RecordBatch]:
        layout = self.spec.layouts[VARIABLE]
        partials = pa.Table.from_batches(batches).combine_chunks() if batches else layout.rows.empty_table()
        partials = partials.rename_columns(layout.rows.names).cast(layout.rows)
        keys = partials.select(layout.keys.names)
        rest = layout.rows.empty_table()
        if self.complete:
            answers, rests = state.read_all(keys)
            rest = rests.get(VARIABLE, rest)
        elif len(partials):
            answers = state.read(keys)
        else:
            answers = {}
        merged = self._merge(partials, answers)
        state.write({VARIABLE: _as_changes(merged, layout.changes)} if len(merged) else {})
        for table in (merged, rest):
            yield from table.to_batches(max_chunksize=_MAX_ROWS_PER_BATCH)

    def _merge(self, partials: pa.Table, answers: Mapping[str, pa.Table]) -> pa.Table:
        answer = answers.get(VARIABLE)
        if answer is None or not len(answer):
            return partials
        layout = self.spec.layouts[VARIABLE]
        positions = np.full(len(partials), -1, dtype=np.int64)
        positions[answer.column(INDEX).to_numpy()] = np.arange(len(answer))
        take = pa.array(positions, mask=positions < 0)
        first = len(layout.keys)
        columns = partials.columns[:first]
        for number, merge in enumerate(self.merges):
            old = answer.column(1 + number).combine_chunks().take(take)
            new = partials.column(first + number).combine_chunks()
            columns.append(merge_columns(merge, old, new, ansi=self.ansi))
        return pa.table(columns, schema=layout.rows)


#: Spark turns record batches into rows one at a time: larger ones cost fewer round trips, smaller ones less memory.
_MAX_ROWS_PER_BATCH = 65_536


def _as_changes(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    op = pa.array(np.full(len(rows), Op.PUT, dtype=np.int8))
    return pa.table([rows.column(0), op, *rows.columns[1:]], schema=schema)


def _input(i: int, j: int) -> str:
    return f"_in{i}_{j}"


def _buffer(i: int, j: int) -> str:
    return f"_buf{i}_{j}"
