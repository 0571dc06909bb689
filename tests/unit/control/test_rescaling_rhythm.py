"""Changes of regular epochs: left to the pause between two of them, within bounds, and not forgotten if they fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.control.coordinator import Coordinator
from anabranch.control.membership.cluster import Cluster
from anabranch.core.errors import CheckpointError
from anabranch.core.membership_events import RescaleState
from anabranch.core.pacing import POSTPONED_MAX
from anabranch.runtime.threads import THREADS
from support.rescaling import Make, making, rescale, run, wait_until_started
from support.worker_stand_in import StandIn, Supply

#: From one epoch to the next.
DISTANCE_S = 10.0


class Clock:
    """Stands still, unless a test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with making(tmp_path) as make:
        yield make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(THREADS, "monotonic_s", clock)
    return clock


def run_regularly(coordinator: Coordinator, clock: Clock, folder: Path, epochs: range) -> None:
    (folder / "commits").mkdir(exist_ok=True)
    for epoch in epochs:
        run(coordinator, epoch)
        (folder / "commits" / str(epoch)).write_text("v1\n{}")
        clock.now_s += DISTANCE_S


def test_a_change_is_left_to_the_pause_after_an_epoch(make: Make, clock: Clock, tmp_path: Path) -> None:
    coordinator = make(StandIn("one"), worker_pool=Supply(StandIn("two")))
    run_regularly(coordinator, clock, tmp_path, range(5))
    handle = rescale(coordinator, 2)
    wait_until_started(coordinator)
    assert not coordinator.change_while_idle(), "the next epoch is about to begin"
    run_regularly(coordinator, clock, tmp_path, range(5, 6))
    assert handle.state is RescaleState.WAITING
    clock.now_s -= DISTANCE_S - 1
    assert coordinator.change_while_idle()
    assert handle.wait(10)
    assert coordinator.route.first_epoch == 6


def test_a_change_is_made_before_an_epoch_if_no_pause_comes(make: Make, clock: Clock, tmp_path: Path) -> None:
    coordinator = make(StandIn("one"), worker_pool=Supply(StandIn("two")))
    run_regularly(coordinator, clock, tmp_path, range(5))
    handle = rescale(coordinator, 2)
    wait_until_started(coordinator)
    run_regularly(coordinator, clock, tmp_path, range(5, 5 + POSTPONED_MAX))
    assert handle.state is RescaleState.WAITING
    run_regularly(coordinator, clock, tmp_path, range(5 + POSTPONED_MAX, 6 + POSTPONED_MAX))
    assert handle.wait(10)


def test_a_change_that_fails_in_pauses_fails_an_epoch_in_the_end(
    make: Make, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("The route cannot be written. Make room.")

    coordinator = make(StandIn("one"), worker_pool=Supply(StandIn("two")))
    run_regularly(coordinator, clock, tmp_path, range(5))
    rescale(coordinator, 2)
    wait_until_started(coordinator)
    monkeypatch.setattr(Cluster, "change", fail)
    with pytest.raises(CheckpointError, match="cannot be written"):  # noqa: PT012  whichever epoch it is
        for epoch in range(5, 6 + POSTPONED_MAX):
            run_regularly(coordinator, clock, tmp_path, range(epoch, epoch + 1))
            clock.now_s -= DISTANCE_S - 1
            with pytest.raises(CheckpointError, match="cannot be written"):
                coordinator.change_while_idle()
            clock.now_s += DISTANCE_S - 1
    assert epoch == 5 + POSTPONED_MAX
