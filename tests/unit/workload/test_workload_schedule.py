"""Arrival times and epochs: exact rows, catching up, and the same times again after a restart."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import CheckpointError
from anabranch.workload.schedule import Position, Schedule, StreamPace

START_US = 1_700_000_000_000_000
SECOND_US = 1_000_000

rates = st.floats(0.01, 5e6, allow_nan=False)


@given(rate=rates, waited_us=st.integers(0, 10**11), origin_row=st.integers(0, 10**9))
def test_a_row_is_due_when_its_arrival_time_has_come_and_not_before(
    rate: float, waited_us: int, origin_row: int
) -> None:
    schedule = Schedule(origin_row, START_US, rate)
    now_us = START_US + waited_us
    due = schedule.due(now_us)
    last, following = schedule.times_us(due - 1, 2)
    # Times are cut to whole microseconds, and a rate is a binary fraction.
    assert last <= now_us + 1
    assert following >= now_us - 1


def test_the_first_row_arrives_with_the_start() -> None:
    schedule = StreamPace(rows_per_second=10).beginning(START_US).schedule
    assert schedule.due(START_US) == 1
    assert schedule.due(START_US - 1) == 0
    np.testing.assert_array_equal(schedule.times_us(0, 3), START_US + np.array([0, 100_000, 200_000]))


def test_epochs_take_exactly_their_rows_until_the_end() -> None:
    pace = StreamPace(rows_per_epoch=400, rows=1000)
    position = pace.beginning(START_US)
    ends = []
    for epoch in range(5):
        position = pace.next_position(position, now_us=START_US + epoch, rows_max=7)
        ends.append(position.row)
    assert ends == [400, 800, 1000, 1000, 1000]


def test_rows_of_an_epoch_arrive_when_it_begins() -> None:
    pace = StreamPace(rows_per_epoch=3)
    first = pace.next_position(pace.beginning(START_US), now_us=START_US + 5)
    second = pace.next_position(first, now_us=START_US + 9)
    assert first.schedule.times_us(0, 3).tolist() == [START_US + 5] * 3
    assert second.schedule.times_us(3, 3).tolist() == [START_US + 9] * 3


def test_nothing_new_is_the_position_itself() -> None:
    pace = StreamPace(rows_per_second=1, rows=1)
    start = pace.beginning(START_US)
    end = pace.next_position(start, now_us=START_US)
    assert end.row == 1
    assert pace.next_position(end, now_us=START_US + 100 * SECOND_US) is end
    assert pace.next_position(start, now_us=START_US - 1) is start


def test_a_stream_that_paused_catches_up_within_its_bound() -> None:
    pace = StreamPace(rows_per_second=100)
    position = pace.next_position(pace.beginning(START_US), now_us=START_US)
    now_us = START_US + 60 * SECOND_US
    sizes = []
    while (following := pace.next_position(position, now_us=now_us, rows_max=2500)) != position:
        sizes.append(following.row - position.row)
        position = following
    assert sizes == [2500, 2500, 1000]
    assert position.row == 6001
    assert position.schedule.times_us(6000, 1)[0] == now_us


@given(rate=rates, other=rates, rows=st.integers(1, 10**6))
def test_a_new_rate_changes_no_time_of_the_past_and_skips_none(rate: float, other: float, rows: int) -> None:
    before = Position(rows, Schedule(0, START_US, rate))
    boundary_us = int(before.schedule.times_us(rows, 1)[0])
    after = StreamPace(rows_per_second=other).next_position(before, now_us=boundary_us + 10**9)
    assert after.row > rows
    assert after.schedule.times_us(rows, 1)[0] == boundary_us


def test_a_stream_by_the_epoch_may_go_on_with_a_rate() -> None:
    by_epoch = StreamPace(rows_per_epoch=10)
    position = by_epoch.next_position(by_epoch.beginning(START_US), now_us=START_US)
    later_us = START_US + 3600 * SECOND_US
    following = StreamPace(rows_per_second=5).next_position(position, now_us=later_us)
    assert following == Position(11, Schedule(10, later_us, 5.0))


@given(rate=rates, row=st.integers(0, 2**53))
def test_a_position_survives_its_journey_through_the_offset_log(rate: float, row: int) -> None:
    position = Position(row, Schedule(3, START_US, rate))
    text = json.dumps(position.to_json())
    assert Position.from_json(json.loads(text)) == position
    assert json.dumps(Position.from_json(json.loads(text)).to_json()) == text


@pytest.mark.parametrize("document", [{}, {"row": 1}, {"row": "x", "origin_row": 0, "origin_us": 0}])
def test_an_offset_of_another_source_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"not an offset of the anabranch.workload source"):
        Position.from_json(document)
