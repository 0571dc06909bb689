"""Merging an epoch's partial aggregates with those of the state: whole columns at a time, with Spark's semantics."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.errors import EpochError

Ranks = npt.NDArray[np.int64]


class Merge(StrEnum):
    """How two partial aggregates of one key become one."""

    SUM = "sum"
    #: As SUM, but a sum that does not fit is null, with ANSI as well.
    TRY_SUM = "try_sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    #: That of the earliest epoch, and that of the latest.
    FIRST = "first"
    LAST = "last"
    #: Structs of a value and what it is ordered by.
    MIN_BY = "min_by"
    MAX_BY = "max_by"
    BIT_AND = "bit_and"
    BIT_OR = "bit_or"
    BIT_XOR = "bit_xor"


class Rule(Protocol):
    """A way of merging that has parameters or is long: a frozen dataclass, because it goes to the tasks."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        """Merges two columns without nulls."""


How = Merge | Rule


def merge_columns(how: How, old: pa.Array, new: pa.Array, *, ansi: bool) -> pa.Array:
    """Returns one column of merged partial aggregates. A null is an aggregate that has seen no value yet."""
    if old.null_count == len(old):
        return new
    if new.null_count == len(new):
        return old
    if not isinstance(how, Merge):
        return _merge_where_both(how, old, new)
    merged = _MERGES[how](old, new, ansi)
    if old.null_count == 0 and new.null_count == 0:
        return merged
    return pc.if_else(pc.is_null(old), new, pc.if_else(pc.is_null(new), old, merged))


def _merge_where_both(rule: Rule, old: pa.Array, new: pa.Array) -> pa.Array:
    if old.null_count == 0 and new.null_count == 0:
        return rule.merge(old, new)
    no_old, no_new = (side.is_null().to_numpy(zero_copy_only=False) for side in (old, new))
    both = np.flatnonzero(~no_old & ~no_new)
    merged = rule.merge(old.take(pa.array(both)), new.take(pa.array(both)))
    source = np.where(no_old, np.arange(len(old)) + len(old), np.arange(len(old)))
    source[both] = np.arange(len(both)) + 2 * len(old)
    return pa.concat_arrays([old, new, merged]).take(pa.array(source))


def null_where_overflowed(merged: pa.Array, total: pa.Array, seen: pa.Array) -> pa.Array:
    """Returns merged sums, null where one of the two that were merged is null although it has seen a value."""
    if total.null_count == 0:
        return merged
    has_values = pc.fill_null(seen.cast(pa.bool_()), False)
    return pc.if_else(pc.and_(pc.is_null(total), has_values), pa.scalar(None, merged.type), merged)


def _sum(old: pa.Array, new: pa.Array, ansi: bool) -> pa.Array:
    if pa.types.is_decimal(old.type):
        return _sum_decimals(old, new, ansi)
    if not (ansi and pa.types.is_integer(old.type)):
        return pc.add(old, new)
    try:
        return pc.add_checked(old, new)
    except pa.ArrowInvalid:
        raise EpochError(
            "[ARITHMETIC_OVERFLOW] A sum exceeds the range of its type. Cast the column to DECIMAL or DOUBLE before "
            "the aggregation, or set spark.sql.ansi.enabled to false to let it wrap around."
        ) from None


def _try_sum(old: pa.Array, new: pa.Array, _ansi: bool) -> pa.Array:
    if not pa.types.is_integer(old.type):
        return _sum(old, new, False)
    total = pc.add(old, new)
    # A sum that has wrapped around has another sign than both of its parts.
    fits = pc.greater_equal(pc.bit_wise_and(pc.bit_wise_xor(old, total), pc.bit_wise_xor(new, total)), 0)
    return pc.if_else(fits, total, pa.scalar(None, total.type))


def _sum_decimals(old: pa.Array, new: pa.Array, ansi: bool) -> pa.Array:
    exact = old.type
    wide = pa.decimal256(exact.precision + 1, exact.scale)
    total = pc.add(old.cast(wide), new.cast(wide))
    try:
        return total.cast(exact)
    except pa.ArrowInvalid:
        if ansi:
            raise EpochError(
                f"[ARITHMETIC_OVERFLOW] A sum exceeds {exact}. Cast the column to DOUBLE or to a DECIMAL of smaller "
                "precision before the aggregation, or set spark.sql.ansi.enabled to false to get NULL instead."
            ) from None
    return _null_where_too_large(total, exact)


def _null_where_too_large(total: pa.Array, exact: pa.DataType) -> pa.Array:
    """Returns NULL for decimal sums that do not fit, as Spark does without ANSI."""
    # Python integers are exact at any size, and this is the path of an overflow, not of every epoch.
    limit = 10 ** (exact.precision - exact.scale)
    fitting = [None if v is None or v.copy_abs() >= limit else v for v in total.to_pylist()]
    return pa.array(fitting, type=exact)


def _pick(old: pa.Array, new: pa.Array, better: Callable[[pa.Array, pa.Array], pa.Array]) -> pa.Array:
    """Returns the better of the two in each row; of equal ones the old. Spark orders NaN above every other number."""
    if pa.types.is_nested(old.type):
        # Arrow compares nothing nested; the order of numbers that stand for the values is the same.
        number = ranks(pa.concat_arrays([old, new]))
        return _choose(
            old, new, pc.fill_null(better(pa.array(number[len(old) :]), pa.array(number[: len(old)])), False)
        )
    choose_new = better(new, old)
    if pa.types.is_floating(old.type):
        old_nan, new_nan = pc.is_nan(old), pc.is_nan(new)
        nan_wins = better is pc.greater
        choose_new = pc.if_else(new_nan, nan_wins, pc.if_else(old_nan, not nan_wins, choose_new))
    return pc.if_else(choose_new, new, old)


def _pick_by(old: pa.Array, new: pa.Array, better: Callable[[Ranks, Ranks], npt.NDArray[np.bool_]]) -> pa.Array:
    """Returns of each row the struct with the better order; of equal ones the new."""
    number = ranks(pa.concat_arrays([old.field("by"), new.field("by")]))
    return _choose(old, new, pa.array(better(number[len(old) :], number[: len(old)])))


def _choose(old: pa.Array, new: pa.Array, choose_new: pa.Array) -> pa.Array:
    """Returns of each row one of the two, of any type."""
    rows = np.arange(len(old)) + len(old) * choose_new.to_numpy(zero_copy_only=False)
    return pa.concat_arrays([old, new]).take(pa.array(rows))


_MERGES: dict[Merge, Callable[[pa.Array, pa.Array, bool], pa.Array]] = {
    Merge.SUM: _sum,
    Merge.TRY_SUM: _try_sum,
    Merge.PRODUCT: lambda old, new, _ansi: pc.multiply(old, new),
    Merge.MIN: lambda old, new, _ansi: _pick(old, new, pc.less),
    Merge.MAX: lambda old, new, _ansi: _pick(old, new, pc.greater),
    Merge.FIRST: lambda old, _new, _ansi: old,
    Merge.LAST: lambda _old, new, _ansi: new,
    Merge.MIN_BY: lambda old, new, _ansi: _pick_by(old, new, np.less_equal),
    Merge.MAX_BY: lambda old, new, _ansi: _pick_by(old, new, np.greater_equal),
    Merge.BIT_AND: lambda old, new, _ansi: pc.bit_wise_and(old, new),
    Merge.BIT_OR: lambda old, new, _ansi: pc.bit_wise_or(old, new),
    Merge.BIT_XOR: lambda old, new, _ansi: pc.bit_wise_xor(old, new),
}


def ranks(values: pa.Array) -> Ranks:
    """Returns a number for each value: equal values have equal numbers, and smaller ones smaller numbers."""
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
    """Returns numbers with one zero: Spark keeps no -0.0 where it looks for equal values."""
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
    """Ranks lists element by element: lists that are over come before those that go on."""
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
    """Returns the ranks of tuples, from those of their members."""
    found = np.zeros(rows, dtype=np.int64)
    for column in columns:
        _, compact = np.unique(column, return_inverse=True)
        # Both are below the number of rows, so the product fits.
        _, found = np.unique(found * (rows + 1) + compact, return_inverse=True)
    return found.astype(np.int64)
