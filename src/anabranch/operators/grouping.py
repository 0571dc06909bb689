"""Brings the rows of each key together, in columns: the order of arrival is kept within a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.schemas import HASH

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Groups:
    """The input of a task by key: the rows of key number i are those from offsets[i] to offsets[i + 1]."""

    #: HASH and the key fields under their real names and types: one row for each key.
    keys: pa.Table
    #: The key fields as they came, which is how user code sees them: a timestamp has the session's time zone.
    given_keys: pa.Table
    #: The user's columns.
    rows: pa.Table
    offsets: Numbers

    def windows(self, rows_max: int) -> Iterator[tuple[int, int]]:
        """Runs of keys (first, end) with at most this many rows; a key with more makes a run of its own."""
        first, keys = 0, len(self.offsets) - 1
        while first < keys:
            end = int(np.searchsorted(self.offsets, self.offsets[first] + rows_max, side="right")) - 1
            end = max(end, first + 1)
            yield first, end
            first = end

    def in_key_order(self) -> Groups:
        """Sorts the keys in Spark's order: nulls first, NaN last. Leaves them as they are if they have no order."""
        order = _ascending(self.given_keys)
        if order is None:
            return self
        counts = np.diff(self.offsets)[order]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        # The rows of each key stay together, and in the order in which they came.
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][order] - offsets[:-1], counts)
        return Groups(self.keys.take(order), self.given_keys.take(order), self.rows.take(rows), offsets)


def group_rows(batches: Iterable[pa.RecordBatch], key: pa.Schema) -> Groups:
    """Groups batches with the columns HASH, those of the key, and the user's, in this order."""
    keys_schema = pa.schema([pa.field(HASH, pa.int64()), *key])
    parts = list(batches)
    if not any(part.num_rows for part in parts):
        return Groups(keys_schema.empty_table(), pa.table({}), pa.table({}), np.zeros(1, np.int64))
    table = pa.Table.from_batches(parts).combine_chunks()
    width = len(keys_schema)
    # By position: the key's columns go by other names on the way, as the user's may have the same.
    keys = pa.Table.from_arrays(
        [column.cast(field.type) for column, field in zip(table.columns[:width], keys_schema, strict=True)],
        schema=keys_schema,
    )
    given_keys = table.select(list(range(1, width)))
    rows = table.select(list(range(width, table.num_columns)))
    hashes = keys.column(0).to_numpy()
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    same_hash = hashes[1:] == hashes[:-1]
    if not same_hash.any():
        return Groups(keys, given_keys, rows, np.arange(len(hashes) + 1))
    keys, rows = keys.take(order), rows.take(order)
    new_key = ~same_hash
    differs = np.zeros(len(same_hash), np.bool_)
    for column in keys.columns[1:]:
        differs |= _differs_from_previous(column)
    if (same_hash & differs).any():
        # Two keys share a hash: rare enough to be slow.
        untangled = _untangled(hashes, keys)
        keys, rows, order = keys.take(untangled), rows.take(untangled), order[untangled]
        for column in keys.columns:
            new_key |= _differs_from_previous(column)
    offsets = np.concatenate(([0], np.flatnonzero(new_key) + 1, [len(hashes)])).astype(np.int64)
    given_keys = given_keys.take(order[offsets[:-1]])
    return Groups(keys.take(offsets[:-1]), given_keys, rows, offsets)


def _ascending(keys: pa.Table) -> Numbers | None:
    """Returns the order in which keys ascend; None if there is nothing to do, or there is no order of such keys."""
    if keys.num_rows < 2:
        return None
    columns = [part for column in keys.columns for part in _comparable(_one_array(column))]
    try:
        if len(columns) == 1:
            return pc.array_sort_indices(columns[0]).to_numpy().astype(np.int64)  # type: ignore[no-any-return]
        # Numbers in the order of the values: comparing rows of several columns takes Arrow much longer.
        ranks = [pc.rank(column, tiebreaker="dense").to_numpy() for column in columns]
    except pa.ArrowNotImplementedError:
        return None
    return np.lexsort(ranks[::-1])


def _comparable(values: pa.Array) -> Iterator[pa.Array]:
    """Columns that have, one after the other, the order of the values. Arrow would put nulls and NaN elsewhere."""
    if values.null_count:
        yield values.is_valid().cast(pa.int8())
    if pa.types.is_struct(values.type):
        for child in values.flatten():
            yield from _comparable(child)
        return
    if pa.types.is_floating(values.type):
        is_nan = pc.fill_null(pc.is_nan(values), False)
        if pc.any(is_nan).as_py():
            yield is_nan.cast(pa.int8())
    yield values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values


def _differs_from_previous(column: pa.ChunkedArray) -> Flags:
    """Tells for every row but the first whether it differs from the row before."""
    values = _one_array(column)
    return _differs(values.slice(1), values.slice(0, len(values) - 1))


def _differs(left: pa.Array, right: pa.Array) -> Flags:
    """Tells row by row whether two columns of one type differ. Nulls are equal, and so are NaNs."""
    null_left, null_right = _flags(left.is_null()), _flags(right.is_null())
    both = ~(null_left | null_right)
    if pa.types.is_struct(left.type):
        differs = np.zeros(len(left), np.bool_)
        for left_child, right_child in zip(left.flatten(), right.flatten(), strict=True):
            differs |= _differs(left_child, right_child)
    elif pa.types.is_nested(left.type):
        # Arrow does not compare lists. Arrays as keys are rare.
        pairs = zip(left.to_pylist(), right.to_pylist(), strict=True)
        differs = np.fromiter((frozen(a) != frozen(b) for a, b in pairs), np.bool_, len(left))
    else:
        differs = _flags(pc.fill_null(pc.not_equal(left, right), False))
        if pa.types.is_floating(left.type):
            nan_left, nan_right = (_flags(pc.fill_null(pc.is_nan(side), False)) for side in (left, right))
            differs &= ~(nan_left & nan_right)
    different: Flags = (differs & both) | (null_left != null_right)
    return different


def find_keys(keys: pa.Table, wanted: pa.Table) -> Numbers:
    """Returns for each wanted key its row among distinct keys, or -1. Both have HASH and the key fields."""
    if not keys.num_rows or not wanted.num_rows:
        return np.full(wanted.num_rows, -1, np.int64)
    hashes = keys.column(0).to_numpy()
    order = np.argsort(hashes, kind="stable")
    sought = wanted.column(0).to_numpy()
    places = order[np.minimum(np.searchsorted(hashes, sought, sorter=order), len(order) - 1)]
    found: Numbers = np.where(hashes[places] == sought, places, -1)
    candidates = np.flatnonzero(found >= 0)
    differs = np.zeros(len(candidates), np.bool_)
    for ours, theirs in zip(keys.columns[1:], wanted.columns[1:], strict=True):
        differs |= _differs(_one_array(ours.take(found[candidates])), _one_array(theirs.take(candidates)))
    if differs.any():
        # Two keys share a hash: rare enough to be slow.
        numbers = {frozen(key): number for number, key in enumerate(_tuples(keys))}
        odd = candidates[differs]
        found[odd] = [numbers.get(frozen(key), -1) for key in _tuples(wanted.take(odd))]
    return found


def rows_of_other_keys(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """Returns the rows whose key is not among these distinct keys. Both have HASH and the key fields."""
    return rows.filter(pa.array(find_keys(keys, rows.select(keys.column_names)) < 0))


def _tuples(keys: pa.Table) -> Iterator[tuple[object, ...]]:
    return zip(*[column.to_pylist() for column in keys.columns], strict=True)


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    # Too large for one array of its type, it stays in chunks.
    return pa.concat_arrays(values.chunks) if isinstance(values, pa.ChunkedArray) else values


def _untangled(hashes: Numbers, keys: pa.Table) -> Numbers:
    """Returns an order in which equal keys are neighbours, also where different keys have the same hash."""
    numbers: dict[object, int] = {}
    first_seen = np.empty(len(hashes), np.int64)
    for position, key in enumerate(_tuples(keys)):
        first_seen[position] = numbers.setdefault(frozen(key), position)
    return np.lexsort((first_seen, hashes))


def frozen(value: object) -> object:
    """Returns a hashable form of a key: NaN equals NaN, lists and structs are compared by what they hold."""
    if isinstance(value, float) and value != value:
        return "NaN", float
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return tuple((name, frozen(item)) for name, item in value.items())
    return value


def _flags(array: pa.Array) -> Flags:
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags
