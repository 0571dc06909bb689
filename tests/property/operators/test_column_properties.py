"""Columns as the Python objects that user code sees: what Arrow itself makes of them, only sooner."""

import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.operators.process.tuples import python_values

#: Microseconds from the year 1 to the year 9999, with room for time zones at both ends.
FIRST_US, LAST_US = -62_135_500_000_000_000, 253_402_200_000_000_000
#: Where a float of seconds begins to lose microseconds.
EDGE_US = 2**32 * 1_000_000

moments = st.one_of(
    st.integers(FIRST_US, LAST_US),
    st.integers(-EDGE_US - 10, -EDGE_US + 10),
    st.integers(EDGE_US - 10, EDGE_US + 10),
    st.integers(1_761_400_000_000_000, 1_761_500_000_000_000),  # around an hour that comes twice in Berlin
)


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+05:30"])
@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.one_of(moments, st.none()) | moments, max_size=8),
    unit=st.sampled_from(["s", "ms", "us"]),
    chunked=st.booleans(),
)
@example(values=[EDGE_US - 1, 1], unit="us", chunked=False)
@example(values=[], unit="us", chunked=True)
def test_timestamps_are_those_that_arrow_gives(zone: str | None, values: list[Any], unit: str, chunked: bool) -> None:
    per_unit = {"s": 1_000_000, "ms": 1_000, "us": 1}[unit]
    counts = [None if value is None else value // per_unit for value in values]
    column: Any = pa.array(counts, pa.timestamp(unit, zone))
    if chunked:
        column = pa.chunked_array([column.slice(0, 3), column.slice(3)], column.type)
    expected = column.to_pylist()
    found = python_values(column)
    assert found == expected
    assert [each and (each.tzinfo, each.fold) for each in found] == [
        each and (each.tzinfo, each.fold) for each in expected
    ]
    assert all(each is None or type(each) is datetime.datetime for each in found)
