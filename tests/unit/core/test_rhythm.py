"""Changes are made between epochs that come at regular times, and otherwise as soon as they can be."""

import pytest

from anabranch.core.pacing import POSTPONED_MAX, ChangeTiming


def after(*begins_s: float, duration_s: float = 0.2) -> ChangeTiming:
    timing = ChangeTiming()
    for begin_s in begins_s:
        timing.begin(begin_s)
        assert timing.end(begin_s + duration_s) == pytest.approx(duration_s)
    return timing


@pytest.mark.parametrize(
    ("now_s", "has_time"),
    [(4.25, True), (4.6, True), (4.75, False), (5.05, False), (5.4, False), (5.6, True)],
    ids=["just after an epoch", "half-way", "just before the next", "it is late", "it is very late", "none comes"],
)
def test_a_change_is_made_if_the_next_epoch_is_not_near(now_s: float, has_time: bool) -> None:
    assert after(1.0, 2.0, 3.0, 4.0).has_time(now_s) is has_time


def test_an_epoch_that_does_not_come_holds_nothing_up_for_long() -> None:
    every_ten_minutes = after(600.0, 1200.0, 1800.0, 2400.0)
    assert not every_ten_minutes.has_time(3000.5)
    assert every_ten_minutes.has_time(3001.5)


def test_a_change_is_left_to_the_time_after_an_epoch_if_there_will_be_some() -> None:
    assert after(1.0, 2.01, 3.0, 4.0).postpones()
    assert not after(1.0, 2.01, 3.0, 4.0, duration_s=0.7).postpones()


@pytest.mark.parametrize(
    "begins_s", [(), (1.0,), (1.0, 2.0, 3.0), (1.0, 2.0, 2.5, 4.0, 5.0)], ids=["none", "one", "few", "irregular"]
)
def test_nothing_is_expected_of_epochs_that_are_not_regular(begins_s: tuple[float, ...]) -> None:
    timing = after(*begins_s)
    assert not timing.postpones()
    assert all(timing.has_time(now_s / 10) for now_s in range(50, 100))


def test_epochs_that_are_regular_again_are_taken_for_that() -> None:
    timing = after(1.0, 2.0, 9.0, 10.0, 11.0, 12.0, 13.0)
    assert not timing.postpones()
    timing.begin(14.0)
    timing.end(14.1)
    assert timing.postpones()


def test_a_change_is_not_postponed_for_ever() -> None:
    timing = after(1.0, 2.0, 3.0, 4.0, 5.0)
    assert [timing.postpones() for _ in range(POSTPONED_MAX + 2)] == [True] * POSTPONED_MAX + [False, False]
    timing.note_change()
    assert timing.postpones()
