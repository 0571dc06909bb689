"""A join of two streams row by row, as plain as can be, and a join task with its state in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa

from anabranch.core.eventtime import EventTime
from anabranch.core.ids import StageNumber
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, StageSpec, VariableKind, VariableSpec
from anabranch.engine.tasks import TaskEpoch
from anabranch.operators.join.predicate import LEFT, RIGHT, ColumnPlace, FunctionCall, Operand
from anabranch.operators.join.sides import VARIABLES, Eviction, JoinType, RowTime, Side
from anabranch.operators.join.task import JoinTask
from anabranch.wire.routed import Answers
from anabranch.worker.state.rows import VariableCodec
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores.memory import MemoryStore

KEY_GROUPS = 4
TIME = pa.timestamp("us", "UTC")
#: Key, time in milliseconds, value, and whether a condition on the row alone holds.
Row = tuple[str | None, int, int, bool]


@dataclass(frozen=True)
class Case:
    """A kind of join: rows match if the keys are equal and the left value is not above the right one."""

    how: JoinType
    #: By side, how far the watermark is moved to tell which rows are over; None if they never are.
    offsets_ms: tuple[int | None, int | None]


@dataclass
class Waiting:
    row: Row
    matched: bool = False


@dataclass
class Model:
    """The definition: every new row looks at every row of the other side."""

    case: Case
    waiting: tuple[list[Waiting], list[Waiting]] = field(default_factory=lambda: ([], []))

    def epoch(
        self, rows: tuple[Sequence[Row], Sequence[Row]], watermark_ms: int | None, late_ms: int | None
    ) -> list[tuple[Any, ...]]:
        out: list[tuple[Any, ...]] = []
        for side in (LEFT, RIGHT):
            for row in rows[side]:
                if late_ms is not None and row[1] <= late_ms:
                    continue
                if self.case.how.keeps_unmatched(side) and not row[3]:
                    out.append(_pair(row, None) if side == LEFT else _pair(None, row))
                    continue
                self._arrive(side, Waiting(row), out)
        for side in (LEFT, RIGHT):
            self._evict(side, watermark_ms, out)
        return out

    def _arrive(self, side: int, new: Waiting, out: list[tuple[Any, ...]]) -> None:
        semi = self.case.how is JoinType.LEFT_SEMI
        for other in self.waiting[1 - side]:
            left, right = (new, other) if side == LEFT else (other, new)
            if left.row[0] != right.row[0] or left.row[2] > right.row[2] or (semi and left.matched):
                continue
            out.append(left.row[:3] if semi else _pair(left.row, right.row))
            left.matched = right.matched = True
        self.waiting[side].append(new)

    def _evict(self, side: int, watermark_ms: int | None, out: list[tuple[Any, ...]]) -> None:
        offset_ms = self.case.offsets_ms[side]
        if watermark_ms is None or offset_ms is None:
            return
        over = [each for each in self.waiting[side] if each.row[1] <= watermark_ms + offset_ms]
        self.waiting[side][:] = [each for each in self.waiting[side] if each.row[1] > watermark_ms + offset_ms]
        if self.case.how.keeps_unmatched(side):
            alone = [each.row for each in over if not each.matched]
            out += [_pair(row, None) if side == LEFT else _pair(None, row) for row in alone]

    def held(self, side: int) -> list[tuple[Any, ...]]:
        """The rows that wait; a left row of a semi join waits only for its first match."""
        semi = self.case.how is JoinType.LEFT_SEMI and side == LEFT
        return [each.row[:3] for each in self.waiting[side] if not (semi and each.matched)]


def _pair(left: Row | None, right: Row | None) -> tuple[Any, ...]:
    return (*(left[:3] if left else (None,) * 3), *(right[:3] if right else (None,) * 3))


class TaskHarness:
    """A join task and the state of a worker, without network: one partition has all key groups."""

    def __init__(self, case: Case) -> None:
        self.task = _task(case)
        self.states = {
            name: VariableState(layout, KEY_GROUPS, MemoryStore(VariableCodec(layout).shape(KEY_GROUPS)))
            for name, layout in self.task.spec.layouts.items()
        }
        self._epoch = 0
        self._written: Mapping[str, pa.Table] | None = None
        self.late_rows = 0

    def epoch(
        self, rows: tuple[Sequence[Row], Sequence[Row]], watermark_ms: int | None, late_ms: int | None
    ) -> list[tuple[Any, ...]]:
        facts = TaskEpoch(
            epoch=self._epoch, run=0, processing_time_ms=0, watermark_ms=watermark_ms, late_watermark_ms=late_ms
        )
        self._written = None
        batches = list(self.task(_batches(rows), self, facts))  # type: ignore[arg-type]
        assert self._written is not None, "a task writes once, even if nothing has changed"
        for name, table in self._written.items():
            assert table.schema.equals(self.states[name].layout.changes)
            self.states[name].add_layer(self._epoch, table)
        self._epoch += 1
        table = pa.Table.from_batches(batches, schema=self.task.output)
        return [tuple(_plain(value) for value in row.values()) for row in table.to_pylist()]

    def ask(self, keys: pa.Table, *, expiries: Sequence[Expiry] = ()) -> Answers:
        found = {
            name: pa.Table.from_batches([state.read(keys, self._epoch - 1)]) for name, state in self.states.items()
        }
        expired = {}
        for expiry in expiries:
            rows = self._scan(expiry.variable)
            over = EventTime(expiry.column, expiry.field).is_over(rows, expiry.up_to)
            expired[expiry.variable] = rows.filter(over)
        return Answers(found, {}, expired)

    def note_late(self, rows: int) -> None:
        self.late_rows += rows

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        assert self._written is None
        self._written = changes

    def held(self, side: int) -> list[tuple[Any, ...]]:
        rows = self._scan(VARIABLES[side]).select(["k", "t", "v"]).to_pylist()
        return [tuple(_plain(value) for value in row.values()) for row in rows]

    def _scan(self, name: str) -> pa.Table:
        return pa.Table.from_batches(self.states[name].scan(self._epoch - 1), schema=self.states[name].layout.rows)


def _task(case: Case) -> JoinTask:
    values = [pa.field("t", TIME), pa.field("v", pa.int64())]
    sides, variables = [], []
    for side, name in enumerate(VARIABLES):
        outer = case.how.keeps_unmatched(side)
        offset_ms = case.offsets_ms[side]
        time = RowTime(ColumnPlace(False, 0), "")
        eviction = None if offset_ms is None else Eviction(time, offset_ms, harmful=True)
        columns = (ColumnPlace(True, 0), ColumnPlace(False, 0), ColumnPlace(False, 1))
        sides.append(Side(columns, (0, 1), 2 if outer else None, outer, time, eviction))
        schema = pa.schema([*values, pa.field("matched", pa.bool_())] if outer else values)
        variables.append(VariableSpec(name, VariableKind.LIST, schema))
    key = pa.schema([pa.field("k", pa.string())])
    output = [pa.field("lk", pa.string()), pa.field("lt", TIME), pa.field("lv", pa.int64())]
    if case.how is not JoinType.LEFT_SEMI:
        output += [pa.field("rk", pa.string()), pa.field("rt", TIME), pa.field("rv", pa.int64())]
    condition = FunctionCall(
        "less_equal", (Operand(LEFT, ColumnPlace(False, 1)), Operand(RIGHT, ColumnPlace(False, 1)))
    )
    spec = StageSpec(StageNumber(1), "join", key, tuple(variables))
    return JoinTask(spec, case.how, (sides[LEFT], sides[RIGHT]), condition, pa.schema(output))


def _batches(rows: tuple[Sequence[Row], Sequence[Row]]) -> list[pa.RecordBatch]:
    """The rows of both sides as Spark would hand them over, in batches of a few."""
    listed = [(side, row) for side in (LEFT, RIGHT) for row in rows[side]]
    # Few hashes for many keys: a join must not rely on hashes being different.
    columns = {
        HASH: pa.array([0 if row[0] is None else len(row[0]) for _, row in listed], pa.int64()),
        "_key0": pa.array([row[0] for _, row in listed], pa.string()),
        "_side": pa.array([side for side, _ in listed], pa.int8()),
        "_slot0": pa.array([row[1] * 1000 for _, row in listed], pa.int64()).cast(TIME),
        "_slot1": pa.array([row[2] for _, row in listed], pa.int64()),
        "_slot2": pa.array([row[3] for _, row in listed], pa.bool_()),
    }
    return pa.table(columns).to_batches(max_chunksize=3) if listed else []


def _plain(value: Any) -> Any:
    """Times as milliseconds."""
    return round(value.timestamp() * 1000) if isinstance(value, datetime) else value
