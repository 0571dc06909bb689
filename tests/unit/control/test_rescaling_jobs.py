"""Rescales between epochs: who gets which key groups from whom, who may leave and when, and what a handle says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.checkpoint.manifests import newest_route
from anabranch.checkpoint.storage import Storage
from anabranch.core import requests
from anabranch.core.ids import WorkerId
from anabranch.core.membership_events import RescaleState
from anabranch.core.pacing import ROWS_AT_FIRST
from anabranch.core.routes import moves
from support.rescaling import (
    KEY_GROUPS,
    LoadedStandIn,
    Make,
    SlowSupply,
    assigns,
    groups_of,
    making,
    releases,
    rescale,
    run,
    wait_until_started,
)
from support.worker_stand_in import NoSupply, StandIn, Supply


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


@pytest.fixture
def three() -> StandIn:
    return StandIn("three")


# -------------------------------------------------------------------------------------------- more workers


def test_a_rescale_moves_the_fewest_key_groups_and_waits_for_its_workers(
    make: Make, one: StandIn, two: StandIn, three: StandIn
) -> None:
    worker_pool = SlowSupply(three)
    coordinator = make(one, two, worker_pool=worker_pool)
    before = coordinator.route
    handle = rescale(coordinator, 3)
    run(coordinator, 0)
    assert (coordinator.route, handle.state) == (before, RescaleState.WAITING)
    assert (len(coordinator.changes), len(assigns(one))) == (0, 1)
    worker_pool.may_start.set()
    wait_until_started(coordinator)
    figures = run(coordinator, 1)
    moved = moves(before, coordinator.route)
    assert len(moved) == KEY_GROUPS // 3
    assert {to for _, to in moved.values()} == {"three"}
    assert sorted(len(groups_of(worker)) for worker in (one, two, three)) == [2, 3, 3]
    assert sorted(groups_of(one) + groups_of(two) + groups_of(three)) == list(range(KEY_GROUPS))
    assert figures.changes[0].started == ["three"]
    assert handle.wait(10)
    assert handle.progress()["groupsMoving"] == len(moved)
    assert handle.progress()["startedEpoch"] == 1


def test_every_worker_is_told_the_new_route_not_only_the_new_one(
    make: Make, one: StandIn, two: StandIn, three: StandIn
) -> None:
    coordinator = make(one, two, worker_pool=Supply(three), routing_cache=False)
    run(coordinator, 0)
    rescale(coordinator, 3)
    wait_until_started(coordinator)
    run(coordinator, 1)
    for worker in (one, two, three):
        assign = assigns(worker)[-1]
        assert assign.groups == coordinator.route.groups_of(WorkerId(worker.name))
        assert (assign.epoch, assign.number, assign.freeze) == (0, 1, True)
        begin = [request for request in worker.requests if isinstance(request, requests.Begin)][-1]
        assert begin.routing is not None
        assert begin.routing.workers == ("one", "two", "three")


def test_key_groups_are_offered_by_those_that_had_them_each_at_its_own_address(
    make: Make, one: StandIn, two: StandIn, three: StandIn
) -> None:
    coordinator = make(one, two, worker_pool=Supply(three))
    before = coordinator.route
    rescale(coordinator, 3)
    wait_until_started(coordinator)
    run(coordinator, 0)
    offers = {offer.address: list(offer.groups) for offer in assigns(three)[-1].peers}
    assert sorted(group for groups in offers.values() for group in groups) == groups_of(three)
    for address, groups in offers.items():
        assert {before.owners[group] for group in groups} == {address.removesuffix(":1")}
    assert assigns(one)[-1].peers == assigns(two)[-1].peers == ()


def test_several_former_owners_are_offered_side_by_side(make: Make, one: StandIn, two: StandIn, three: StandIn) -> None:
    coordinator = make(one, two, three)
    run(coordinator, 0)
    rescale(coordinator, 1)
    run(coordinator, 1)
    offers = {offer.address for offer in assigns(one)[-1].peers}
    assert offers == {"two:1", "three:1"}


def test_a_route_is_durable_before_any_worker_hears_of_it(
    make: Make, one: StandIn, two: StandIn, tmp_path: Path
) -> None:
    durable: list[tuple[str, ...]] = []

    class Inspection(StandIn):
        def call(self, request, timeout_s=None):  # type: ignore[no-untyped-def]
            if isinstance(request, requests.Assign):
                route = newest_route(Storage(str(tmp_path)))
                assert route is not None
                durable.append(route.workers)
            return super().call(request, timeout_s)

    coordinator = make(one, two, worker_pool=Supply(Inspection("three")))
    rescale(coordinator, 3)
    wait_until_started(coordinator)
    run(coordinator, 0)
    assert durable == [("one", "three", "two")]
    assert coordinator.route.first_epoch == 0


def test_epochs_that_are_not_durable_become_so_before_key_groups_move(make: Make, three: StandIn) -> None:
    one, two = LoadedStandIn("one"), LoadedStandIn("two")
    coordinator = make(one, two, worker_pool=Supply(three), checkpoint_interval_s=1000.0)
    run(coordinator, 0)
    run(coordinator, 1)
    assert coordinator.durable_epoch < coordinator.committed_epoch
    rescale(coordinator, 3)
    wait_until_started(coordinator)
    coordinator.begin(2)
    assert coordinator.durable_epoch == 1
    kinds = one.kinds()
    assert kinds.index("flush") < len(kinds) - 1 - kinds[::-1].index("assign")
    assert assigns(three)[-1].epoch == 1


def test_while_state_follows_the_drain_is_paced(make: Make, one: StandIn, two: StandIn, three: StandIn) -> None:
    coordinator = make(one, two, worker_pool=Supply(three))
    run(coordinator, 0)
    three.pending_groups = 2
    handle = rescale(coordinator, 3)
    wait_until_started(coordinator)
    assert run(coordinator, 1).migrating
    three.pending_groups = 0
    run(coordinator, 2)
    assert handle.wait(10)
    assert not run(coordinator, 3).migrating
    rows = [request.drain_rows for request in three.requests if isinstance(request, requests.Begin)]
    assert rows[0] == ROWS_AT_FIRST
    assert rows[-1] == -1


# ------------------------------------------------------------------------------------------- fewer workers


def test_a_worker_leaves_only_after_all_has_arrived(make: Make, one: StandIn, two: StandIn) -> None:
    worker_pool = NoSupply()
    coordinator = make(one, two, worker_pool=worker_pool)
    run(coordinator, 0)
    one.pending_groups = 4
    handle = rescale(coordinator, 1)
    run(coordinator, 1)
    two.requests.clear()
    run(coordinator, 2)
    coordinator.cluster.on_beat()
    assert (handle.state, handle.progress()["groupsPending"]) == (RescaleState.MIGRATING, 4)
    assert not handle.wait(0.1)
    assert (two.kinds(), two.closed, worker_pool.retired, releases(one)) == ([], False, [], [])
    assert [member.worker for member in coordinator.cluster.watched()] == ["one", "two"]
    one.pending_groups = 0
    coordinator.cluster.on_beat()
    assert handle.wait(10)
    assert (two.kinds(), two.closed, worker_pool.retired) == (["close_job"], True, ["two"])
    assert releases(one) == [1]
    assert [member.worker for member in coordinator.cluster.watched()] == ["one"]


def test_the_commit_of_an_epoch_tells_that_all_has_arrived_as_well(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one, two)
    one.pending_groups = 4
    handle = rescale(coordinator, 1)
    run(coordinator, 0)
    assert handle.state is RescaleState.MIGRATING
    one.pending_groups = 0
    run(coordinator, 1)
    assert handle.wait(10)


def test_the_newest_workers_leave_first(make: Make, one: StandIn, two: StandIn, three: StandIn) -> None:
    coordinator = make(one, two, three)
    rescale(coordinator, 1)
    figures = run(coordinator, 0)
    assert figures.changes[0].left == ["three", "two"]
    assert groups_of(one) == list(range(KEY_GROUPS))
    assert groups_of(two) == groups_of(three) == []


def test_a_worker_that_is_lost_while_it_departs_holds_up_nothing(make: Make, one: StandIn, two: StandIn) -> None:
    worker_pool = NoSupply()
    coordinator = make(one, two, worker_pool=worker_pool)
    one.pending_groups = 4
    handle = rescale(coordinator, 1)
    run(coordinator, 0)
    noticed: list[WorkerId] = []
    coordinator.cluster.on_loss = noticed.append
    two.gone = True
    coordinator.cluster.report_lost(WorkerId("two"), "its process has ended")
    assert (noticed, worker_pool.killed) == ([], ["two"])
    assert not coordinator.cluster.any_lost
    one.pending_groups = 0
    run(coordinator, 1)
    assert handle.wait(10)


def test_what_departs_stays_until_a_later_change_has_arrived_too(
    make: Make, one: StandIn, two: StandIn, three: StandIn
) -> None:
    worker_pool = Supply(three)
    coordinator = make(one, two, worker_pool=worker_pool)
    one.pending_groups = 4
    first = rescale(coordinator, 1)
    run(coordinator, 0)
    three.pending_groups = 2
    second = rescale(coordinator, 2)
    wait_until_started(coordinator)
    run(coordinator, 1)
    one.pending_groups = 0
    run(coordinator, 2)
    coordinator.cluster.on_beat()
    assert (first.state, second.state) == (RescaleState.MIGRATING, RescaleState.MIGRATING)
    assert (worker_pool.retired, releases(one)) == ([], [])
    three.pending_groups = 0
    run(coordinator, 3)
    assert first.wait(10)
    assert second.wait(10)
    assert (worker_pool.retired, releases(one), releases(three)) == (["two"], [2], [2])
