"""How fast state is brought: slower after long epochs, faster after short ones, and always fast enough to end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.pacing import (
    FASTER,
    NOT_LONG,
    ROWS_AT_FIRST,
    ROWS_MAX,
    ROWS_MIN,
    SLOWER,
    TOO_LONG,
    DrainRate,
)

USUAL_MS = 100.0
durations = st.floats(min_value=0.0, max_value=1e9)


@pytest.fixture
def pace() -> DrainRate:
    """Epochs take 100 ms."""
    pace = DrainRate()
    pace.note_usual(USUAL_MS)
    return pace


def test_the_pace_starts_in_the_middle_and_knows_no_usual_epoch() -> None:
    pace = DrainRate()
    assert pace.rows == ROWS_AT_FIRST
    assert pace.usual_ms is None


def test_while_no_usual_epoch_is_known_the_pace_stays() -> None:
    pace = DrainRate()
    for duration_ms in (1.0, 1e6):
        pace.note_busy(duration_ms)
    assert pace.rows == ROWS_AT_FIRST


def test_a_long_epoch_slows_down_and_a_short_one_speeds_up(pace: DrainRate) -> None:
    pace.note_busy(2 * USUAL_MS)
    assert pace.rows == int(ROWS_AT_FIRST * SLOWER)
    pace.note_busy(USUAL_MS)
    assert pace.rows == int(ROWS_AT_FIRST * SLOWER * FASTER)


@pytest.mark.parametrize("times", [NOT_LONG, (NOT_LONG + TOO_LONG) / 2, TOO_LONG])
def test_an_epoch_that_is_a_little_longer_changes_nothing(pace: DrainRate, times: float) -> None:
    pace.note_busy(times * USUAL_MS)
    assert pace.rows == ROWS_AT_FIRST


def test_the_pace_has_an_upper_end(pace: DrainRate) -> None:
    for _ in range(50):
        pace.note_busy(0.5 * USUAL_MS)
    assert pace.rows == ROWS_MAX


def test_epochs_that_are_busy_do_not_become_the_usual_ones(pace: DrainRate) -> None:
    for _ in range(50):
        pace.note_busy(10 * USUAL_MS)
    assert pace.usual_ms == USUAL_MS
    assert pace.rows == ROWS_MIN


def test_one_odd_epoch_does_not_change_what_is_usual(pace: DrainRate) -> None:
    for duration_ms in (USUAL_MS, 50 * USUAL_MS, USUAL_MS, 0.1):
        pace.note_usual(duration_ms)
    assert pace.usual_ms == USUAL_MS


def test_what_is_usual_follows_a_load_that_stays(pace: DrainRate) -> None:
    for _ in range(15):
        pace.note_usual(3 * USUAL_MS)
    assert pace.usual_ms == 3 * USUAL_MS
    pace.note_busy(3 * USUAL_MS)
    assert pace.rows > ROWS_AT_FIRST


def test_the_next_migration_starts_in_the_middle_again(pace: DrainRate) -> None:
    for _ in range(5):
        pace.note_busy(10 * USUAL_MS)
    pace.note_usual(USUAL_MS)
    assert pace.rows == ROWS_AT_FIRST


def test_two_jobs_do_not_share_what_is_usual(pace: DrainRate) -> None:
    assert DrainRate().usual_ms is None
    assert pace.usual_ms == USUAL_MS


@given(st.lists(st.tuples(st.booleans(), durations)))
def test_whatever_epochs_take_some_rows_may_be_brought_and_not_all_at_once(epochs: list[tuple[bool, float]]) -> None:
    pace = DrainRate()
    for is_usual, duration_ms in epochs:
        (pace.note_usual if is_usual else pace.note_busy)(duration_ms)
        assert 0 < ROWS_MIN <= pace.rows <= ROWS_MAX


@given(usual_ms=st.floats(1.0, 1e6), busy=st.lists(st.floats(0.0, 10.0), max_size=60))
def test_a_longer_epoch_never_speeds_up_more_than_a_shorter_one(usual_ms: float, busy: list[float]) -> None:
    shorter, longer = DrainRate(), DrainRate()
    for pace in (shorter, longer):
        pace.note_usual(usual_ms)
    for times in busy:
        shorter.note_busy(times * usual_ms)
        longer.note_busy((times + 0.5) * usual_ms)
        assert longer.rows <= shorter.rows


@given(rows=st.integers(ROWS_MIN, ROWS_MAX))
def test_any_number_of_rows_is_brought_sooner_or_later(rows: int) -> None:
    """Even if every epoch is too long."""
    pace, brought, epochs = DrainRate(), 0, 0
    pace.note_usual(USUAL_MS)
    while brought < rows:
        pace.note_busy(100 * USUAL_MS)
        brought += pace.rows
        epochs += 1
    assert epochs <= rows / ROWS_MIN + 1
