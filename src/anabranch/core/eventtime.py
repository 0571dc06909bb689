"""Where a stage's key holds its event time."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class EventTime:
    """A key column, or a field of a struct column, such as a window's end."""

    column: str
    field: str

    def of(self, rows: pa.Table | pa.RecordBatch) -> pa.Array:
        """The event times in microseconds."""
        column = rows.column(self.column)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if self.field:
            column = pc.struct_field(column, self.field)
        return column.cast(pa.int64())

    def is_over(self, rows: pa.Table | pa.RecordBatch, up_to_us: int) -> pa.Array:
        """For each row whether its event time is not after a time; a row without one is never over."""
        return pc.fill_null(pc.less_equal(self.of(rows), up_to_us), False)
