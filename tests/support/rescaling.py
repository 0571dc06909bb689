"""A job on stand-ins for workers, for tests of rescales: makes coordinators, runs epochs, looks at what was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from anabranch.control.coordinator import Coordinator
from anabranch.control.membership.members import Member
from anabranch.control.membership.rescale import Rescale
from anabranch.control.owned_checkpoint import claim
from anabranch.control.resume import resume
from anabranch.core import requests
from anabranch.core.answers import Flushed
from anabranch.core.errors import WorkerError
from anabranch.core.ids import StageNumber
from anabranch.core.reports import EpochReport
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.core.settings import Settings
from support.waiting import wait_until
from support.worker_stand_in import NoSupply, StandIn, Supply, membership

VARIABLE = VariableSpec("v", VariableKind.VALUE, pa.schema([("n", pa.int64())]))
SPEC = StageSpec(StageNumber(1), "stage1", pa.schema([("k", pa.int64())]), (VARIABLE,))
KEY_GROUPS = 8

Make = Callable[..., Coordinator]


@contextmanager
def making(folder: Path) -> Iterator[Make]:
    made: list[Coordinator] = []

    def make(*workers: StandIn, worker_pool: NoSupply | None = None, **settings: Any) -> Coordinator:
        """Nothing is done in the background: tests call what the heartbeat would."""
        members = membership(*workers)
        resumed = resume(claim(str(folder), [SPEC], KEY_GROUPS), members)
        chosen = Settings(workers=len(workers), key_groups=KEY_GROUPS, heartbeat_s=60.0, **settings)
        made.append(Coordinator(resumed, members, chosen, {StageNumber(1): 2}, worker_pool or NoSupply()))
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.cluster.close()


class LoadedStandIn(StandIn):
    """A worker that says how many keys of each key group were asked for, and has nothing to make durable."""

    def __init__(self, name: str, load: dict[int, float] | None = None) -> None:
        super().__init__(name)
        self.load = load or {}

    def call(self, request: requests.Request[Any], timeout_s: float | None = None) -> Any:
        answer = super().call(request, timeout_s)
        if isinstance(request, requests.Describe):
            answer = replace(answer, load=tuple(self.load.items()))
        if isinstance(request, requests.Flush):
            answer = Flushed(files=())
        return answer


class SlowSupply(Supply):
    """Starts workers only when it is told that they may be ready."""

    def __init__(self, *workers: StandIn) -> None:
        super().__init__(*workers)
        self.may_start = threading.Event()

    def start(self) -> Member | None:
        assert self.may_start.wait(30)
        return super().start()


class FailingSupply(Supply):
    """Says that it starts workers, and cannot."""

    def start(self) -> Member | None:
        raise WorkerError("A state worker failed to start. Make room.")


def run(coordinator: Coordinator, epoch: int) -> EpochReport:
    """An epoch in which every worker has sealed what it owns."""
    coordinator.begin(epoch)
    access = coordinator.accesses()[1]
    for position, member in enumerate(coordinator.members):
        owned = {int(p) for p, o in zip(access.partitions, access.routing.owners, strict=True) if o == position}
        member.client.sealed = [[1, partition, 0] for partition in sorted(owned)]  # type: ignore[attr-defined]
    assert coordinator.missing(epoch) == {}
    return coordinator.commit(epoch)


def rescale(coordinator: Coordinator, workers: int | None = None, **other: Any) -> Rescale:
    return coordinator.rescale(Rescale("test", workers=workers, **other))


def wait_until_started(coordinator: Coordinator) -> None:
    wait_until(lambda: not coordinator.cluster.starting)


def assigns(worker: StandIn) -> list[requests.Assign]:
    return [request for request in worker.requests if isinstance(request, requests.Assign)]


def groups_of(worker: StandIn) -> list[int]:
    return list(assigns(worker)[-1].groups)


def releases(worker: StandIn) -> list[int]:
    return [request.number for request in worker.requests if isinstance(request, requests.Release)]
