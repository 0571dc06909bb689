"""What may be asked of a job between epochs: workers that join and leave, parallelism, load, and newer wishes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.ids import WorkerId
from anabranch.core.membership_events import RescaleState
from anabranch.core.requests import OpenJob
from support.rescaling import (
    KEY_GROUPS,
    LoadedStandIn,
    Make,
    SlowSupply,
    assigns,
    groups_of,
    making,
    rescale,
    run,
    wait_until,
    wait_until_started,
)
from support.worker_stand_in import StandIn, Supply, membership


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


def test_a_worker_that_joins_takes_load(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one)
    run(coordinator, 0)
    handle = coordinator.cluster.join(membership(two).all[0])
    run(coordinator, 1)
    assert handle.wait(10)
    assert len(groups_of(two)) == KEY_GROUPS // 2
    assert [request.heartbeat_ms for request in two.requests if isinstance(request, OpenJob)] == [60_000]
    with pytest.raises(SettingsError, match=r"'two' takes part already\. Start this one with another --id"):
        coordinator.cluster.join(membership(two).all[0])


def test_a_worker_that_waits_to_join_cannot_join_twice(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one)
    coordinator.cluster.join(membership(two).all[0])
    with pytest.raises(SettingsError, match="takes part already"):
        coordinator.cluster.join(membership(two).all[0])


def test_there_are_at_most_as_many_workers_as_key_groups(make: Make, one: StandIn) -> None:
    coordinator = make(one, worker_pool=Supply())
    for workers in (0, -1, KEY_GROUPS + 1):
        with pytest.raises(SettingsError, match=f"{workers} workers are not possible: .* at most {KEY_GROUPS}"):
            rescale(coordinator, workers)
    assert not coordinator.cluster.is_ready_to_change
    for number in range(KEY_GROUPS - 1):
        coordinator.cluster.join(membership(StandIn(f"more-{number}")).all[0])
    with pytest.raises(SettingsError, match="workers are not possible"):
        coordinator.cluster.join(membership(StandIn("one-too-many")).all[0])


def test_a_job_that_starts_no_workers_says_how_to_add_one(make: Make, one: StandIn) -> None:
    coordinator = make(one)
    with pytest.raises(
        SettingsError, match=r"starts no workers itself, so it cannot have 2\. .*anabranch worker --join"
    ):
        rescale(coordinator, 2)
    assert not coordinator.cluster.is_ready_to_change


def test_a_worker_that_is_drained_leaves_and_is_not_replaced(
    make: Make, one: StandIn, two: StandIn, three: StandIn
) -> None:
    worker_pool = Supply(StandIn("nobody asked for this one"))
    coordinator = make(one, two, three, worker_pool=worker_pool)
    handle = coordinator.cluster.drain(WorkerId("one"))
    again = coordinator.cluster.drain(WorkerId("one"))
    run(coordinator, 0)
    assert handle.wait(10)
    assert again.wait(10)
    run(coordinator, 1)
    assert coordinator.cluster.members.workers == ("two", "three")
    assert (worker_pool.retired, len(worker_pool.workers)) == (["one"], 1)


def test_the_last_worker_and_strangers_cannot_be_drained(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one, two)
    with pytest.raises(SettingsError, match=r"There is no worker 'three' that could leave\. Workers: one, two"):
        coordinator.cluster.drain(WorkerId("three"))
    coordinator.cluster.drain(WorkerId("one"))
    with pytest.raises(SettingsError, match="two is the last worker"):
        coordinator.cluster.drain(WorkerId("two"))


def test_a_worker_that_has_been_told_to_stop_is_drained_once(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one, two)
    for _ in range(3):
        coordinator.cluster.report_leaving(WorkerId("two"))
    run(coordinator, 0)
    assert coordinator.cluster.members.workers == ("one",)
    coordinator.cluster.report_leaving(WorkerId("one"))  # it is the last one, and stays
    run(coordinator, 1)
    assert coordinator.cluster.members.workers == ("one",)


# -------------------------------------------------------------------------------- what else changes a route


def test_a_change_of_parallelism_alone_moves_nothing(make: Make, one: StandIn, two: StandIn) -> None:
    coordinator = make(one, two)
    run(coordinator, 0)
    route = coordinator.route
    handle = rescale(coordinator, parallelism={1: 4})
    run(coordinator, 1)
    assert handle.wait(10)
    assert coordinator.route is route
    assert coordinator.accesses()[1].parallelism == 4
    assert sorted(set(coordinator.accesses()[1].partitions.tolist())) == [0, 1, 2, 3]
    assert handle.progress()["groupsMoving"] == 0


def test_several_wishes_are_fulfilled_by_one_change(make: Make, one: StandIn, two: StandIn, three: StandIn) -> None:
    coordinator = make(one, two)
    run(coordinator, 0)
    wishes = coordinator.cluster
    handles = [
        wishes.join(membership(three).all[0]),
        rescale(coordinator, parallelism={1: 6}),
        wishes.drain(WorkerId("one")),
    ]
    run(coordinator, 1)
    assert all(handle.wait(10) for handle in handles)
    assert coordinator.cluster.members.workers == ("two", "three")
    assert [len(assigns(worker)) for worker in (one, two, three)] == [2, 2, 1]
    assert coordinator.accesses()[1].parallelism == 6
    assert len(coordinator.changes) == 1
    assert coordinator.route.version == 1


def test_a_rescale_shares_out_the_load_not_only_the_groups(make: Make) -> None:
    hot, idle = LoadedStandIn("hot", {0: 2000.0, 1: 1800.0, 2: 20.0, 3: 20.0}), LoadedStandIn("idle", {5: 20.0})
    coordinator = make(hot, idle)
    assert coordinator.route.owners[:4] == ("hot",) * 4
    handle = rescale(coordinator)
    run(coordinator, 0)
    assert handle.wait(10)
    owners = {coordinator.route.owners[group] for group in (0, 1)}
    assert owners == {"hot", "idle"}
    offers = {offer.address for offer in assigns(idle)[-1].peers}
    assert offers == {"hot:1"}


def test_a_newer_request_replaces_one_that_still_waits(make: Make, one: StandIn) -> None:
    worker_pool = SlowSupply(StandIn("two"), StandIn("three"))
    coordinator = make(one, worker_pool=worker_pool)
    first, other = rescale(coordinator, 2), rescale(coordinator, parallelism={1: 3})
    second = rescale(coordinator, 3)
    assert (first.state, other.state) == (RescaleState.REPLACED, RescaleState.WAITING)
    assert not first.wait(0)
    assert "newer" in first.progress()["message"]
    worker_pool.may_start.set()
    wait_until_started(coordinator)
    run(coordinator, 0)
    assert second.wait(10)
    assert other.wait(10)
    assert len(coordinator.cluster.members) == 3


def test_the_parallelism_of_a_request_that_is_replaced_stays_wanted(make: Make, one: StandIn) -> None:
    worker_pool = SlowSupply(StandIn("two"), StandIn("three"))
    coordinator = make(one, worker_pool=worker_pool)
    first = rescale(coordinator, 2, parallelism={1: 8, 3: 8})
    rescale(coordinator, parallelism={1: 6})
    second = rescale(coordinator, 3, parallelism={3: 5})
    assert first.state is RescaleState.REPLACED
    assert (second.what, second.progress()["parallelism"]) == ("test, parallelism 6 of stage 1", {"3": 5, "1": 6})
    worker_pool.may_start.set()
    wait_until_started(coordinator)
    run(coordinator, 0)
    assert second.wait(10)
    assert coordinator.parallelism == {1: 6, 3: 5}
    assert len(coordinator.cluster.members) == 3


def test_each_request_for_more_adds_to_those_that_still_wait(make: Make, one: StandIn) -> None:
    worker_pool = SlowSupply(*(StandIn(name) for name in ("two", "three", "four", "five")))
    coordinator = make(one, worker_pool=worker_pool)
    wishes = coordinator.cluster
    for more in ({1: 2}, {1: 2}, {3: 7}, {}):
        newest = wishes.scale_out(more)
    assert newest.what == "5 workers, parallelism 8 of stage 3, parallelism 4 of stage 1"
    worker_pool.may_start.set()
    wait_until_started(coordinator)
    run(coordinator, 0)
    assert newest.wait(10)
    assert len(coordinator.cluster.members) == 5
    assert coordinator.parallelism == {1: 4, 3: 8}


def test_a_smaller_request_makes_use_of_no_more_workers_than_it_says(make: Make, one: StandIn, two: StandIn) -> None:
    worker_pool = SlowSupply(two)
    coordinator = make(one, worker_pool=worker_pool)
    rescale(coordinator, 2)
    handle = rescale(coordinator, 1)
    worker_pool.may_start.set()
    wait_until_started(coordinator)
    run(coordinator, 0)
    assert handle.wait(10)
    assert coordinator.route.workers == ("one",)
    wait_until(lambda: worker_pool.retired == ["two"])


def test_without_epochs_a_rescale_takes_effect_only_after_what_spark_has_committed(
    make: Make, one: StandIn, two: StandIn, tmp_path: Path
) -> None:
    coordinator = make(one, worker_pool=Supply(two))
    run(coordinator, 0)
    handle = rescale(coordinator, 2)
    wait_until_started(coordinator)
    coordinator.change_while_idle()
    assert handle.state is RescaleState.WAITING
    (tmp_path / "commits").mkdir(exist_ok=True)
    (tmp_path / "commits" / "0").write_text("v1\n{}")
    coordinator.change_while_idle()
    assert handle.wait(10)
    assert (coordinator.route.first_epoch, len(groups_of(two))) == (1, KEY_GROUPS // 2)
    run(coordinator, 1)


def test_without_a_drain_workers_come_but_cannot_leave(make: Make, one: StandIn, two: StandIn, three: StandIn) -> None:
    two.pending_groups = 4
    coordinator = make(one, worker_pool=Supply(two, three), drain=False)
    run(coordinator, 0)
    handle = rescale(coordinator, 2)
    wait_until_started(coordinator)
    run(coordinator, 1)
    assert [request.drain for request in assigns(one) + assigns(two)] == [True, False, False]
    progress = handle.progress()
    assert (progress["state"], progress["groupsPending"]) == ("migrating", 4)
    assert "only keys that are asked for move, so this does not complete by itself" in progress["message"]
    wishes = coordinator.cluster
    for leave in (lambda: rescale(coordinator, 1), lambda: wishes.drain(WorkerId("one"))):
        with pytest.raises(SettingsError, match=r"No worker can leave while anabranch\.drain is false: .* Start the"):
            leave()
    coordinator.cluster.report_leaving(WorkerId("one"))
    assert not wishes.is_ready_to_change
    assert wishes.wanted == 2
    rescale(coordinator, 3)
    wait_until_started(coordinator)
    run(coordinator, 2)
    assert len(coordinator.members) == 3
    two.pending_groups = 0
    run(coordinator, 3)
    assert handle.wait(10)
    assert handle.progress()["message"] == ""
