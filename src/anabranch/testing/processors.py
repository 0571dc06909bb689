"""A StatefulProcessor under test, without a query: rows in, rows out, and time that passes when the test says so."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import xxhash
from pyspark import cloudpickle
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row, StructField, StructType, TimestampNTZType, TimestampType

from anabranch.core.errors import UnsupportedError
from anabranch.core.eventtime import EventTime
from anabranch.core.ids import StageNumber
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, StageSpec
from anabranch.operators.keys import arrow_schema, check_key_fields, nullable_field
from anabranch.operators.process.declare import checked_time_mode, declare_state
from anabranch.operators.process.frames import FrameRunner
from anabranch.operators.process.program import Program, TimeMode
from anabranch.operators.process.rows import RowRunner
from anabranch.operators.state import timely_rows
from anabranch.testing.steps import milliseconds
from anabranch.wire.routed import Answers
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores.options import StoreOptions

#: The id of a job that no other has.
_JOB = "0" * 32
_KEY_GROUPS = 16


class ProcessorTest:
    """Runs a processor on rows that a test sends, epoch by epoch, as a task does.

    Each epoch gets a fresh copy of the processor, so what it keeps in attributes instead of state is lost.

    >>> test = ProcessorTest(Totals(), "user string, amount bigint", ["user"], "user string, total bigint")
    >>> test.send([("ann", 3), ("ann", 4)])  # doctest: +SKIP
    [Row(user='ann', total=7)]
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        schema: StructType | str,
        key: Sequence[str],
        output: StructType | str,
        *,
        timeMode: str = "none",
        eventTime: str | None = None,
        initialState: tuple[StructType | str, Sequence[Any]] | None = None,
        pandas: bool = False,
        broadcast: Mapping[str, Mapping[Any, Any]] | None = None,
    ) -> None:
        """`eventTime` is the column under the watermark, by which rows are late with timeMode "eventTime"; it need not
        be named if only one column is a timestamp. `initialState` are the schema and the rows that handleInitialState
        gets in the first epoch; the key is in the columns of the same names. `broadcast` are the tables that
        ``handle.getBroadcast(name)`` gives: rows by their key. It can be changed.
        """
        self.broadcast = broadcast or {}
        self._schema = _struct(schema)
        unknown = [name for name in key if name not in self._schema.names]
        if unknown or not key:
            raise UnsupportedError(f"The key {list(key)} must be columns of the rows: {self._schema.names}.")
        fields = [self._schema[name] for name in key]
        check_key_fields(fields)
        mode = checked_time_mode(timeMode)
        self._late = _late_rows(self._schema, len(fields), eventTime) if mode is TimeMode.EVENT_TIME else None
        self._pickled: bytes = cloudpickle.dumps(processor)  # type: ignore[no-untyped-call]
        self._spec = declare_state(
            processor, arrow_schema(fields), StageNumber(0), "test", mode, [*self.broadcast]
        ).spec
        self._output = _struct(output)
        self._mode = mode
        self._runner = FrameRunner if pandas else RowRunner
        self._state = _MemoryState(self._spec)
        self._watermark_ms: int | None = None
        self._now_ms = time.time_ns() // 1_000_000
        self._initial = [] if initialState is None else self._initial_batches(*initialState, fields)

    def send(self, rows: Sequence[Any]) -> list[Row]:
        """Run an epoch with these rows, as tuples or dicts; return what the processor yields, for due timers as well.

        With timeMode "eventTime", rows that the watermark has passed are dropped.
        """
        batches = self._batches(rows, self._schema)
        return self._epoch(timely_rows(self._state, batches, self._late, self._watermark_ms))

    def advance_watermark(self, to: datetime | int) -> list[Row]:
        """Let event time pass, to a datetime or to milliseconds since 1970; return what timers yield because of it."""
        self._watermark_ms = max(milliseconds(to), self._watermark_ms or 0)
        return self._epoch([])

    def advance_clock(self, seconds: float) -> list[Row]:
        """Let processing time pass; return what timers yield because of it. Time stands still otherwise."""
        self._now_ms += round(seconds * 1000)
        return self._epoch([])

    def state(self, variable: str) -> list[Row]:
        """Return what is in a state variable, with its key, in no particular order."""
        if variable not in self._spec.layouts:
            raise UnsupportedError(f"There is no state variable {variable!r}, but {sorted(self._spec.layouts)}.")
        return _rows(self._state.scan(variable).drop_columns([HASH]))

    def _epoch(self, batches: list[pa.RecordBatch]) -> list[Row]:
        processor = cloudpickle.loads(self._pickled)
        tables = {name: _Table(rows) for name, rows in self.broadcast.items()}
        program = Program(self._spec, processor, self._output, time_mode=self._mode, tables=tables)
        times = program.times(self._now_ms, self._watermark_ms)
        output = list(self._runner.run_task(batches, program, self._state, times, self._initial))
        self._state.commit()
        self._initial = []
        return _rows(pa.Table.from_batches(output, schema=program.output_schema))

    def _batches(self, rows: Sequence[Any], schema: StructType) -> list[pa.RecordBatch]:
        """Make the rows as a task gets them: with the hash of their key, and the key, in front."""
        arrow = to_arrow_schema(schema, timezone="UTC")
        table = pa.Table.from_pylist([_named(row, arrow.names) for row in rows], schema=arrow)
        keys = [table.column(name) for name in self._spec.key.names]
        hashes = [_hash(key) for key in zip(*[column.to_pylist() for column in keys], strict=True)]
        names = [HASH, *(f"_key{i}" for i in range(len(keys))), *arrow.names]
        batches: list[pa.RecordBatch] = pa.table(
            [pa.array(hashes, pa.int64()), *keys, *table.columns], names=names
        ).to_batches()
        return batches

    def _initial_batches(
        self, schema: StructType | str, rows: Sequence[Any], key: Sequence[StructField]
    ) -> list[pa.RecordBatch]:
        struct = _struct(schema)
        found = {field.name: nullable_field(field) for field in struct.fields}
        if any(found.get(field.name) != nullable_field(field) for field in key):
            wanted = StructType(list(key)).simpleString()
            raise UnsupportedError(
                f"initialState has the columns {struct.simpleString()}, without the key {wanted}. Give the key's "
                "columns the same names and types as in the rows."
            )
        return self._batches(rows, struct)


@dataclass(frozen=True)
class _Table:
    """A broadcast table of a test."""

    given: Mapping[Any, Any]

    def rows(self, make: Any) -> Mapping[Any, Any]:
        del make
        return MappingProxyType(dict(self.given))


class _MemoryState:
    """The state of a stage as tasks see it, in the store that workers keep in memory."""

    def __init__(self, spec: StageSpec) -> None:
        stores = StoreOptions("memory")
        self._states = {
            name: VariableState(layout, _KEY_GROUPS, stores.open(_JOB, spec, name, _KEY_GROUPS))
            for name, layout in spec.layouts.items()
        }
        self._epoch = 0
        self._staged: Mapping[str, pa.Table] = {}

    def read(self, keys: pa.Table) -> Mapping[str, pa.Table]:
        return {name: pa.Table.from_batches([s.read(keys, self._epoch)]) for name, s in self._states.items()}

    def ask(
        self,
        keys: pa.Table,
        *,
        rest: bool = False,
        expiries: Sequence[Expiry] = (),
        due: Expiry | None = None,
    ) -> Answers:
        del rest
        expired = {expiry.variable: self._expired(expiry) for expiry in expiries}
        answers = Answers(found=dict(self.read(keys)), rest={}, expired=expired)
        if due is None:
            return answers
        known = self._states[due.variable].known_keys()
        known.add(keys)
        others = known.added(self._expired(due).select(keys.column_names))
        return replace(answers, due_keys=others, due=dict(self.read(others)))

    def _expired(self, expiry: Expiry) -> pa.Table:
        rows = self.scan(expiry.variable)
        return rows.filter(EventTime(expiry.column, expiry.field).is_over(rows, expiry.up_to))

    def note_late(self, rows: int) -> None:
        """Do nothing: what a processor drops is seen by what it does not give out."""

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        self._staged = changes

    def scan(self, variable: str) -> pa.Table:
        state = self._states[variable]
        return pa.Table.from_batches(list(state.scan(self._epoch)), schema=state.layout.rows).combine_chunks()

    def commit(self) -> None:
        self._epoch += 1
        for name, table in self._staged.items():
            self._states[name].add_layer(self._epoch, table)
            self._states[name].fold(self._epoch)
        self._staged = {}


def _late_rows(schema: StructType, keys: int, named: str | None) -> tuple[int, str]:
    """Return the column by which rows are late, and its field: the one that is named, else the only timestamp."""
    times = [field.name for field in schema.fields if isinstance(field.dataType, TimestampType | TimestampNTZType)]
    if named is None and len(times) == 1:
        (named,) = times
    if named is None or named not in schema.names:
        raise UnsupportedError(
            f"With timeMode 'eventTime', rows are late by a column of theirs, and {named!r} is none of "
            f"{schema.names}. Name the one that withWatermark has in the query: eventTime={(times or ['at'])[0]!r}."
        )
    is_window = isinstance(schema[named].dataType, StructType)
    return keys + schema.names.index(named), "end" if is_window else ""


def _struct(schema: StructType | str) -> StructType:
    struct: Any = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(struct, StructType):
        raise UnsupportedError(f"{schema!r} is not the schema of rows. Pass a StructType, or 'name type, …'.")
    return struct


def _named(row: Any, names: list[str]) -> Mapping[str, Any]:
    if isinstance(row, tuple | list) and len(row) == len(names):
        return dict(zip(names, row, strict=True))
    if not isinstance(row, Mapping) or set(row) != set(names):
        raise UnsupportedError(f"The row {row!r} does not have the columns {names}. Send tuples or dicts of them.")
    return row


def _hash(key: tuple[Any, ...]) -> int:
    return xxhash.xxh64(repr(key).encode()).intdigest() - 2**63


def _rows(table: pa.Table) -> list[Row]:
    make = Row(*table.column_names)
    return [make(*values) for values in zip(*[column.to_pylist() for column in table.columns], strict=True)]
