"""What a task of a join does with its partition: split the rows by side, read, join, write, emit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.eventtime import EventTime
from anabranch.core.requests import Expiry
from anabranch.core.schemas import INDEX, POSITION, Op, StageSpec
from anabranch.engine.tasks import TaskEpoch
from anabranch.operators.grouping import group_rows, rows_of_other_keys
from anabranch.operators.join.core import Condition, Flags, JoinEpoch, JoinRows, Numbers, SideOutcome
from anabranch.operators.join.predicate import LEFT, RIGHT, ColumnPlace, Operand, Term, holds
from anabranch.operators.join.sides import VARIABLES, JoinType, RowTime, Side
from anabranch.operators.state import MAX_ROWS_PER_BATCH, as_changes, note_dropped
from anabranch.wire.routed import Answers, RoutedState


@dataclass(frozen=True)
class JoinTask:
    """Runs in Spark's tasks. The input's columns are HASH, the key, the side, and the slots that both sides share."""

    spec: StageSpec
    how: JoinType
    sides: tuple[Side, Side]
    #: What pairs with equal keys have to satisfy besides.
    condition: Term | None
    #: The columns that go out.
    output: pa.Schema

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: RoutedState, epoch: TaskEpoch
    ) -> Iterator[pa.RecordBatch]:
        timely = self._timely(batches, epoch)
        note_dropped(state, batches, timely)
        groups = group_rows(timely, self.spec.key)
        key_of_row = np.repeat(np.arange(len(groups.keys)), np.diff(groups.offsets))
        expiries = self._expiries(epoch)
        something = len(groups.keys) or expiries
        answers = state.ask(groups.keys, expiries=expiries) if something else Answers({}, {}, {})
        left, right = (self._rows(side, groups.rows, key_of_row, groups.keys, answers, epoch) for side in (LEFT, RIGHT))
        output = [rows.hopeless for rows in (left, right) if len(rows.hopeless)]
        joining = JoinEpoch(self.how, left.joining, right.joining, len(groups.keys), self._condition(left, right))
        for lefts, rights in joining.matches():
            output.append(self._joined(left, right, lefts, rights))
        if self.how is JoinType.LEFT_SEMI:
            output.append(self._joined(left, right, joining.first_matched(), None))
        changes: dict[str, pa.Table] = {}
        for side, rows in ((LEFT, left), (RIGHT, right)):
            outcome = joining.outcome(side)
            output.append(self._alone(side, left, right, outcome.alone))
            expired = answers.expired.get(VARIABLES[side])
            # The rows of the keys that were asked for have been read anyway.
            others = None if expired is None or not len(expired) else rows_of_other_keys(expired, groups.keys)
            if others is not None and self.sides[side].unmatched_go_out:
                unmatched = others.filter(pc.invert(others.columns[-1]))
                output.append(self._alone_of_other_keys(side, unmatched))
            table = self._changes(side, rows, outcome, others)
            if len(table):
                changes[VARIABLES[side]] = table
        state.write(changes)
        for table in output:
            yield from table.to_batches(MAX_ROWS_PER_BATCH)

    def _timely(self, batches: Sequence[pa.RecordBatch], epoch: TaskEpoch) -> list[pa.RecordBatch]:
        """Returns the rows without those that come after the watermark has passed them."""
        late_ms = epoch.late_watermark_ms
        if late_ms is None or not any(side.event_time for side in self.sides):
            return list(batches)
        timely = []
        for batch in batches:
            late = np.zeros(batch.num_rows, np.bool_)
            of_side = batch.column(1 + len(self.spec.key)).to_numpy()
            for number, side in enumerate(self.sides):
                if side.event_time is not None:
                    times = batch.column(self._input_column(side, side.event_time.place))
                    over = _is_over(times, side.event_time, late_ms * 1000)
                    late |= over & (of_side == number)
            timely.append(batch.filter(pa.array(~late)) if late.any() else batch)
        return timely

    def _input_column(self, side: Side, place: ColumnPlace) -> int:
        first_slot = 2 + len(self.spec.key)
        return 1 + place.position if place.key else first_slot + side.slots[place.position]

    def _expiries(self, epoch: TaskEpoch) -> list[Expiry]:
        if epoch.watermark_ms is None:
            return []
        expiries = []
        for number, side in enumerate(self.sides):
            if side.eviction is None:
                continue
            time, up_to = side.eviction.time, side.eviction.up_to_us(epoch.watermark_ms)
            whole = side.unmatched_go_out or side.eviction.harmful
            name = self._state_column(number, time.place)
            expiries.append(Expiry(VARIABLES[number], name, time.field, up_to, whole=whole))
        return expiries

    def _state_column(self, side: int, place: ColumnPlace) -> str:
        layout = self.spec.layouts[VARIABLES[side]]
        name: str = (layout.key if place.key else layout.value).names[place.position]
        return name

    def _rows(
        self, number: int, rows: pa.Table, key_of_row: Numbers, keys: pa.Table, answers: Answers, epoch: TaskEpoch
    ) -> _SideRows:
        """Returns the side's rows, stored and new."""
        side, layout = self.sides[number], self.spec.layouts[VARIABLES[number]]
        schema = pa.schema(list(layout.value)[: len(side.slots)])
        new = hopeless = schema.empty_table()
        new_keys = hopeless_keys = np.empty(0, np.int64)
        if len(rows):
            mine = np.flatnonzero(rows.column(0).to_numpy() == number)
            rows, new_keys = rows.take(mine), key_of_row[mine]
            columns = [rows.column(1 + slot).cast(field.type) for slot, field in zip(side.slots, schema, strict=True)]
            new = pa.Table.from_arrays(columns, schema=schema)
            if side.can_match is not None:
                can = pc.fill_null(rows.column(1 + side.can_match), False).to_numpy()
                hopeless, hopeless_keys = new.filter(pa.array(~can)), new_keys[~can]
                new, new_keys = new.filter(pa.array(can)), new_keys[can]
        stored = answers.found.get(VARIABLES[number], layout.answers.empty_table())
        held = pa.Table.from_arrays(stored.columns[2 : 2 + len(schema)], schema=schema)
        all_rows = _SideRows(
            keys=keys,
            key_of_row=np.concatenate([stored.column(INDEX).to_numpy().astype(np.int64), new_keys]),
            values=pa.concat_tables([held, new]).combine_chunks(),
            positions=stored.column(POSITION).to_numpy(),
            hopeless=self.output.empty_table(),
        )
        matched = np.zeros(len(all_rows.key_of_row), np.bool_)
        if side.unmatched_go_out:
            matched[: len(stored)] = stored.columns[-1].to_numpy()
            if len(hopeless_keys):
                lost = _SideRows(keys, hopeless_keys, hopeless, np.empty(0, np.int64), self.output.empty_table())
                all_rows.hopeless = self._alone(number, lost, lost, np.arange(len(hopeless_keys)))
        all_rows.joining = JoinRows(
            keys=all_rows.key_of_row,
            stored=len(stored),
            over=self._over(side, all_rows, epoch),
            matched=matched,
        )
        return all_rows

    def _over(self, side: Side, rows: _SideRows, epoch: TaskEpoch) -> Flags:
        if side.eviction is None or epoch.watermark_ms is None:
            return np.zeros(len(rows.key_of_row), np.bool_)
        times = rows.column(side.eviction.time.place, None)
        return _is_over(times, side.eviction.time, side.eviction.up_to_us(epoch.watermark_ms))

    def _condition(self, left: _SideRows, right: _SideRows) -> Condition:
        condition = self.condition
        if condition is None:
            return None

        def satisfied(lefts: Numbers, rights: Numbers) -> Flags:
            def column(operand: Operand) -> pa.Array:
                rows, numbers = (left, lefts) if operand.side == LEFT else (right, rights)
                return rows.column(operand.place, numbers)

            flags = holds(condition, column)
            if isinstance(flags, pa.Scalar):
                return np.full(len(lefts), flags.as_py())
            chosen: Flags = flags.to_numpy(zero_copy_only=False)
            return chosen

        return satisfied

    def _joined(self, left: _SideRows, right: _SideRows, lefts: Numbers | None, rights: Numbers | None) -> pa.Table:
        """Returns rows to give out: of each side those with these numbers, or nulls; left ones only of a semi join."""
        count = len(lefts if lefts is not None else rights if rights is not None else ())
        columns: list[pa.Array] = []
        for number, rows, numbers in ((LEFT, left, lefts), (RIGHT, right, rights)):
            if number == RIGHT and self.how is JoinType.LEFT_SEMI:
                break
            for place in self.sides[number].columns:
                if numbers is None:
                    columns.append(pa.nulls(count, self.output.field(len(columns)).type))
                else:
                    columns.append(rows.column(place, numbers))
        return pa.Table.from_arrays(columns, schema=self.output)

    def _alone(self, side: int, left: _SideRows, right: _SideRows, numbers: Numbers) -> pa.Table:
        return self._joined(
            left, right, numbers if side == LEFT else None, numbers if side == RIGHT else None
        )  # fmt: skip

    def _alone_of_other_keys(self, side: int, rows: pa.Table) -> pa.Table:
        """Returns unmatched rows that are over, as they come from the state."""
        layout = self.spec.layouts[VARIABLES[side]]
        width = len(layout.keys)
        held = _SideRows(
            keys=rows.select(list(range(width))).combine_chunks(),
            key_of_row=np.arange(len(rows)),
            values=rows.select(list(range(width + 1, width + 1 + len(self.sides[side].slots)))).combine_chunks(),
            positions=np.empty(0, np.int64),
            hopeless=self.output.empty_table(),
        )
        return self._alone(side, held, held, np.arange(len(rows)))

    def _changes(self, number: int, rows: _SideRows, outcome: SideOutcome, others: pa.Table | None) -> pa.Table:
        """Returns what the epoch does to the state of a side."""
        layout = self.spec.layouts[VARIABLES[number]]
        kept = outcome.kept
        positions = np.concatenate([rows.positions, np.empty(len(rows.key_of_row) - len(rows.positions), np.int64)])
        positions[kept] = _next_positions(rows.key_of_row, rows.positions, kept)
        changed = np.concatenate([kept, outcome.newly_matched, outcome.removed])
        ops = np.full(len(changed), Op.PUT, np.int8)
        ops[len(changed) - len(outcome.removed) :] = Op.DELETE
        keys = rows.keys.take(rows.key_of_row[changed])
        columns = [keys.column(0), pa.array(ops), *keys.columns[1:], pa.array(positions[changed])]
        columns += rows.values.take(changed).columns
        if self.sides[number].unmatched_go_out:
            columns.append(pa.array(rows.joining.matched[changed]))
        tables = [pa.table(columns, schema=layout.changes)]
        if others is not None:
            tables.append(as_changes(others, Op.DELETE, layout))
        return pa.concat_tables(tables)


@dataclass
class _SideRows:
    """Rows of a side in columns: those of the key by the key's number, the others as they are."""

    keys: pa.Table
    key_of_row: Numbers
    values: pa.Table
    #: Of the stored rows, which come first.
    positions: Numbers
    #: Output rows for those that cannot have a match.
    hopeless: pa.Table
    joining: JoinRows = None  # type: ignore[assignment]

    def column(self, place: ColumnPlace, numbers: Numbers | None) -> pa.Array:
        """Returns the column for some of the rows, or for all."""
        if place.key:
            keys = self.key_of_row if numbers is None else self.key_of_row[numbers]
            return _whole(self.keys.column(1 + place.position)).take(pa.array(keys))
        column = _whole(self.values.column(place.position))
        return column if numbers is None else column.take(pa.array(numbers))


def _is_over(times: pa.Array, time: RowTime, up_to_us: int) -> Flags:
    table = pa.table({"time": times})
    over: Flags = EventTime("time", time.field).is_over(table, up_to_us).to_numpy(zero_copy_only=False)
    return over


def _next_positions(key_of_row: Numbers, stored_positions: Numbers, kept: Numbers) -> Numbers:
    """Returns positions for the kept rows behind the stored rows of their keys. Kept rows of a key are neighbours."""
    if not len(kept):
        return np.empty(0, np.int64)
    keys = key_of_row[kept]
    following = np.zeros(int(key_of_row.max()) + 1, np.int64)
    np.maximum.at(following, key_of_row[: len(stored_positions)], stored_positions + 1)
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    rank = np.arange(len(kept)) - np.repeat(starts, np.diff(np.append(starts, len(kept))))
    positions: Numbers = following[keys] + rank
    return positions


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    return column
