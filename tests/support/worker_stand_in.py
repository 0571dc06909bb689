"""Stands for the connection to a state worker: answers as a worker would, remembers everything, fails when told to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from anabranch.control.membership.members import Member, Membership
from anabranch.core import answers, requests
from anabranch.core.errors import LostWorkerError
from anabranch.core.ids import Attempt, JobId, Partition, StageAttempt, StageNumber, WorkerId
from anabranch.core.state_files import ChangeFile
from anabranch.wire.messages import kind_of


class StandIn:
    """A worker that has sealed every task that it is asked about."""

    def __init__(self, name: str, sealed: list[list[int]] | None = None) -> None:
        self.name = name
        self.address = f"{name}:1"
        self.sealed = sealed or []
        self.requests: list[requests.Request[Any]] = []
        #: How long it may take to answer, as it was told with the last request of each kind; None: the client's limit.
        self.timeouts_s: dict[str, float | None] = {}
        #: What to raise, by the kind of request; taken out when it was raised.
        self.failures: dict[str, Exception] = {}
        self.rows: list[pa.RecordBatch] = []
        self.jobs: set[JobId] = set()
        self.closed = False
        self.gone = False
        #: Key groups that it says are still on their way to it.
        self.pending_groups = 0
        #: The number of the assignment that it was given last.
        self.assignment = 0

    def call(self, request: requests.Request[Any], timeout_s: float | None = None) -> Any:
        kind = kind_of(type(request))
        self.timeouts_s[kind] = timeout_s
        if not isinstance(request, requests.Health):  # those of the heartbeat come at any time
            self.requests.append(request)
        if kind in self.failures:
            raise self.failures.pop(kind)
        if self.gone:
            raise LostWorkerError(f"{self.address} cannot be reached.")
        match request:
            case requests.Health():
                return answers.WorkerHealth(
                    worker=WorkerId(self.name), pid=7, store="memory", jobs=frozenset(self.jobs)
                )
            case requests.OpenJob():
                self.jobs.add(request.job)
                return answers.Opened(groups=())
            case requests.ReportSeals():
                return answers.SealedAttempts(attempts=frozenset(_attempt(*each) for each in self.sealed))
            case requests.Prepare():
                changes = answers.VariableChanges(stage=StageNumber(1), variable="v", put=2, removed=1)
                files = ((request.epoch, self.file(request)),) if request.chosen else ()
                return answers.Prepared(files=files, rows=3, variables=(changes,))
            case requests.Describe():
                held = answers.HeldVariable(stage=StageNumber(1), variable="v", rows=2, bytes=30)
                return answers.HeldState(progress=self.progress(), load=(), variables=(held,))
            case requests.Assign():
                self.assignment = request.number
                return answers.Assigned(adopted=0, dropped=0, progress=self.progress())
            case requests.HandOver():
                return answers.HandedOver(offers=())
            case requests.Commit() | requests.ReportProgress() | requests.Complete():
                return self.progress()
        return answers.Done()

    def progress(self) -> answers.TransferProgress:
        return answers.TransferProgress(assignment=self.assignment, pending_groups=self.pending_groups, frozen_groups=0)

    def stream(self, request: requests.Scan) -> Iterator[pa.RecordBatch]:
        self.requests.append(request)
        if "scan" in self.failures:
            raise self.failures.pop("scan")
        yield from self.rows

    def close(self) -> None:
        self.closed = True

    def file(self, request: requests.Prepare) -> ChangeFile:
        path = f"anabranch/changes/{self.name}-{request.epoch}.parquet"
        return ChangeFile(StageNumber(1), "v", WorkerId(self.name), path, rows=3, bytes=100, checksum="x")

    def kinds(self) -> list[str]:
        return [kind_of(type(request)) for request in self.requests]


def _attempt(stage: int, partition: int, attempt: int) -> StageAttempt:
    return StageAttempt(StageNumber(stage), Partition(partition), Attempt(attempt))


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
