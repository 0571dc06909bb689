"""A plain model of a stage's state, and the input of a task, for the tests of process stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import xxhash
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, TimerValues
from pyspark.sql.types import StructType

from anabranch.core.ids import StageNumber
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, OP, Op, StageSpec, VariableKind
from anabranch.operators.process.declare import declare_state
from anabranch.operators.process.frames import FrameRunner
from anabranch.operators.process.program import FrameSettings, Program, TimeMode
from anabranch.operators.process.rows import RowRunner
from anabranch.wire.routed import Answers

Key = tuple[Any, ...]


class ModelState:
    """Keeps state in dicts, and applies changes row by row, as the layout says.

    Per variable and key: sub-key (nothing, the position, or the map key) and value, by something hashable that
    stands for the sub-key.
    """

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec
        self.entries: dict[str, dict[Key, dict[Key, tuple[Key, Key]]]] = {
            variable.name: {} for variable in spec.variables
        }
        #: By what stands for a key: the key.
        self.keys: dict[Key, Key] = {}
        self.reads: list[pa.Table] = []
        #: The keys that came along because something of theirs was due.
        self.due: list[pa.Table] = []
        self.late_rows = 0
        self.writes: list[Mapping[str, pa.Table]] = []

    def read(self, keys: pa.Table) -> Mapping[str, pa.Table]:
        assert keys.schema.equals(pa.schema([pa.field(HASH, pa.int64()), *self.spec.key]))
        wanted = _tuples(keys.columns)
        assert len(set(map(_plain, wanted))) == len(wanted), "keys are distinct"
        self.reads.append(keys)
        return {name: self._answer(name, wanted) for name in self.entries}

    def ask(
        self,
        keys: pa.Table,
        *,
        rest: bool = False,
        expiries: Sequence[Expiry] = (),
        due: Expiry | None = None,
    ) -> Answers:
        assert not rest
        expired = {expiry.variable: self._expired(expiry) for expiry in expiries}
        answers = Answers(found=dict(self.read(keys)), rest={}, expired=expired)
        if due is None:
            return answers
        asked = set(map(_plain, _tuples(keys.columns)))
        rows = self._expired(due).select(keys.column_names)
        others = {_plain(key): key for key in _tuples(rows.columns) if _plain(key) not in asked}
        columns = list(zip(*others.values(), strict=True)) or [()] * keys.num_columns
        due_keys = pa.table([pa.array(c, f.type) for c, f in zip(columns, keys.schema, strict=True)], keys.schema)
        self.due.append(due_keys)
        return replace(
            answers, due_keys=due_keys, due={name: self._answer(name, [*others.values()]) for name in self.entries}
        )

    def _expired(self, expiry: Expiry) -> pa.Table:
        layout = self.spec.layouts[expiry.variable]
        place = layout.rows.names.index(expiry.column)
        rows = [
            (*self.keys[key], *subkey, *value)
            for key, stored in self.entries[expiry.variable].items()
            for subkey, value in stored.values()
        ]
        due = [row for row in rows if row[place] is not None and row[place] <= expiry.up_to]
        columns = list(zip(*due, strict=True)) or [()] * len(layout.rows)
        arrays = [pa.array(c, field.type) for c, field in zip(columns, layout.rows, strict=True)]
        return pa.table(arrays, schema=layout.rows)

    def _answer(self, name: str, wanted: list[Key]) -> pa.Table:
        layout = self.spec.layouts[name]
        rows = []
        for index, key in enumerate(wanted):
            stored = self.entries[name].get(_plain(key), {})
            if layout.variable.kind is VariableKind.LIST:
                stored = dict(sorted(stored.items()))
            rows += [(index, *subkey, *value) for subkey, value in stored.values()]
        columns = list(zip(*rows, strict=True)) or [()] * len(layout.answers)
        arrays = [pa.array(c, field.type) for c, field in zip(columns, layout.answers, strict=True)]
        return pa.table(arrays, schema=layout.answers)

    def note_late(self, rows: int) -> None:
        self.late_rows += rows

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        self.writes.append(changes)
        for name, table in changes.items():
            assert table.num_rows, "a variable without changes is left out"
            self._apply(name, table)

    def _apply(self, name: str, table: pa.Table) -> None:
        layout = self.spec.layouts[name]
        assert table.schema.equals(layout.changes), f"{table.schema}\nis not\n{layout.changes}"
        table.validate(full=True)
        assert table.column_names[1] == OP
        first_value = len(layout.keys) + 1 + len(layout.subkey)
        changed: set[Key] = set()
        entries: set[tuple[Key, Key]] = set()
        for row in _tuples(table.columns):
            key, op = _plain((row[0], *row[2 : len(layout.keys) + 1])), row[1]
            self.keys[key] = (row[0], *row[2 : len(layout.keys) + 1])
            subkey, value = row[len(layout.keys) + 1 : first_value], row[first_value:]
            stored = self.entries[name].setdefault(key, {})
            if op == Op.CLEAR:
                assert key not in changed, "a clear comes first"
                assert set(row[len(layout.keys) + 1 :]) <= {None}
                stored.clear()
            elif op == Op.DELETE:
                assert (key, _plain(subkey)) not in entries, "an entry has one change"
                assert _plain(subkey) in stored, "only what is stored is deleted"
                del stored[_plain(subkey)]
            else:
                assert op == Op.PUT
                assert (key, _plain(subkey)) not in entries, "an entry has one change"
                stored[_plain(subkey)] = subkey, value
            changed.add(key)
            if op != Op.CLEAR:
                entries.add((key, _plain(subkey)))
            if not stored:
                del self.entries[name][key]

    def value(self, name: str, *key: Any) -> Key | None:
        values = [value for _, value in self._of(name, key)]
        return values[0] if values else None

    def elements(self, name: str, *key: Any) -> list[Key]:
        stored = sorted(self._of(name, key))
        assert [position for position, _ in stored] == [(position,) for position in range(len(stored))]
        return [value for _, value in stored]

    def map(self, name: str, *key: Any) -> list[tuple[Key, Key]]:
        return self._of(name, key)

    def _of(self, name: str, key: Key) -> list[tuple[Key, Key]]:
        found = [list(stored.values()) for at, stored in self.entries[name].items() if at[1:] == key]
        return found[0] if found else []


def batches_of(
    rows: Iterable[Mapping[str, Any]] | pa.Table,
    spec: StageSpec,
    *,
    rows_per_batch: int = 1000,
    hash_of: Any = None,
) -> list[pa.RecordBatch]:
    """Rows as a task gets them: HASH, the key's columns under names of their own, and the rows' columns."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))
    keys = [table.column(name) for name in spec.key.names]
    hash_of = hash_of or (lambda key: xxhash.xxh64(repr(key).encode()).intdigest() - 2**63)
    hashes = pa.array([hash_of(key) for key in _tuples(keys)], pa.int64())
    names = [HASH, *[f"_key{number}" for number in range(len(keys))], *table.column_names]
    whole = pa.Table.from_arrays([hashes, *keys, *table.columns], names=names)
    return whole.to_batches(max_chunksize=rows_per_batch)


def rows_in(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def _tuples(columns: list[pa.ChunkedArray]) -> list[Key]:
    return list(zip(*[column.to_pylist() for column in columns], strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((name, _plain(item)) for name, item in value.items())
    return "NaN" if value != value else value


def run_epochs(
    processor: StatefulProcessor,
    epochs: Iterable[Iterable[Mapping[str, Any]] | pa.Table],
    *,
    key: pa.Schema,
    output: StructType,
    frames: FrameSettings | None = None,
    hash_of: Any = None,
    time_mode: TimeMode = TimeMode.NONE,
    times: Sequence[int] = (),
    initial: Any = (),
) -> tuple[ModelState, list[list[dict[str, Any]]]]:
    """Runs a processor for some epochs, in pandas if there are settings for frames; the state and the output.

    With a time mode, the times of the epochs are the time of day and the watermark.
    """
    declared = declare_state(processor, key, StageNumber(1), "stage1", time_mode)
    spec = declared.spec
    state = ModelState(spec)
    program = Program(spec, processor, output, frames or FrameSettings(), time_mode, declared.asked)
    outputs = []
    for number, rows in enumerate(epochs):
        batches = batches_of(rows, spec, hash_of=hash_of) if rows else []
        first = batches_of(initial, spec, hash_of=hash_of) if initial and number == 0 else []
        values = TimerValues(times[number], times[number]) if times else None
        produced = list((FrameRunner if frames else RowRunner).run_task(batches, program, state, values, first))
        assert all(batch.schema.equals(program.output_schema) for batch in produced)
        outputs.append(rows_in(produced))
    assert len(state.writes) == len(outputs), "each epoch is one write"
    return state, outputs


def fields(**types: Any) -> StructType:
    """A schema by keyword: names of simple types, or Spark's types."""
    struct = StructType()
    for name, kind in types.items():
        struct.add(name, kind)
    return struct
