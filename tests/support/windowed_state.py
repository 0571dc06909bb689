"""State of one variable in a dict, and tasks of stages run against it, for tests of what the watermark does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from anabranch.core.eventtime import EventTime
from anabranch.core.requests import Expiry
from anabranch.core.schemas import OP, Op, StageSpec
from anabranch.engine.tasks import TaskEpoch
from anabranch.wire.routed import Answers

Row = tuple[Any, ...]
Task = Callable[..., Iterable[pa.RecordBatch]]


def hash_of(key: Row) -> int:
    """Only three different ones, so that keys share them."""
    return len(repr(key)) % 3


class WindowedState:
    """Answers as the workers do, and applies changes as they do."""

    def __init__(self, spec: StageSpec) -> None:
        ((self.name, self.layout),) = spec.layouts.items()
        self._width = len(self.layout.keys) + len(self.layout.subkey)
        #: By key and sub-key.
        self.rows: dict[Row, Row] = {}
        self.late_rows = 0

    def ask(self, keys: pa.Table, *, rest: bool = False, expiries: Sequence[Expiry] = ()) -> Answers:
        asked = tuples(keys)
        assert len(set(asked)) == len(asked), "keys are distinct"
        width = len(self.layout.keys)
        found = [
            (index, *row[width:]) for index, key in enumerate(asked) for row in self.rows.values() if row[:width] == key
        ]
        others = [row for row in self.rows.values() if row[:width] not in asked]
        everything = table_of(list(self.rows.values()), self.layout.rows)
        expired = {}
        for expiry in expiries:
            is_over = EventTime(expiry.column, expiry.field).is_over(everything, expiry.up_to)
            expired[expiry.variable] = everything.filter(is_over)
        return Answers(
            found={self.name: table_of(found, self.layout.answers)},
            rest={self.name: table_of(others, self.layout.rows)} if rest else {},
            expired=expired,
        )

    def note_late(self, rows: int) -> None:
        self.late_rows += rows

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        touched: set[Row] = set()
        for table in changes.values():
            assert table.schema.equals(self.layout.changes)
            for row in tuples(table):
                op, entry = row[1], (row[0], *row[2:])
                assert table.schema.names[1] == OP
                at = entry[: self._width]
                assert at not in touched, "one change for each entry"
                touched.add(at)
                if op == Op.PUT:
                    self.rows[at] = entry
                else:
                    del self.rows[at]


def run_epoch(
    task: Task, state: WindowedState, rows: Sequence[Row], schema: pa.Schema, *, late_s: int | None, now_s: int | None
) -> list[Row]:
    """What the task gives out for rows of HASH, key and other columns."""
    epoch = TaskEpoch(
        epoch=0,
        run=0,
        processing_time_ms=0,
        watermark_ms=None if now_s is None else now_s * 1000,
        late_watermark_ms=None if late_s is None else late_s * 1000,
    )
    batches = [batch for batch in table_of(rows, schema).to_batches() if batch.num_rows]
    return [row for batch in task(batches, state, epoch) for row in tuples(pa.Table.from_batches([batch]))]


def table_of(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    """The opposite of tuples."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table([_array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)


def tuples(table: pa.Table) -> list[Row]:
    """Rows with times in seconds; a window is the pair of its ends."""
    return list(zip(*[_plain(column) for column in table.columns], strict=True)) if table.num_columns else []


def _plain(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_struct(column.type):
        return [None if v is None else tuple(map(_seconds, v.values())) for v in column.to_pylist()]
    return [_seconds(value) for value in column.to_pylist()]


def _seconds(value: Any) -> Any:
    return int(value.timestamp()) if hasattr(value, "timestamp") else value


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_struct(kind):
        children = [_array([value[number] for value in values], kind.field(number).type) for number in range(2)]
        return pa.StructArray.from_arrays(children, fields=list(kind))
    if pa.types.is_timestamp(kind):
        return pa.array([value * 1_000_000 for value in values], kind)
    return pa.array(values, kind)
