"""What a task of a stateful stage does with rows and state: one read, one write, and rows that come too late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.eventtime import EventTime
from anabranch.core.requests import Expiry
from anabranch.core.schemas import Layout, Op
from anabranch.wire.routed import Answers

#: Rows of a batch that goes back to Spark. Spark turns batches into rows one at a time: larger ones cost fewer round
#: trips, smaller ones less memory.
MAX_ROWS_PER_BATCH = 65_536


class StageState(Protocol):
    """The state of one stage as one task sees it: that of the epoch before, and a place for its changes."""

    def read(self, keys: pa.Table) -> Mapping[str, pa.Table]:
        """Returns the stored entries of distinct keys (schema ``layout.keys``), by state variable.

        Each table has the schema ``layout.answers``: INDEX is the row of the key in ``keys``, and rows are
        ordered by INDEX, and by position within a list.
        """
        ...

    def ask(
        self,
        keys: pa.Table,
        *,
        rest: bool = False,
        expiries: Sequence[Expiry] = (),
        due: Expiry | None = None,
    ) -> Answers:
        """As `read`, and in the same exchange the rows of the partition that are due (schema ``layout.rows``), and the
        entries of other keys that have a row which is."""
        ...

    def note_late(self, rows: int) -> None:
        """Notes how many rows came too late and were dropped. Before the write."""
        ...

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        """Stages the changes of the task (schema ``layout.changes``), by state variable."""
        ...


def note_dropped(state: StageState, arrived: Iterable[pa.RecordBatch], timely: Iterable[pa.RecordBatch]) -> None:
    """Notes that of the rows that arrived, those that are not timely have been dropped."""
    state.note_late(sum(batch.num_rows for batch in arrived) - sum(batch.num_rows for batch in timely))


def timely_rows(
    state: StageState, batches: Sequence[pa.RecordBatch], time: tuple[int, str] | None, watermark_ms: int | None
) -> list[pa.RecordBatch]:
    """Returns the rows that the watermark has not passed, and notes how many others there were.

    The time is in a column, known by its position behind HASH, or in a field of it; if there is none, no row is late.
    """
    if time is None or watermark_ms is None:
        return list(batches)
    position, field = time
    timely = []
    for batch in batches:
        times = batch.select([1 + position])
        is_late = EventTime(times.schema.names[0], field).is_over(times, watermark_ms * 1000)
        timely.append(batch.filter(pc.invert(is_late)))
    note_dropped(state, batches, timely)
    return timely


def write_changes(state: StageState, layout: Layout, *, puts: Sequence[pa.Table], deletes: Sequence[pa.Table]) -> None:
    """Writes the changes of a stage with one state variable: rows of state to put, and others to delete."""
    tables = [(rows, Op.PUT) for rows in puts] + [(rows, Op.DELETE) for rows in deletes]
    changed = pa.concat_tables([as_changes(rows, op, layout) for rows, op in tables])
    state.write({layout.variable.name: changed} if len(changed) else {})


def as_changes(rows: pa.Table, op: int, layout: Layout) -> pa.Table:
    """Returns rows of state as changes that put or delete them."""
    ops = pa.array(np.full(len(rows), op, dtype=np.int8))
    return pa.table([rows.column(0), ops, *rows.columns[1:]], schema=layout.changes)


def state_rows_of(batches: Sequence[pa.RecordBatch], layout: Layout) -> pa.Table:
    """Returns what arrived at a task in the columns of rows of state, under whichever names it came."""
    if not batches:
        return layout.rows.empty_table()
    rows = pa.Table.from_batches(batches).combine_chunks()
    return rows.rename_columns(layout.rows.names).cast(layout.rows)
