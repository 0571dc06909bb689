"""Where rows of state hold the time at which they are due."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

#: No time is before it, and none after the other.
FIRST_TIME, LAST_TIME = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class EventTime:
    """The column with the time at which rows are due, or a field of a struct column, such as a window's end."""

    column: str
    field: str

    def of(self, rows: pa.Table | pa.RecordBatch) -> pa.Array:
        """Returns the times: in microseconds, if they are timestamps."""
        column = rows.column(self.column)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if self.field:
            column = pc.struct_field(column, self.field)
        return column.cast(pa.int64())

    def is_over(self, rows: pa.Table | pa.RecordBatch, up_to: int) -> pa.Array:
        """Tells for each row whether its time is not after another; a row without one is never over."""
        return pc.fill_null(pc.less_equal(self.of(rows), up_to), False)
