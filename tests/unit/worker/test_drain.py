"""The drain: goes on freely between epochs, keeps to its rows during one, tries again after errors, and always ends."""

import threading
import time
from collections.abc import Callable, Collection, Iterator

import pytest

from anabranch.core.errors import LostWorkerError
from anabranch.worker.transfer.drain import NO_LIMIT, Drain

ROWS_PER_GROUP = 200


class Arriving:
    """Key groups of equal size that cost a microsecond a row."""

    def __init__(self, groups: int) -> None:
        self.missing = list(range(groups))
        self.rows = 0
        self.steps: list[int] = []
        #: Errors to raise, one for each step.
        self.errors: list[Exception] = []

    @property
    def pending(self) -> list[int]:
        return list(self.missing)

    def drain(self, groups: Collection[int], *, can_wait: bool) -> None:
        assert can_wait
        if self.errors:
            raise self.errors.pop()
        self.steps.append(len(groups))
        time.sleep(len(groups) * ROWS_PER_GROUP * 1e-6)
        self.rows += len(groups) * ROWS_PER_GROUP
        self.missing = self.missing[len(groups) :]

    def choose(self, count: int) -> tuple["Arriving", list[int]] | None:
        return (self, self.missing[:count]) if self.missing else None


MakeDrain = Callable[[Arriving], Drain]


@pytest.fixture
def make() -> Iterator[MakeDrain]:
    made: list[Drain] = []

    def make(arriving: Arriving) -> Drain:
        made.append(Drain(lambda: None, arriving.choose, lambda: arriving.rows))
        return made[-1]

    yield make
    for drain in made:
        drain.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.002)


def settled(arriving: Arriving) -> int:
    """The rows that have come when no more do."""
    before = -1
    while before != arriving.rows:
        before = arriving.rows
        time.sleep(0.15)
    return before


def test_between_epochs_all_is_brought(make: MakeDrain) -> None:
    arriving = Arriving(500)
    make(arriving).start()
    wait_until(lambda: not arriving.missing)
    assert arriving.rows == 500 * ROWS_PER_GROUP


def test_its_thread_ends_with_its_work_and_comes_back_with_more(make: MakeDrain) -> None:
    arriving = Arriving(5)
    drain = make(arriving)
    for _ in range(3):
        drain.start()
        wait_until(lambda: not arriving.missing and drain._thread is None)
        arriving.missing = list(range(5))
    assert arriving.rows == 15 * ROWS_PER_GROUP
    assert not any(thread.name == "drain" for thread in threading.enumerate())


@pytest.mark.parametrize("was_fast", [False, True])
def test_during_an_epoch_no_more_rows_come_than_are_allowed(make: MakeDrain, was_fast: bool) -> None:
    """How many rows a group has is not known before: a few more may come, not many times as many."""
    arriving = Arriving(4000)
    drain = make(arriving)
    if was_fast:  # it has learnt to bring many groups at a time
        drain.start()
        wait_until(lambda: len(arriving.steps) > 8)
    drain.begin_epoch(0)
    before = settled(arriving)
    drain.begin_epoch(2000)
    drain.start()
    assert 2000 <= settled(arriving) - before <= 2 * 2000
    drain.end_epoch()
    wait_until(lambda: arriving.rows >= before + 4000)


def test_nothing_comes_during_an_epoch_that_allows_nothing(make: MakeDrain) -> None:
    arriving = Arriving(10)
    drain = make(arriving)
    drain.begin_epoch(0)
    drain.start()
    assert settled(arriving) == 0
    drain.end_epoch()
    wait_until(lambda: not arriving.missing)


def test_every_epoch_allows_rows_anew(make: MakeDrain) -> None:
    arriving = Arriving(4000)
    drain = make(arriving)
    brought = []
    for _ in range(3):
        before = arriving.rows
        drain.begin_epoch(1)
        drain.start()
        brought.append(settled(arriving) - before)
    assert all(rows > 0 for rows in brought)
    assert arriving.missing


def test_an_epoch_without_a_limit_does_not_hold_it_up(make: MakeDrain) -> None:
    arriving = Arriving(300)
    drain = make(arriving)
    drain.begin_epoch(NO_LIMIT)
    drain.start()
    wait_until(lambda: not arriving.missing)


def test_an_epoch_that_never_ends_does_not_hold_it_up_for_ever(
    make: MakeDrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.worker.transfer.drain._EPOCH_MAX_S", 0.2)
    arriving = Arriving(10)
    drain = make(arriving)
    drain.begin_epoch(0)
    drain.start()
    wait_until(lambda: not arriving.missing)


def test_it_goes_on_after_an_error(make: MakeDrain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.worker.transfer.drain._RETRY_S", 0.05)
    arriving = Arriving(10)
    arriving.errors = [LostWorkerError("away"), MemoryError(), LostWorkerError("still away")]
    make(arriving).start()
    wait_until(lambda: not arriving.missing)
    assert arriving.errors == []


def test_there_is_time_just_after_an_epoch(make: MakeDrain) -> None:
    drain = make(Arriving(0))
    drain.begin_epoch(0)
    waiting = threading.Thread(target=drain.wait_for_end_of_epoch)
    waiting.start()
    waiting.join(1.3)
    assert waiting.is_alive(), "an epoch runs, however long it takes"
    drain.end_epoch()
    waiting.join(5)
    assert not waiting.is_alive()


def test_there_is_time_if_no_epoch_comes(make: MakeDrain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.worker.transfer.drain._NO_EPOCH_S", 0.05)
    drain = make(Arriving(0))
    assert drain.wait_for_end_of_epoch()
    drain.stop()
    assert not drain.wait_for_end_of_epoch()


def test_closing_it_wakes_it(make: MakeDrain) -> None:
    arriving = Arriving(10)
    drain = make(arriving)
    drain.begin_epoch(0)
    drain.start()
    begun_s = time.monotonic()
    drain.close()
    assert time.monotonic() - begun_s < 5
    drain.end_epoch()
    drain.start()
    assert settled(arriving) == 0
