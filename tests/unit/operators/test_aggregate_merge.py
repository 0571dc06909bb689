"""Merging partial aggregates in columns gives what merging them one by one with Spark's rules gives."""

import math
from datetime import UTC
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import EpochError
from anabranch.operators.aggregate.merge import Merge, merge_columns, null_where_overflowed

LONGS = st.none() | st.integers(-(2**63), 2**63 - 1)
DOUBLES = st.none() | st.floats(allow_subnormal=False)
EXACT = pa.decimal128(38, 10)
MOST = Decimal("9999999999999999999999999999.9999999999")
DECIMALS = st.none() | st.decimals(-(10**27), 10**27, places=10) | st.sampled_from([MOST, MOST.copy_negate()])

#: The same examples every time, however slow the machine is.
steady = settings(deadline=None, derandomize=True)


def pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[Any, Any]]]:
    return st.lists(st.tuples(values, values), max_size=20)


def merged(how: Merge, rows: list[tuple[Any, Any]], kind: pa.DataType, *, ansi: bool = False) -> list[Any]:
    old, new = ([row[side] for row in rows] for side in (0, 1))
    result = merge_columns(how, pa.array(old, kind), pa.array(new, kind), ansi=ansi)
    assert result.type == kind
    found: list[Any] = result.to_pylist()
    return found


def one_by_one(rows: list[tuple[Any, Any]], merge: Any) -> list[Any]:
    return [b if a is None else a if b is None else merge(a, b) for a, b in rows]


@steady
@given(pairs(LONGS))
def test_sums_of_longs_wrap_around_without_ansi(rows: list[tuple[Any, Any]]) -> None:
    expected = one_by_one(rows, lambda a, b: (a + b + 2**63) % 2**64 - 2**63)
    assert merged(Merge.SUM, rows, pa.int64()) == expected


@steady
@given(pairs(LONGS))
def test_sums_of_longs_fail_with_ansi_where_they_do_not_fit(rows: list[tuple[Any, Any]]) -> None:
    sums = one_by_one(rows, lambda a, b: a + b)
    if all(value is None or -(2**63) <= value < 2**63 for value in sums):
        assert merged(Merge.SUM, rows, pa.int64(), ansi=True) == sums
    else:
        with pytest.raises(EpochError, match=r"ARITHMETIC_OVERFLOW.*Cast the column"):
            merged(Merge.SUM, rows, pa.int64(), ansi=True)


@steady
@given(pairs(DECIMALS))
def test_sums_of_decimals_are_exact_or_null_and_fail_with_ansi(rows: list[tuple[Any, Any]]) -> None:
    with localcontext(prec=60):
        sums = one_by_one(rows, lambda a, b: a + b)
    fitting = [None if value is None or value.copy_abs() > MOST else value for value in sums]
    assert merged(Merge.SUM, rows, EXACT) == fitting
    if fitting == sums:
        assert merged(Merge.SUM, rows, EXACT, ansi=True) == sums
    else:
        with pytest.raises(EpochError, match=r"ARITHMETIC_OVERFLOW.*exceeds decimal128\(38, 10\)"):
            merged(Merge.SUM, rows, EXACT, ansi=True)


@steady
@given(pairs(DOUBLES))
def test_nan_is_above_every_other_number(rows: list[tuple[Any, Any]]) -> None:
    largest = one_by_one(rows, lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else max(a, b))
    smallest = one_by_one(rows, lambda a, b: b if math.isnan(a) else a if math.isnan(b) else min(a, b))
    assert list(map(repr, map(zeroed, merged(Merge.MAX, rows, pa.float64())))) == list(map(repr, map(zeroed, largest)))
    assert list(map(repr, map(zeroed, merged(Merge.MIN, rows, pa.float64())))) == list(map(repr, map(zeroed, smallest)))


def zeroed(value: Any) -> Any:
    """Spark does not say which of 0.0 and -0.0 is the larger."""
    return 0.0 if value == 0 else value


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), st.text(max_size=3)),
        (pa.binary(), st.binary(max_size=3)),
        (pa.bool_(), st.booleans()),
        (pa.date32(), st.dates()),
        (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(UTC))),
        (pa.decimal128(20, 4), st.decimals(-(10**10), 10**10, places=4)),
        (pa.int8(), st.integers(-128, 127)),
    ],
)
def test_smallest_and_largest_of_every_type(kind: pa.DataType, values: Any) -> None:
    @steady
    @given(pairs(st.none() | values))
    def check(rows: list[tuple[Any, Any]]) -> None:
        # Spark compares strings by their UTF-8 bytes, which is the order of their code points.
        assert merged(Merge.MAX, rows, kind) == one_by_one(rows, max)
        assert merged(Merge.MIN, rows, kind) == one_by_one(rows, min)

    check()


@steady
@given(st.lists(st.tuples(DECIMALS, st.booleans() | st.none()), max_size=20))
def test_a_sum_that_has_overflowed_stays_null(rows: list[tuple[Any, Any]]) -> None:
    totals, seen = pa.array([row[0] for row in rows], EXACT), pa.array([row[1] for row in rows], pa.bool_())
    sums = pa.array([Decimal(1)] * len(rows), EXACT)
    expected = [None if total is None and has_values else Decimal(1) for total, has_values in rows]
    assert null_where_overflowed(sums, totals, seen).to_pylist() == expected
    counts = pa.array([None if value is None else int(value) * 3 for _, value in rows], pa.int64())
    assert null_where_overflowed(sums, totals, counts).to_pylist() == expected
