"""Which rows of state belong to which keys, in columns: nulls are equal to each other, and so are NaNs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.schemas import HASH

Flags = npt.NDArray[np.bool_]


def rows_of_other_keys(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """The rows whose key is not among the keys, which are distinct and have HASH as a column, as the rows have."""
    if not len(rows) or not len(keys):
        return rows
    hashes, known = rows.column(HASH).to_numpy(), keys.column(HASH).to_numpy()
    order = np.argsort(known, kind="stable")
    known = known[order]
    belongs = np.zeros(len(rows), np.bool_)
    # Different keys may have the same hash: then there is more than one candidate for a row.
    candidates = np.searchsorted(known, hashes, side="left")
    last = np.searchsorted(known, hashes, side="right")
    while (left := np.flatnonzero(candidates < last)).size:
        matched = keys.take(order[candidates[left]])
        found = rows.take(left)
        same = np.ones(len(left), np.bool_)
        for name in keys.column_names:
            same &= equal(_whole(found.column(name)), _whole(matched.column(name)))
        belongs[left[same]] = True
        candidates[left] += 1
    return rows.filter(pa.array(~belongs))


def equal(left: pa.Array, right: pa.Array) -> Flags:
    """For each row whether two columns of one type have the same value."""
    null_left, null_right = _flags(left.is_null()), _flags(right.is_null())
    if pa.types.is_struct(left.type):
        same = np.ones(len(left), np.bool_)
        for one, other in zip(left.flatten(), right.flatten(), strict=True):
            same &= equal(one, other)
    else:
        same = _flags(pc.fill_null(pc.equal(left, right), False))
        if pa.types.is_floating(left.type):
            same |= _flags(pc.fill_null(pc.and_(pc.is_nan(left), pc.is_nan(right)), False))
    return np.where(null_left | null_right, null_left & null_right, same)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _flags(array: pa.Array) -> Flags:
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags
