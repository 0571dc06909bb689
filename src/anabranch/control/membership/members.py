"""The workers of a job, and the driver's connections to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.control.membership.launcher import WorkerAddress
from anabranch.core.errors import SettingsError, WorkerError
from anabranch.core.ids import WorkerId
from anabranch.core.requests import Health
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials


@dataclass(frozen=True)
class Member:
    """A worker that takes part in the job."""

    worker: WorkerId
    address: str
    pid: int
    client: WorkerClient
    #: Where it keeps state; empty if that has not been asked.
    store: str = ""


class Membership:
    """All workers of a job. Its content changes between epochs only."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.all = tuple(members)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(member.worker for member in self.all)

    def get(self, worker: WorkerId) -> Member:
        return next(member for member in self.all if member.worker == worker)

    def add(self, member: Member) -> None:
        self.all = (*self.all, member)

    def remove(self, worker: WorkerId) -> None:
        """Let go of a worker, and close the connection to it."""
        self.take(worker).client.close()

    def take(self, worker: WorkerId) -> Member:
        """Let go of a worker; the connection to it stays open."""
        taken = self.get(worker)
        self.all = tuple(member for member in self.all if member is not taken)
        return taken

    def close(self) -> None:
        for member in self.all:
            member.client.close()


def connect(addresses: Sequence[WorkerAddress], *, timeout_s: float, credentials: Credentials) -> Membership:
    """Connections to workers whose ids are known."""
    return Membership(
        [
            Member(a.worker, a.address, a.pid, WorkerClient(a.address, timeout_s=timeout_s, credentials=credentials))
            for a in addresses
        ]
    )


def discover(
    addresses: Sequence[str], *, timeout_s: float, start_timeout_s: float, credentials: Credentials
) -> Membership:
    """Connections to running workers, after asking each who it is."""
    members = []
    for address in addresses:
        client = WorkerClient(address, timeout_s=timeout_s, credentials=credentials)
        health = client.call(Health(), timeout_s=start_timeout_s)
        members.append(Member(health.worker, address, health.pid, client, health.store))
    ids = [member.worker for member in members]
    for member in members:
        if ids.count(member.worker) > 1:
            raise SettingsError(
                f"Two addresses of anabranch.workerAddresses lead to the worker {member.worker!r}. Name each worker "
                "once, and start workers with different --id."
            )
    if not members:
        raise WorkerError("There are no workers. Set anabranch.workers or anabranch.workerAddresses.")
    return Membership(members)
