"""Rescales that go wrong: workers that are lost, cannot be started or answer late, and handles that never hang."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.control.coordinator import Coordinator
from anabranch.core import requests
from anabranch.core.errors import CheckpointError, EpochError, LostWorkerError
from anabranch.core.ids import WorkerId
from anabranch.core.membership_events import RescaleState
from anabranch.wire.messages import kind_of
from support.rescaling import (
    KEY_GROUPS,
    FailingSupply,
    Make,
    assigns,
    groups_of,
    making,
    releases,
    rescale,
    run,
    wait_until,
    wait_until_started,
)
from support.worker_stand_in import NoSupply, StandIn, Supply, membership


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with making(tmp_path) as make:
        yield make


@pytest.fixture
def one() -> StandIn:
    return StandIn("one")


@pytest.fixture
def two() -> StandIn:
    return StandIn("two")


class DiesAt(StandIn):
    """A worker that is gone as soon as it is asked something of a kind."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(name)
        self.kind = kind

    def call(self, request, timeout_s=None):  # type: ignore[no-untyped-def]
        self.gone = self.gone or kind_of(type(request)) == self.kind
        return super().call(request, timeout_s)


class Waits(StandIn):
    """A worker that knows an answer, and sends it only when it is told to."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(name)
        self.kind = kind
        self.was_asked, self.may_answer = threading.Event(), threading.Event()

    def call(self, request, timeout_s=None):  # type: ignore[no-untyped-def]
        answer = super().call(request, timeout_s)
        if kind_of(type(request)) == self.kind:
            self.was_asked.set()
            assert self.may_answer.wait(30)
        return answer


# ---------------------------------------------------------------------------------------- failed starts


def test_a_worker_that_cannot_be_started_fails_the_handle(make: Make, one: StandIn) -> None:
    coordinator = make(one, worker_pool=FailingSupply())
    handle = rescale(coordinator, 3)
    wait_until_started(coordinator)
    coordinator.cluster.on_beat()
    assert handle.state is RescaleState.FAILED
    assert handle.progress()["message"] == "A state worker failed to start. Make room."
    assert not handle.wait(0)
    run(coordinator, 0)
    assert (len(coordinator.changes), len(coordinator.cluster.members)) == (0, 1)


@pytest.mark.parametrize("error", [OSError("Cannot allocate memory"), RuntimeError("can't start new thread")])
def test_a_start_that_fails_for_whatever_reason_fails_the_handle(
    make: Make, one: StandIn, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Supply) -> None:
        raise error

    monkeypatch.setattr(Supply, "start", fail)
    handle = rescale(make(one, worker_pool=Supply()), 2)
    assert not handle.wait(30)
    assert (handle.state, handle.progress()["message"]) == (RescaleState.FAILED, str(error))


def test_a_worker_that_cannot_be_started_fails_the_handle_also_if_an_epoch_is_faster(make: Make, one: StandIn) -> None:
    """An epoch may begin between the failure and the next heartbeat."""
    coordinator = make(one, worker_pool=FailingSupply())
    handle = rescale(coordinator, 3)
    wait_until_started(coordinator)
    run(coordinator, 0)
    coordinator.cluster.on_beat()
    assert not handle.wait(1)
    assert handle.state is RescaleState.FAILED


def test_a_failed_start_does_not_bring_back_a_worker_that_is_to_leave(make: Make, one: StandIn, two: StandIn) -> None:
    worker_pool = FailingSupply()
    coordinator = make(one, two, worker_pool=worker_pool)
    rescale(coordinator, 3)
    wait_until_started(coordinator)
    coordinator.cluster.drain(WorkerId("two"))
    coordinator.cluster.on_beat()
    run(coordinator, 0)
    assert coordinator.cluster.members.workers == ("one",)
    assert coordinator.cluster.wanted == 1


# ----------------------------------------------------------------------------------------------- losses


def test_a_newcomer_that_dies_at_once_is_left_out(make: Make, one: StandIn, two: StandIn) -> None:
    worker_pool = Supply(DiesAt("three", "assign"), StandIn("four"))
    coordinator = make(one, two, worker_pool=worker_pool)
    handle = rescale(coordinator, 3)
    wait_until_started(coordinator)
    run(coordinator, 0)
    assert coordinator.route.workers == ("one", "two")
    assert coordinator.changes[0].lost == ["three"]
    wait_until_started(coordinator)  # another one is started in its place
    run(coordinator, 1)
    assert coordinator.route.workers == ("four", "one", "two")
    assert handle.wait(10)


def test_a_worker_that_stays_and_is_lost_during_a_change_is_left_out(make: Make, one: StandIn) -> None:
    two = StandIn("two")
    coordinator = make(one, two, StandIn("three"))
    run(coordinator, 0)

    def die_at_assign(request, timeout_s=None):  # type: ignore[no-untyped-def]
        two.gone = two.gone or kind_of(type(request)) == "assign"
        return StandIn.call(two, request, timeout_s)

    two.call = die_at_assign  # type: ignore[method-assign]
    handle = coordinator.cluster.drain(WorkerId("three"))
    run(coordinator, 1)
    assert handle.wait(10)
    assert coordinator.route.workers == ("one",)
    assert groups_of(one) == list(range(KEY_GROUPS))
    # The lost one is no source any more, and the one that leaves is.
    assert {offer.address for offer in assigns(one)[-1].peers} == {"three:1"}


def test_a_worker_that_is_lost_before_it_could_leave_is_lost(make: Make, one: StandIn, two: StandIn) -> None:
    worker_pool = NoSupply()
    coordinator = make(one, two, worker_pool=worker_pool)
    handle = coordinator.cluster.drain(WorkerId("two"))
    two.gone = True
    coordinator.cluster.report_lost(WorkerId("two"), "its process has ended")
    run(coordinator, 0)
    assert (coordinator.changes[0].lost, coordinator.changes[0].left) == (["two"], [])
    assert handle.wait(10)
    assert worker_pool.killed == ["two"]


@pytest.mark.parametrize("can_start", [True, False])
def test_a_worker_that_is_to_leave_stays_if_all_others_are_lost(
    make: Make, one: StandIn, two: StandIn, can_start: bool
) -> None:
    """Until there is another one: it has the state."""
    coordinator = make(one, two, worker_pool=Supply(StandIn("three")) if can_start else NoSupply())
    handle = coordinator.cluster.drain(WorkerId("two"))
    one.gone = True
    coordinator.cluster.report_lost(WorkerId("one"), "its process has ended")
    run(coordinator, 0)
    assert coordinator.committed_epoch == 0
    assert coordinator.route.workers == ("two",)
    wait_until_started(coordinator)
    run(coordinator, 1)
    assert coordinator.route.workers == (("three",) if can_start else ("two",))
    assert handle.wait(10) == can_start
    assert handle.state is (RescaleState.DONE if can_start else RescaleState.FAILED)


def test_the_loss_of_the_former_owner_leads_its_groups_back_from_the_checkpoint(
    make: Make, one: StandIn, two: StandIn
) -> None:
    """A worker that was lost is offered to nobody, whatever it had."""
    three = StandIn("three")
    coordinator = make(one, two, three)
    run(coordinator, 0)
    coordinator.cluster.drain(WorkerId("three"))
    two.gone = True
    coordinator.cluster.report_lost(WorkerId("two"), "silent")
    run(coordinator, 1)
    offers = {offer.address: list(offer.groups) for offer in assigns(one)[-1].peers}
    assert offers == {"three:1": list(assigns(three)[0].groups)}
    assert groups_of(one) == list(range(KEY_GROUPS))


# ------------------------------------------------------------------------------------------------ eager


def test_an_eager_migration_is_complete_before_the_epoch_begins(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one, worker_pool=Supply(two), migration="eager")
    handle = rescale(coordinator, 2)
    wait_until_started(coordinator)
    run(coordinator, 0)
    for worker in (one, two):
        kinds = worker.kinds()
        assert kinds.index("complete") < kinds.index("begin")
    assert handle.wait(10)


def test_a_lazy_migration_completes_nothing_at_once(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one, worker_pool=Supply(two))
    two.pending_groups = 4
    rescale(coordinator, 2)
    wait_until_started(coordinator)
    run(coordinator, 0)
    assert "complete" not in one.kinds() + two.kinds()


def test_a_worker_lost_during_an_eager_migration_takes_no_wish_with_it(make: Make, one: StandIn) -> None:
    coordinator = make(one, worker_pool=Supply(DiesAt("two", "complete"), StandIn("three")), migration="eager")
    handle = rescale(coordinator, 2, parallelism={1: 5})
    wait_until_started(coordinator)
    with pytest.raises((LostWorkerError, EpochError)):
        coordinator.begin(0)
    coordinator.abort(0)
    assert coordinator.recover(0)
    run(coordinator, 0)
    assert coordinator.accesses()[1].parallelism == 5
    wait_until_started(coordinator)
    run(coordinator, 1)
    assert handle.wait(10)


# ---------------------------------------------------------------------------------------- late answers


def pending_rescale(make: Make, one: StandIn, two: StandIn, **migration: str) -> Coordinator:
    """A job whose second worker has come, and still waits for its key groups."""
    coordinator = make(one, worker_pool=Supply(two), **migration)
    two.pending_groups = 4
    rescale(coordinator, 2)
    wait_until_started(coordinator)
    run(coordinator, 0)
    return coordinator


def test_the_end_of_one_migration_does_not_end_the_next_that_is_just_made(make: Make, one: StandIn) -> None:
    """All of the first has arrived while workers are given the key groups of the second."""
    two, three = StandIn("two"), Waits("three", "assign")
    coordinator = pending_rescale(make, one, two)
    three.pending_groups = 2
    handle = coordinator.cluster.join(membership(three).all[0])
    changing = threading.Thread(target=run, args=(coordinator, 1))
    changing.start()
    assert three.was_asked.wait(10)
    two.pending_groups = 0
    coordinator.cluster.on_beat()
    three.may_answer.set()
    changing.join(30)
    assert not handle.wait(0.3)
    assert handle.state is RescaleState.MIGRATING
    assert releases(one) == []  # the third still reads there
    three.pending_groups = 0
    run(coordinator, 2)
    assert handle.wait(10)
    assert releases(one) == [2]


def test_an_answer_from_before_a_change_says_nothing_about_what_moves_since(make: Make, one: StandIn) -> None:
    two = Waits("two", "report_progress")
    coordinator = pending_rescale(make, one, two)
    two.pending_groups = 0
    beat = threading.Thread(target=coordinator.cluster.on_beat)
    beat.start()
    assert two.was_asked.wait(10)  # it says that all has arrived, and the answer is on its way
    two.pending_groups = 4
    two.kind = ""
    handle = coordinator.cluster.drain(WorkerId("one"))
    run(coordinator, 1)
    two.may_answer.set()
    beat.join(30)
    assert not handle.wait(0.3)
    assert handle.state is RescaleState.MIGRATING
    assert one.kinds()[-1] != "close_job"
    two.pending_groups = 0
    run(coordinator, 2)
    assert handle.wait(10)


# ---------------------------------------------------------------------------------- handles always end


def test_a_handle_that_waits_ends_with_the_query(make: Make, one: StandIn) -> None:
    coordinator = make(one, StandIn("two"))
    handle = rescale(coordinator, 1)
    coordinator.close()
    assert handle.state is RescaleState.FAILED
    assert handle.progress()["message"] == "The query has ended."


def test_a_handle_whose_state_is_on_its_way_ends_with_the_query(make: Make, one: StandIn) -> None:
    coordinator = make(one, StandIn("two"))
    one.pending_groups = 4
    handle = rescale(coordinator, 1)
    run(coordinator, 0)
    coordinator.close()
    assert not handle.wait(1)
    assert handle.state is RescaleState.FAILED


def test_a_handle_whose_change_fails_ends_with_the_query(
    make: Make, one: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make(one, StandIn("two"))
    handle = rescale(coordinator, 1)

    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("The disk is full. Make room.")

    monkeypatch.setattr("anabranch.control.membership.change.save_route", fail)
    with pytest.raises(CheckpointError):
        coordinator.begin(0)
    coordinator.close()
    assert not handle.wait(1)
    assert handle.state is RescaleState.FAILED


def test_workers_that_wait_to_be_let_in_are_let_go_with_the_query(make: Make, one: StandIn, two: StandIn) -> None:
    worker_pool = Supply(two)
    coordinator = make(one, worker_pool=worker_pool)
    handle = rescale(coordinator, 2)
    wait_until_started(coordinator)
    coordinator.close()
    assert (worker_pool.retired, two.closed) == (["two"], True)
    assert handle.state is RescaleState.FAILED


def test_a_worker_that_departs_is_let_go_with_the_query(make: Make, one: StandIn, two: StandIn) -> None:
    worker_pool = NoSupply()
    coordinator = make(one, two, worker_pool=worker_pool)
    one.pending_groups = 4
    rescale(coordinator, 1)
    run(coordinator, 0)
    coordinator.close()
    wait_until(lambda: worker_pool.retired == ["two"])
    assert two.closed


def test_a_release_that_a_worker_does_not_hear_holds_up_nobody(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one, two, StandIn("three"))
    one.failures["release"] = LostWorkerError("one:1 cannot be reached.")
    handle = rescale(coordinator, 2)
    run(coordinator, 0)
    assert handle.wait(10)
    assert [isinstance(request, requests.Release) for request in two.requests].count(True) == 1
