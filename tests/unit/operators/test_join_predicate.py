"""Conditions on pairs of rows follow Spark's rules for nulls, NaN and overflow."""

from __future__ import annotations

import math
import pickle
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from anabranch.operators.join.predicate import LEFT, RIGHT, ColumnPlace, Constant, FunctionCall, Operand, Term, holds

NAN = math.nan
A, B = Operand(LEFT, ColumnPlace(False, 0)), Operand(RIGHT, ColumnPlace(True, 0))
NUMBERS = [None, -1.0, 0.0, 2.5, NAN]


def held(term: Term, lefts: list[Any], rights: list[Any], kind: pa.DataType) -> list[bool]:
    columns = {A: pa.array(lefts, kind, from_pandas=False), B: pa.array(rights, kind, from_pandas=False)}
    # Conditions travel to tasks.
    found: list[bool] = holds(pickle.loads(pickle.dumps(term)), columns.__getitem__).to_pylist()
    return found


def order(value: float) -> tuple[bool, float]:
    """Spark sorts NaN behind all numbers, and takes it to equal itself."""
    return (True, 0.0) if math.isnan(value) else (False, value)


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        ("equal", lambda a, b: a == b),
        ("less", lambda a, b: a < b),
        ("less_equal", lambda a, b: a <= b),
        ("greater", lambda a, b: a > b),
        ("greater_equal", lambda a, b: a >= b),
    ],
)
def test_comparisons_know_nan_and_null(function: str, rule: Any) -> None:
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    found = held(FunctionCall(function, (A, B)), [a for a, _ in pairs], [b for _, b in pairs], pa.float64())
    assert found == [a is not None and b is not None and rule(order(a), order(b)) for a, b in pairs]
    negated = held(
        FunctionCall("not", (FunctionCall(function, (A, B)),)),
        [a for a, _ in pairs],
        [b for _, b in pairs],
        pa.float64(),
    )
    assert negated == [a is not None and b is not None and not rule(order(a), order(b)) for a, b in pairs]


def test_a_null_safe_equality_takes_nulls_for_equal() -> None:
    found = held(FunctionCall("equal_null_safe", (A, B)), [None, None, 1, 1], [None, 1, 1, 2], pa.int64())
    assert found == [True, False, True, False]


def test_logic_has_three_values() -> None:
    values = [(a, b) for a in (True, False, None) for b in (True, False, None)]
    lefts, rights = [a for a, _ in values], [b for _, b in values]
    both, either = FunctionCall("and", (A, B)), FunctionCall("or", (A, B))
    assert held(FunctionCall("not", (both,)), lefts, rights, pa.bool_()) == [False in pair for pair in values]
    assert held(either, lefts, rights, pa.bool_()) == [True in pair for pair in values]


def test_whole_numbers_overflow_as_the_session_wants_it() -> None:
    largest, limit = 2**31 - 1, Constant(pa.scalar(0, pa.int32()))
    wrapping, checked = (FunctionCall("less", (FunctionCall("add", (A, B), ansi), limit)) for ansi in (False, True))
    assert held(wrapping, [largest], [1], pa.int32()) == [True]
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        held(checked, [largest], [1], pa.int32())


def test_the_time_between_two_rows_is_that_of_clocks_on_the_wall() -> None:
    # In Berlin, the night in between has one hour less.
    before, after = datetime(2026, 3, 28, 12), datetime(2026, 3, 29, 11)
    day = Constant(pa.scalar(timedelta(days=1), pa.duration("us")))
    for zone, is_a_day in (("Europe/Berlin", True), ("UTC", False)):
        term = FunctionCall("equal", (FunctionCall("subtract_timestamps", (A, B), zone), day))
        assert held(term, [after], [before], pa.timestamp("us", "UTC")) == [is_a_day]
