"""Simulated worker processes: jobs, state and stores are those of the package, on simulated threads and files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from anabranch.control.membership.members import Member
from anabranch.core.errors import AnabranchError, WorkerError
from anabranch.core.ids import WorkerId
from anabranch.core.requests import Request
from anabranch.wire.credentials import Credentials
from anabranch.worker.parts import WorkerParts
from anabranch.worker.server.jobs import WorkerJobs
from anabranch.worker.stores.options import StoreOptions
from simulated.network import SimClient
from simulated.redis import SharedStores
from simulated.shortcuts import SimStores
from simulated.storage import SimStorage
from simulated.world import Process

if TYPE_CHECKING:
    from simulated.application import Application


class BrokenMemoryError(MemoryError):
    """A fault inside a worker that no code of ours expects."""


class WorkerProcess:
    """A worker. Another process may take its place, with its name and address and without its state."""

    def __init__(self, application: Application, name: WorkerId) -> None:
        self._application = application
        self.name = name
        self.address = f"{name}:1"
        self.silent_until = 0.0
        self.silent_but_late = False
        self.processes = 0
        self.start()

    def start(self) -> None:
        application = self._application
        self.processes += 1
        self.process = Process(application.world, f"{self.name}.{self.processes}")
        process = self.process

        def connect(address: str, *, timeout_s: float, credentials: Any) -> Any:
            del credentials
            return SimClient(application.network, process, address, timeout_s)

        parts = WorkerParts(
            scheduler=process,
            open_storage=lambda location: SimStorage(application.disk, location, process),
            connect=connect,
        )
        self.jobs = WorkerJobs(self.name, self._stores(), Credentials(), parts)

    def _stores(self) -> StoreOptions:
        if self._application.redis is not None:
            return SharedStores("redis", process=self.process, trouble=self._application.redis)
        return StoreOptions("memory") if self._application.history.real_state else SimStores("memory")

    def kill(self) -> None:
        self.process.kill()

    def restart(self) -> None:
        """The process ends, and another one starts in its place."""
        self.process.kill()
        self.start()

    @property
    def is_alive(self) -> bool:
        return self.process.alive

    @property
    def is_reachable(self) -> bool:
        return self.process.alive and self.silent_until <= self._application.world.now

    def answer(self, request: Request[Any], tables: dict[str, pa.Table]) -> Any:
        """As the service does: an error that nobody expects is one of the worker's."""
        try:
            header, parts = self.jobs.answer(request, tables)
            found: dict[str, list[pa.Table]] = {}
            for name, table in parts:
                found.setdefault(name, []).append(table)
        except AnabranchError:
            raise
        except BrokenMemoryError as error:
            raise WorkerError(f"The worker {self.name} failed: {error}") from None
        return header, {name: pa.concat_tables(each) for name, each in found.items()}

    def stream(self, request: Request[Any]) -> list[pa.RecordBatch]:
        _, batches = self.jobs.stream(request)
        return list(batches)


class Supply:
    """Starts and ends workers for a simulated driver."""

    def __init__(self, application: Application, process: Process) -> None:
        self._application = application
        self._process = process
        self.can_start = True

    def start(self) -> Member | None:
        application = self._application
        self._process.sleep(application.world.rng.uniform(0.001, 0.05))
        if application.take("starts_to_fail"):
            raise WorkerError("A state worker failed to start.")
        if application.take("starts_to_break"):
            raise BrokenMemoryError("no memory for another worker")
        return member_of(application, self._process, application.idle_worker())

    def kill(self, worker: WorkerId) -> None:
        if self._application.history.embedded:
            self._application.workers[worker].kill()

    def retire(self, worker: WorkerId) -> None:
        if self._application.history.embedded:
            self._application.workers[worker].kill()

    def exited(self) -> frozenset[WorkerId]:
        # Only the end of processes that the driver has started itself is known at once.
        if not self._application.history.embedded:
            return frozenset()
        return frozenset(name for name, worker in self._application.workers.items() if not worker.is_alive)


def member_of(application: Application, process: Process, worker: WorkerProcess) -> Member:
    client: Any = SimClient(application.network, process, worker.address, application.settings.request_timeout_s)
    return Member(worker.name, worker.address, 7, client)
