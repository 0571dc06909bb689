"""Workers that are lost and workers that come: who gets which key groups, and that epochs go on."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from anabranch.checkpoint.generations import claim_generation, generation_info, latest_generation
from anabranch.checkpoint.manifests import newest_route
from anabranch.checkpoint.storage import Storage
from anabranch.control.coordinator import Coordinator
from anabranch.control.owned_checkpoint import claim
from anabranch.control.resume import resume
from anabranch.core.errors import EpochError, FencedError, LostWorkerError
from anabranch.core.ids import Generation, StageNumber, WorkerId
from anabranch.core.requests import Assign
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.core.settings import Settings
from support.worker_stand_in import NoSupply, StandIn, Supply, membership

VARIABLE = VariableSpec("v", VariableKind.VALUE, pa.schema([("n", pa.int64())]))
SPEC = StageSpec(StageNumber(1), "stage1", pa.schema([("k", pa.int64())]), (VARIABLE,))
QUIET = Settings(workers=2, key_groups=8, heartbeat_s=60.0)

Make = Callable[..., Coordinator]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Coordinator] = []

    def make(*workers: StandIn, worker_pool: NoSupply | None = None, settings: Settings = QUIET) -> Coordinator:
        members = membership(*workers)
        resumed = resume(claim(str(tmp_path), [SPEC], 8), members)
        made.append(Coordinator(resumed, members, settings, {StageNumber(1): 2}, worker_pool or NoSupply()))
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.cluster.close()


def groups_of(worker: StandIn) -> list[int]:
    return list([request for request in worker.requests if isinstance(request, Assign)][-1].groups)


def run(coordinator: Coordinator, epoch: int) -> None:
    """An epoch in which every worker has sealed what it owns."""
    coordinator.begin(epoch)
    access = coordinator.accesses()[1]
    for position, member in enumerate(coordinator.members):
        owned = {int(p) for p, o in zip(access.partitions, access.routing.owners, strict=True) if o == position}
        member.client.sealed = [[1, partition, 0] for partition in sorted(owned)]  # type: ignore[attr-defined]
    assert coordinator.missing(epoch) == {}
    coordinator.commit(epoch)


def test_the_key_groups_of_a_lost_worker_go_to_the_others(make: Make, tmp_path: Path) -> None:
    one, two = StandIn("one"), StandIn("two")
    worker_pool = NoSupply()
    coordinator = make(one, two, worker_pool=worker_pool)
    run(coordinator, 0)
    two.gone = True
    with pytest.raises(EpochError, match="cannot be reached"):
        coordinator.begin(1)
    coordinator.abort(1)
    assert coordinator.recover(1)
    assert groups_of(one) == list(range(8))
    assert worker_pool.killed == ["two"]
    assert newest_route(Storage(str(tmp_path))) == coordinator.route
    assert (coordinator.route.first_epoch, coordinator.route.workers) == (1, ("one",))
    run(coordinator, 1)
    assert coordinator.committed_epoch == 1
    assert coordinator.status().last_repair == coordinator.changes[-1]
    assert coordinator.changes[-1].lost == ["two"]


def test_nothing_is_repaired_when_all_workers_are_well(make: Make) -> None:
    one, two = StandIn("one"), StandIn("two")
    coordinator = make(one, two)
    route = coordinator.route
    coordinator.begin(0)
    coordinator.abort(0)
    assert not coordinator.recover(0)
    assert coordinator.route is route
    assert not coordinator.changes


def test_a_worker_that_was_restarted_is_given_its_key_groups_again(make: Make) -> None:
    one, two = StandIn("one"), StandIn("two")
    coordinator = make(one, two)
    before = groups_of(two)
    two.jobs.clear()
    two.requests.clear()
    assert coordinator.recover(0)
    assert groups_of(two) == before
    assert coordinator.route.version == 0


def test_a_worker_lost_at_the_commit_point_is_replaced_before_the_next_epoch(make: Make) -> None:
    one, two = StandIn("one"), StandIn("two")
    coordinator = make(one, two)
    coordinator.begin(0)
    one.sealed, two.sealed = [[1, 0, 0]], [[1, 1, 0]]
    two.failures["commit"] = LostWorkerError("two:1 cannot be reached.")
    coordinator.commit(0)
    two.gone = True
    run(coordinator, 1)
    last = [request for request in one.requests if isinstance(request, Assign)][-1]
    assert last.groups == tuple(range(8))
    assert last.epoch == 0
    assert [file.path for file in last.changes] == [
        "anabranch/changes/one-0.parquet",
        "anabranch/changes/two-0.parquet",
    ]


def test_a_replacement_is_started_in_the_background_and_let_in_between_epochs(make: Make) -> None:
    one, two, three = StandIn("one"), StandIn("two"), StandIn("three")
    coordinator = make(one, two, worker_pool=Supply(three))
    two.gone = True
    coordinator.cluster.note_lost(WorkerId("two"))
    run(coordinator, 0)
    deadline = time.monotonic() + 30
    while not coordinator.cluster.is_ready_to_change and time.monotonic() < deadline:
        time.sleep(0.01)
    run(coordinator, 1)
    assert coordinator.route.workers == ("one", "three")
    assert len(groups_of(three)) == 4
    assert sorted(groups_of(one) + groups_of(three)) == list(range(8))


def test_when_all_are_lost_one_is_started_first(make: Make) -> None:
    one, two = StandIn("one"), StandIn("two")
    coordinator = make(one, worker_pool=Supply(two))
    one.gone = True
    assert coordinator.recover(0)
    assert groups_of(two) == list(range(8))


def test_when_all_are_lost_and_none_can_be_started_it_says_so(make: Make) -> None:
    one = StandIn("one")
    coordinator = make(one)
    one.gone = True
    with pytest.raises(EpochError, match=r"All workers of anabranch\.workerAddresses are lost"):
        coordinator.recover(0)


def test_a_worker_lost_during_a_repair_is_repaired_as_well(make: Make) -> None:
    one, two, three = StandIn("one"), StandIn("two"), StandIn("three")
    coordinator = make(one, two, three, settings=Settings(workers=3, key_groups=8, heartbeat_s=60.0))
    two.gone = True
    coordinator.cluster.note_lost(WorkerId("two"))

    def die_at_assign(request: Any, timeout_s: float | None = None) -> Any:
        three.gone = three.gone or isinstance(request, Assign)
        return StandIn.call(three, request, timeout_s)

    three.call = die_at_assign  # type: ignore[method-assign,assignment]
    run(coordinator, 0)
    assert groups_of(one) == list(range(8))
    assert coordinator.changes[0].lost == ["two", "three"]


def test_a_worker_that_falls_silent_is_noticed_without_being_asked(make: Make) -> None:
    one, two = StandIn("one"), StandIn("two")
    worker_pool = NoSupply()
    settings = Settings(workers=2, key_groups=8, heartbeat_s=0.01, worker_timeout_s=0.05)
    coordinator = make(one, two, worker_pool=worker_pool, settings=settings)
    noticed: list[WorkerId] = []
    coordinator.cluster.on_loss = noticed.append
    two.gone = True
    deadline = time.monotonic() + 30
    while not noticed and time.monotonic() < deadline:
        time.sleep(0.01)
    worker_pool.ended.add(WorkerId("one"))
    while len(noticed) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert noticed == ["two", "one"]


def test_who_looks_at_the_state_waits_until_a_lost_worker_is_replaced(make: Make) -> None:
    """Between its end and the moment that anybody notices it."""
    one, two = StandIn("one"), StandIn("two")
    coordinator = make(one, two)
    run(coordinator, 0)
    two.failures["scan"] = LostWorkerError("two:1 cannot be reached.")
    two.gone = True
    seen: list[int] = []
    look = threading.Thread(target=lambda: seen.append(coordinator.scan(SPEC, "v")[0]), daemon=True)
    look.start()
    while "scan" in two.failures:  # it has been asked, and has not answered
        time.sleep(0.005)
    assert not seen
    with pytest.raises(EpochError):
        coordinator.begin(1)
    assert coordinator.recover(1)
    run(coordinator, 1)
    look.join(30)
    assert seen
    assert coordinator.cluster.members.workers == ("one",)


def test_who_returns_to_the_durable_epoch_says_who_it_is_and_fences_no_newer_driver(make: Make, tmp_path: Path) -> None:
    """Another driver takes over after this one has looked whether there is one."""
    one, two, storage = StandIn("one"), StandIn("two"), Storage(str(tmp_path))
    coordinator = make(one, two, settings=replace(QUIET, checkpoint_interval_s=1000.0))
    for epoch in range(2):
        run(coordinator, epoch)
    two.gone = True
    assert coordinator.recover(2)
    assert coordinator.committed_epoch == -1
    info = generation_info(storage, Generation(2))
    assert (info["host"], info["pid"], info["returns_to"]) == (socket.gethostname(), os.getpid(), -1)
    run(coordinator, 0)
    one.jobs.clear()
    claim_generation(storage, {})
    with pytest.raises(FencedError, match="claimed generation 3"):
        coordinator.recover(1)
    assert latest_generation(storage) == 3
