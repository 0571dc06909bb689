"""What a worker's job is given from outside: its scheduler, its storage, and its connections to other workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from anabranch.checkpoint.storage import Storage
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS
from anabranch.wire.client import WorkerClient, connections
from anabranch.wire.credentials import Credentials


class Connect(Protocol):
    """Makes or finds a connection to a worker."""

    def __call__(self, address: str, *, timeout_s: float, credentials: Credentials) -> WorkerClient: ...


@dataclass(frozen=True)
class WorkerParts:
    """The parts of production, unless others are named."""

    scheduler: Scheduler = THREADS
    #: Opens the checkpoint at a location.
    open_storage: Callable[[str], Storage] = Storage
    connect: Connect = connections.get


PRODUCTION = WorkerParts()
