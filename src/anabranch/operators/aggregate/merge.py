"""Merging an epoch's partial aggregates with those of the state: whole columns at a time, with Spark's semantics."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.errors import EpochError


class Merge(StrEnum):
    """How two partial aggregates of one key become one."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"


def merge_columns(how: Merge, old: pa.Array, new: pa.Array, *, ansi: bool) -> pa.Array:
    """One column of merged partial aggregates. A null is an aggregate that has seen no value yet."""
    if old.null_count == len(old):
        return new
    merged = _MERGES[how](old, new, ansi)
    if old.null_count == 0 and new.null_count == 0:
        return merged
    return pc.if_else(pc.is_null(old), new, pc.if_else(pc.is_null(new), old, merged))


def null_where_overflowed(merged: pa.Array, total: pa.Array, seen: pa.Array) -> pa.Array:
    """Merged sums, null where one of the two that were merged is null although it has seen a value."""
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
    """Spark without ANSI: a decimal sum that does not fit is NULL."""
    # Python integers are exact at any size, and this is the path of an overflow, not of every epoch.
    limit = 10 ** (exact.precision - exact.scale)
    fitting = [None if v is None or v.copy_abs() >= limit else v for v in total.to_pylist()]
    return pa.array(fitting, type=exact)


def _smaller(old: pa.Array, new: pa.Array, _ansi: bool) -> pa.Array:
    return _pick(old, new, pc.less)


def _larger(old: pa.Array, new: pa.Array, _ansi: bool) -> pa.Array:
    return _pick(old, new, pc.greater)


def _pick(old: pa.Array, new: pa.Array, better: Callable[[pa.Array, pa.Array], pa.Array]) -> pa.Array:
    """The better of the two in each row. Spark orders NaN above every other number."""
    choose_new = better(new, old)
    if pa.types.is_floating(old.type):
        old_nan, new_nan = pc.is_nan(old), pc.is_nan(new)
        nan_wins = better is pc.greater
        choose_new = pc.if_else(new_nan, nan_wins, pc.if_else(old_nan, not nan_wins, choose_new))
    return pc.if_else(choose_new, new, old)


_MERGES: dict[Merge, Callable[[pa.Array, pa.Array, bool], pa.Array]] = {
    Merge.SUM: _sum,
    Merge.MIN: _smaller,
    Merge.MAX: _larger,
}
