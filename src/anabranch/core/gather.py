"""Gathers rows of a table in any order, whatever the table's size.

Arrow joins the chunks of a column before it takes rows from it: that copies all of the column, and fails where strings
or binary values have more than 2 GiB together. Here a large table is gathered part by part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

#: Of the rows that are gathered at a time.
PART_BYTES = 16 * 1024 * 1024

Rows = npt.NDArray[Any]


def gathered(table: pa.Table, rows: Rows) -> pa.Table:
    """Returns the rows at these positions, in this order."""
    if table.nbytes <= PART_BYTES:
        return table.take(pa.array(rows))
    return pa.concat_tables([table.slice(0, 0), *gathered_in_parts(table, rows)])


def gathered_in_parts(table: pa.Table, rows: Rows) -> Iterator[pa.Table]:
    """Yields the same rows one part after the other, each of about PART_BYTES."""
    batches = table.to_batches()
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    step = max(1, int(PART_BYTES * len(table) // max(1, table.nbytes)))
    for start in range(0, len(rows), step):
        yield from _parts(batches, starts, rows[start : start + step])


def _parts(batches: list[pa.RecordBatch], starts: Rows, rows: Rows) -> Iterator[pa.Table]:
    batch_of = np.searchsorted(starts, rows, side="right") - 1
    taken, order = [], []
    for number in np.unique(batch_of).tolist():
        at = np.flatnonzero(batch_of == number)
        taken.append(batches[number].take(pa.array(rows[at] - starts[number])))
        order.append(at)
    if len(rows) > 1 and sum(part.nbytes for part in taken) > 4 * PART_BYTES:
        del taken  # these rows are larger than others
        for half in np.array_split(rows, 2):
            yield from _parts(batches, starts, half)
        return
    part = pa.Table.from_batches(taken)
    yield part if len(taken) == 1 else part.take(pa.array(np.argsort(np.concatenate(order))))
