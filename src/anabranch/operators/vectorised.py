"""The stage of a vectorised processor: one call of the user's function per task, on columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from anabranch.core.errors import EpochError, UnsupportedError
from anabranch.core.schemas import INDEX, OPERATOR, Op, StageSpec, VariableKind, VariableSpec
from anabranch.engine.batches import Batch
from anabranch.engine.stages import EpochContext
from anabranch.engine.tables import SharedTable
from anabranch.engine.tasks import TaskEpoch, place, run_in_tasks
from anabranch.operators.grouping import Groups, group_rows
from anabranch.operators.keys import RESERVED, arrow_schema, check_key_fields, key_names, with_keys
from anabranch.operators.stage import KeyedStage, StageName
from anabranch.operators.state import MAX_ROWS_PER_BATCH, StageState
from anabranch.operators.usercode import user_traceback
from anabranch.wire.routed import StageAccess


@dataclass(frozen=True)
class VectorisedStage(KeyedStage):
    """groupBy(keys).processInArrow(function) or processInPandas(function)."""

    spec: StageSpec
    parallelism: int | None
    #: Expressions of the key columns; bound to the stage's input.
    key_columns: tuple[Column, ...]
    key_fields: tuple[StructField, ...]
    process: Process
    output: StructType
    pandas: bool
    #: The broadcast tables that the function takes.
    tables: tuple[str, ...] = ()

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        del side, carry
        return with_keys(rows, self.key_columns, self.key_fields)

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        tables: dict[str, SharedTable] = {}
        if context.tables is not None:
            tables = {name: context.tables.shared(rows.sparkSession, name) for name in self.tables}
        return run_in_tasks(
            place(rows, key_names(len(self.key_fields)), access), access, self._task(tables), self.output
        )

    def apply_to_batch(self, rows: DataFrame, batch: Batch) -> DataFrame:
        """Returns the result on all rows at once, without any state before."""
        return batch.run(rows, key_names(len(self.key_fields)), self._task({}), self.output)

    def _task(self, tables: Mapping[str, SharedTable]) -> VectorisedTask:
        output = to_arrow_schema(self.output, timezone="UTC")
        return VectorisedTask(self.spec, self.process, output, self.pandas, tables)


def build_vectorised(
    name: StageName,
    rows: DataFrame,
    keys: Sequence[Column],
    process: Process,
    output: StructType | str,
    state: StructType | str,
    *,
    pandas: bool,
    tables: Sequence[str] = (),
) -> tuple[VectorisedStage, DataFrame]:
    """Makes the stage, and an empty DataFrame with the schema of its result."""
    method = "processInPandas" if pandas else "processInArrow"
    if not keys:
        raise UnsupportedError(f"{method} needs a key: groupBy(column, …).{method}(…).")
    if not callable(process):
        raise UnsupportedError(f"{method} needs a function of (keys, rows, state), not a {type(process).__name__}.")
    try:
        cloudpickle.dumps(process)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UnsupportedError(
            f"{method}: the function cannot be sent to tasks: {error}. Make connections and locks inside it."
        ) from error
    key_fields = rows.select(*keys).schema.fields
    check_key_fields(key_fields)
    if KEY in rows.columns:
        raise UnsupportedError(f"The input has a column {KEY!r}, a name that {method} uses itself. Rename it.")
    spark = rows.sparkSession
    sample = spark.createDataFrame([], output)
    fields = spark.createDataFrame([], state).schema.fields
    if not fields or {field.name for field in fields} & RESERVED:
        raise UnsupportedError(f"{method}: the state needs fields, other than {', '.join(sorted(RESERVED))}.")
    spec = StageSpec(
        number=name.number,
        name=name.name,
        key=arrow_schema(key_fields),
        variables=(VariableSpec(VARIABLE, VariableKind.VALUE, arrow_schema(fields)),),
        # The state of both forms is the same.
        traits={OPERATOR: "processInArrow"},
    )
    stage = VectorisedStage(
        spec,
        name.parallelism,
        tuple(keys),
        tuple(key_fields),
        process,
        sample.schema,
        pandas,
        tables=_taken(process, tables),
    )
    return stage, sample


def _taken(process: Process, tables: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the broadcast tables that the function has a parameter for."""
    try:
        parameters = inspect.signature(process).parameters.values()
    except (TypeError, ValueError):
        return ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(tables)
    names = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    return tuple(name for name in tables if name in names)


#: The state variable of a vectorised processor.
VARIABLE = "state"
#: In front of the rows that the function gets: the position of the row's key in the keys.
KEY = "_key"
_NULLABLE = {
    pa.int8(): pd.Int8Dtype(),
    pa.int16(): pd.Int16Dtype(),
    pa.int32(): pd.Int32Dtype(),
    pa.int64(): pd.Int64Dtype(),
    pa.bool_(): pd.BooleanDtype(),
}

Process = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class VectorisedTask:
    """What a task does with its partition: read the state of all keys, call the function, write and give out."""

    spec: StageSpec
    process: Process
    output: pa.Schema
    pandas: bool
    #: Broadcast tables by name, as of the epoch.
    tables: Mapping[str, SharedTable] = field(default_factory=dict)

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: StageState, epoch: TaskEpoch
    ) -> Iterator[pa.RecordBatch]:
        del epoch
        groups = group_rows(batches, self.spec.key)
        if not len(groups.keys):
            state.write({})
            return
        stored = state.read(groups.keys)[VARIABLE]
        had, before = self._aligned(stored, len(groups.keys))
        rows, after = self._call(groups, before)
        state.write({VARIABLE: self._changes(groups.keys, had, before, after)})
        yield from rows.combine_chunks().to_batches(MAX_ROWS_PER_BATCH)

    def _aligned(self, stored: pa.Table, keys: int) -> tuple[npt.NDArray[np.bool_], pa.Table]:
        """Returns which keys have state, and the state of each, null where there is none."""
        positions = np.full(keys, -1, dtype=np.int64)
        positions[stored.column(INDEX).to_numpy()] = np.arange(len(stored))
        rows = stored.drop_columns([INDEX]).rename_columns(self._state.names)
        return positions >= 0, rows.take(pa.array(positions, mask=positions < 0)).combine_chunks()

    def _call(self, groups: Groups, before: pa.Table) -> tuple[pa.Table, pa.Table]:
        counts = np.diff(groups.offsets)
        numbers = pa.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        rows = groups.rows.add_column(0, KEY, numbers)
        keys = groups.given_keys.rename_columns(self.spec.key.names)
        try:
            if self.pandas:
                given = keys.to_pandas(), rows.to_pandas(), before.to_pandas(types_mapper=_NULLABLE.get)
            else:
                given = keys, rows, before
            tables = {name: shared.table() for name, shared in self.tables.items()}
            if self.pandas:
                tables = {name: table.to_pandas(types_mapper=_NULLABLE.get) for name, table in tables.items()}
            result = self.process(*given, **tables)
        except Exception as error:
            raise EpochError(
                f"Stage {self.spec.name}: {_name_of(self.process)} failed: {type(error).__name__}: {error}\n"
                f"{user_traceback(error)}"
                "Correct the function or its input and start the query again: it resumes from its checkpoint."
            ) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._wrong(f"returned a {type(result).__name__}", "Return a tuple: the rows to emit, and the state")
        after = self._table(result[1], self._state, "state")
        if len(after) != len(keys):
            raise self._wrong(
                f"returned {len(after)} rows of state for {len(keys)} keys",
                "Return one row for each key, in the order of the keys, all null for a key without state",
            )
        return self._table(result[0], self.output, "rows"), after

    def _table(self, given: Any, schema: pa.Schema, what: str) -> pa.Table:
        try:
            if isinstance(given, pd.DataFrame):
                return pa.Table.from_pandas(given[schema.names], schema=schema, preserve_index=False)
            if isinstance(given, pa.RecordBatch):
                given = pa.Table.from_batches([given])
            if not isinstance(given, pa.Table):
                raise TypeError(f"it is a {type(given).__name__}, not a table")
            return given.select(schema.names).cast(schema).combine_chunks()
        except (KeyError, TypeError, ValueError) as error:
            raise self._wrong(
                f"returned {what} that cannot be used: {error}", f"Return the columns {schema.names} of these types"
            ) from error

    def _changes(self, keys: pa.Table, had: npt.NDArray[np.bool_], before: pa.Table, after: pa.Table) -> pa.Table:
        has = np.zeros(len(keys), np.bool_)
        changed = np.zeros(len(keys), np.bool_)
        for old, new in zip(before.columns, after.columns, strict=True):
            has |= new.is_valid().to_numpy()
            changed |= _differ(old, new)
        ops = np.where(has, Op.PUT, Op.DELETE).astype(np.int8)
        chosen = pa.array(np.flatnonzero((has & (changed | ~had)) | (had & ~has)))
        columns = [keys.column(0), pa.chunked_array([pa.array(ops)]), *keys.columns[1:], *after.columns]
        return pa.table([column.take(chosen) for column in columns], schema=self.spec.layouts[VARIABLE].changes)

    @property
    def _state(self) -> pa.Schema:
        return self.spec.variables[0].value

    def _wrong(self, what: str, advice: str) -> EpochError:
        return EpochError(f"Stage {self.spec.name}: {_name_of(self.process)} {what}. {advice}.")


def _differ(old: pa.ChunkedArray, new: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Tells for each row whether two columns differ; columns that Arrow does not compare count as different."""
    if pa.types.is_nested(old.type):
        return np.ones(len(old), np.bool_)
    differ = pc.fill_null(pc.not_equal(old, new), False).to_numpy()
    result: npt.NDArray[np.bool_] = differ | (old.is_valid().to_numpy() != new.is_valid().to_numpy())
    return result


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
