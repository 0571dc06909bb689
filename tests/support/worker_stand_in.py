"""Stands for the connection to a state worker: answers as a worker would, remembers everything, fails when told to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from anabranch.control.membership.members import Member, Membership
from anabranch.core.errors import LostWorkerError
from anabranch.core.ids import WorkerId
from anabranch.wire import messages


class StandIn:
    """A worker that has sealed every task that it is asked about."""

    def __init__(self, name: str, sealed: list[list[int]] | None = None) -> None:
        self.name = name
        self.address = f"{name}:1"
        self.sealed = sealed or []
        self.requests: list[messages.Request] = []
        #: How long it may take to answer, as it was told with the last request of each kind; None: the client's limit.
        self.timeouts_s: dict[str, float | None] = {}
        #: What to raise, by the kind of request; taken out when it was raised.
        self.failures: dict[str, Exception] = {}
        self.rows: list[pa.RecordBatch] = []
        self.jobs: set[str] = set()
        self.closed = False
        self.gone = False
        #: Key groups that it says are still on their way to it.
        self.pending_groups = 0
        #: The number of the assignment that it was given last.
        self.assignment = 0

    def call(self, request: messages.Request, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.timeouts_s[request.kind()] = timeout_s
        if not isinstance(request, messages.Health):  # those of the heartbeat come at any time
            self.requests.append(request)
        if request.kind() in self.failures:
            raise self.failures.pop(request.kind())
        if self.gone:
            raise LostWorkerError(f"{self.address} cannot be reached.")
        match request:
            case messages.Health():
                return {"worker": self.name, "pid": 7, "store": "memory", "jobs": sorted(self.jobs)}, {}
            case messages.OpenJob():
                self.jobs.add(request.job)
                return {"worker": self.name, "groups": []}, {}
            case messages.Seals():
                return {"attempts": self.sealed}, {}
            case messages.Prepare():
                return {
                    "files": [[request.epoch, self.file(request)]] if request.chosen else [],
                    "rows": 3,
                    "variables": [[1, "v", 2, 1]],
                }, {}
            case messages.Describe():
                variables = [{"stage": 1, "variable": "v", "rows": 2, "bytes": 30}]
                return {**self.progress(), "load": [], "variables": variables}, {}
            case messages.Assign():
                self.assignment = request.number
                return self.progress(), {}
            case messages.Commit() | messages.Progress() | messages.Complete():
                return self.progress(), {}
        return {}, {}

    def progress(self) -> dict[str, int]:
        return {
            "assignment": self.assignment,
            "pendingGroups": self.pending_groups,
            "frozenGroups": 0,
            "fetched_rows": 0,
            "fetched_bytes": 0,
            "drained_rows": 0,
            "drained_bytes": 0,
        }

    def stream(self, request: messages.Scan) -> Iterator[pa.RecordBatch]:
        self.requests.append(request)
        if "scan" in self.failures:
            raise self.failures.pop("scan")
        yield from self.rows

    def close(self) -> None:
        self.closed = True

    def file(self, request: messages.Prepare) -> dict[str, Any]:
        path = f"anabranch/changes/{self.name}-{request.epoch}.parquet"
        return {
            "stage": 1,
            "variable": "v",
            "worker": self.name,
            "path": path,
            "rows": 3,
            "bytes": 100,
            "checksum": "x",
        }

    def kinds(self) -> list[str]:
        return [request.kind() for request in self.requests]


def membership(*workers: StandIn) -> Membership:
    return Membership([Member(WorkerId(w.name), w.address, 7, w) for w in workers])  # type: ignore[arg-type]


class NoSupply:
    """Stands for a machine on which no worker can be started; ``ended`` are the workers whose processes have."""

    def __init__(self) -> None:
        self.ended: set[WorkerId] = set()
        self.killed: list[WorkerId] = []
        self.retired: list[WorkerId] = []

    @property
    def can_start(self) -> bool:
        return False

    def start(self) -> Member | None:
        return None

    def kill(self, worker: WorkerId) -> None:
        self.killed.append(worker)

    def retire(self, worker: WorkerId) -> None:
        self.retired.append(worker)

    def exited(self) -> frozenset[WorkerId]:
        return frozenset(self.ended)


class Supply(NoSupply):
    """Stands for a machine that starts workers: gives out stand-ins one after the other."""

    def __init__(self, *workers: StandIn) -> None:
        super().__init__()
        self.workers = list(workers)

    @property
    def can_start(self) -> bool:
        return True

    def start(self) -> Member | None:
        return membership(self.workers.pop(0)).all[0]
