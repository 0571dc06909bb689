"""Rules that merge lists, moments and sketches in columns give what one pass over all values gives."""

import math
import statistics
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import EpochError
from anabranch.operators.aggregate.collected import Concatenated, Counted, Registers, TopCounted, United
from anabranch.operators.aggregate.merge import How, Merge, merge_columns, ranks
from anabranch.operators.aggregate.moments import Comoments, Moments
from anabranch.operators.aggregate.synopses import Bitmaps, CountMin

steady = settings(deadline=None, derandomize=True)
NUMBERS = st.none() | st.integers(-3, 3)
LISTS = st.lists(st.tuples(st.none() | st.lists(NUMBERS, max_size=5), st.none() | st.lists(NUMBERS, max_size=5)))
PAIR = pa.struct([pa.field("value", pa.int64()), pa.field("count", pa.int64())])


def merged(how: How, rows: list[tuple[Any, Any]], kind: pa.DataType) -> list[Any]:
    old, new = ([row[side] for row in rows] for side in (0, 1))
    result = merge_columns(how, pa.array(old, kind), pa.array(new, kind), ansi=True)
    assert result.type == kind
    found: list[Any] = result.to_pylist()
    return found


def both(rows: list[tuple[Any, Any]]) -> list[Any]:
    return [a if b is None else b if a is None else [*a, *b] for a, b in rows]


@steady
@given(LISTS)
def test_lists_are_joined_in_order(rows: list[tuple[Any, Any]]) -> None:
    assert merged(Concatenated(), rows, pa.list_(pa.int64())) == both(rows)


@steady
@given(LISTS)
def test_sets_have_every_element_once(rows: list[tuple[Any, Any]]) -> None:
    sets = [tuple(None if side is None else list(dict.fromkeys(side)) for side in row) for row in rows]
    found = merged(United(), sets, pa.list_(pa.int64()))
    assert [x and sorted(x, key=str) for x in found] == [x and sorted(set(x), key=str) for x in both(sets)]


def test_sets_of_doubles_have_one_zero_and_one_nan() -> None:
    found = merged(United(), [([0.0, math.nan], [-0.0, math.nan, 1.0])], pa.list_(pa.float64()))
    assert sorted(map(str, found[0])) == ["0.0", "1.0", "nan"]


@steady
@given(st.lists(st.tuples(st.lists(st.integers(-3, 3)), st.lists(st.integers(-3, 3))), min_size=1))
def test_counts_of_values_add_up(rows: list[tuple[list[int], list[int]]]) -> None:
    entries = [tuple(counted(side) for side in row) for row in rows]
    assert merged(Counted(), entries, pa.list_(PAIR)) == [counted(x) for x in both(rows)]


def counted(values: list[int]) -> list[dict[str, int]]:
    return [{"value": value, "count": count} for value, count in sorted(Counter(values).items())]


@steady
@given(st.lists(st.lists(st.integers(0, 8), max_size=30), min_size=1, max_size=6), st.integers(1, 9))
def test_frequent_values_are_counted_within_the_error(epochs: list[list[int]], capacity: int) -> None:
    kind = pa.struct([pa.field("items", pa.list_(PAIR)), pa.field("error", pa.int64())])
    state = {"items": [], "error": 0}
    for values in epochs:
        (state,) = merged(TopCounted(capacity), [(state, {"items": counted(values), "error": 0})], kind)
    true = Counter(value for values in epochs for value in values)
    found = {entry["value"]: entry["count"] for entry in state["items"]}
    assert len(found) <= capacity
    assert state["error"] * (capacity + 1) <= true.total()
    assert all(count - state["error"] <= found.get(value, 0) <= count for value, count in true.items())


@steady
@given(LISTS)
def test_registers_keep_the_highest_rank(rows: list[tuple[Any, Any]]) -> None:
    def packed(values: Any) -> Any:
        highest: dict[int, int] = {}
        for value in values:
            highest[(value or 0) % 4] = max(highest.get((value or 0) % 4, 0), (value or 0) + 9)
        return [64 * index + rank for index, rank in sorted(highest.items())]

    sides = [tuple(packed(side or []) for side in row) for row in rows]
    expected = [packed([*(a or []), *(b or [])]) for a, b in rows]
    assert merged(Registers(), sides, pa.list_(pa.int32())) == expected


FLOATS = st.lists(st.integers(-50, 50).map(float), max_size=12)


@steady
@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1))
def test_moments_of_parts_are_those_of_the_whole(rows: list[tuple[list[float], list[float]]]) -> None:
    kind = pa.struct([pa.field(name, pa.float64()) for name in ("n", "avg", "m2", "m3", "m4")])
    found = merged(Moments(), [tuple(moments(side) for side in row) for row in rows], kind)
    for got, values in zip(found, both(rows), strict=True):
        assert list(got.values()) == pytest.approx(list(moments(values).values()), rel=1e-9, abs=1e-6)


def moments(values: list[float]) -> dict[str, float]:
    mean = statistics.fmean(values) if values else 0.0
    powers = {f"m{p}": math.fsum((value - mean) ** p for value in values) for p in (2, 3, 4)}
    return {"n": float(len(values)), "avg": mean, **powers}


POINTS = st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), max_size=12)


@steady
@given(st.lists(st.tuples(POINTS, POINTS), min_size=1))
def test_comoments_of_parts_are_those_of_the_whole(rows: list[tuple[Any, Any]]) -> None:
    kind = pa.struct([pa.field(name, pa.float64()) for name in ("n", "xAvg", "yAvg", "ck", "xMk", "yMk")])
    found = merged(Comoments(), [tuple(comoments(side) for side in row) for row in rows], kind)
    for got, values in zip(found, both(rows), strict=True):
        assert list(got.values()) == pytest.approx(list(comoments(values).values()), rel=1e-9, abs=1e-6)


def comoments(points: list[tuple[int, int]]) -> dict[str, float]:
    x, y = (np.array([point[side] for point in points], dtype=float) for side in (0, 1))
    mean_x, mean_y = (float(side.mean()) if len(side) else 0.0 for side in (x, y))
    dx, dy = x - mean_x, y - mean_y
    sums = {"ck": float(dx @ dy), "xMk": float(dx @ dx), "yMk": float(dy @ dy)}
    return {"n": float(len(points)), "xAvg": mean_x, "yAvg": mean_y, **sums}


NESTED = st.none() | st.tuples(st.none() | st.sampled_from([0.0, -0.0, 1.5, math.nan]), st.none() | st.lists(NUMBERS))


def spark_order(value: Any) -> Any:
    """A key that sorts as Spark does: nulls first, NaN last, shorter lists first."""
    if value is None:
        return (0,)
    if isinstance(value, tuple | list):
        return (1, *map(spark_order, value))
    return (1, math.isnan(value), 0 if math.isnan(value) else value)


@steady
@given(st.lists(NESTED, max_size=12))
def test_ranks_are_in_the_order_of_spark(values: list[Any]) -> None:
    kind = pa.struct([pa.field("a", pa.float64()), pa.field("b", pa.list_(pa.int64()))])
    array = pa.array([None if v is None else {"a": v[0], "b": v[1]} for v in values], kind)
    found = ranks(array)
    for one in range(len(values)):
        for other in range(len(values)):
            less = spark_order(values[one]) < spark_order(values[other])
            assert bool(found[one] < found[other]) == less, (values[one], values[other])


@steady
@given(st.lists(st.tuples(NESTED, NESTED), min_size=1))
def test_the_largest_of_nested_values(rows: list[tuple[Any, Any]]) -> None:
    kind = pa.struct([pa.field("a", pa.float64()), pa.field("b", pa.list_(pa.int64()))])
    structs = [tuple(None if v is None else {"a": v[0], "b": v[1]} for v in row) for row in rows]
    found = [None if v is None else tuple(v.values()) for v in merged(Merge.MAX, structs, kind)]
    assert list(map(spark_order, found)) == [max(map(spark_order, row)) for row in rows]


LONGS = st.none() | st.integers(-(2**63), 2**63 - 1)


@steady
@given(st.lists(st.tuples(LONGS, LONGS)))
def test_attempted_sums_are_null_where_they_do_not_fit(rows: list[tuple[Any, Any]]) -> None:
    sums = [b if a is None else a if b is None else a + b for a, b in rows]
    fitting = [total if total is not None and -(2**63) <= total < 2**63 else None for total in sums]
    assert merged(Merge.TRY_SUM, rows, pa.int64()) == fitting


def test_what_is_first_and_last_and_has_the_largest_order() -> None:
    kind = pa.struct([pa.field("value", pa.string()), pa.field("by", pa.float64())])
    one, other = {"value": None, "by": 1.0}, {"value": "x", "by": math.nan}
    rows = [(one, other), (other, one), (None, one), (other, None)]
    assert [x["value"] for x in merged(Merge.FIRST, rows, kind)] == [None, "x", None, "x"]
    assert [x["value"] for x in merged(Merge.LAST, rows, kind)] == ["x", None, None, "x"]
    assert [x["value"] for x in merged(Merge.MAX_BY, rows, kind)] == ["x", "x", None, "x"]
    assert [x["value"] for x in merged(Merge.MIN_BY, rows, kind)] == [None, None, None, "x"]


def test_bitmaps_and_counters_of_other_shapes_do_not_meet() -> None:
    rows = [(b"\x01\x02", b"\x04\x02"), (None, b"\x01\x01"), (b"\xff\x00", b"\x0f\x00")]
    assert merged(Bitmaps(union=True), rows, pa.binary()) == [b"\x05\x02", b"\x01\x01", b"\xff\x00"]
    assert merged(Bitmaps(union=False), rows, pa.binary()) == [b"\x00\x02", b"\x01\x01", b"\x0f\x00"]
    for rule in (Bitmaps(union=True), CountMin()):
        with pytest.raises(EpochError, match="meet"):
            merged(rule, [(b"\x01", b"\x01\x02")], pa.binary())
