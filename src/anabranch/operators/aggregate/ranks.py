"""The order of values of any type, as Spark has it: nulls first, NaN above every number, 0.0 equal to -0.0."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ranks = npt.NDArray[np.int64]


def ranks(values: pa.Array) -> Ranks:
    """A number for each value: equal values have equal numbers, and smaller ones smaller numbers."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_struct(values.type):
        found = _dense([ranks(child) for child in values.flatten()], len(values)) + 1
    elif pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        found = _of_lists(values)
    else:
        found = _of_plain(values)
    if values.null_count:
        found[values.is_null().to_numpy(zero_copy_only=False)] = 0
    return found


def normalised(values: pa.Array) -> pa.Array:
    """Numbers with one zero: Spark keeps no -0.0 where it looks for equal values."""
    return pc.add(values, pa.scalar(0.0, values.type)) if pa.types.is_floating(values.type) else values


def _of_plain(values: pa.Array) -> Ranks:
    if pa.types.is_null(values.type):
        return np.zeros(len(values), dtype=np.int64)
    encoded = normalised(values).dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank_of = np.empty(len(order), dtype=np.int64)
    rank_of[order] = np.arange(1, len(order) + 1)
    codes = encoded.indices.fill_null(0).to_numpy()
    return rank_of[codes] if len(order) else np.zeros(len(values), dtype=np.int64)


def _of_lists(values: pa.Array) -> Ranks:
    """Element by element: lists that are over come before those that go on."""
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
    elements = ranks(values.flatten())
    found = np.ones(len(values), dtype=np.int64)
    for position in range(int(lengths.max(initial=0))):
        column = np.full(len(values), -1, dtype=np.int64)
        longer = lengths > position
        column[longer] = elements[starts[longer] + position]
        found = _dense([found, column], len(values)) + 1
    return found


def _dense(columns: list[Ranks], rows: int) -> Ranks:
    """The ranks of tuples, from those of their members."""
    found = np.zeros(rows, dtype=np.int64)
    for column in columns:
        _, compact = np.unique(column, return_inverse=True)
        # Both are below the number of rows, so the product fits.
        _, found = np.unique(found * (rows + 1) + compact, return_inverse=True)
    return found.astype(np.int64)
