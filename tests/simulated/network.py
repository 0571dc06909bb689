"""A network between simulated processes: requests and answers that are lost, late, or come twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from anabranch.core.errors import AnabranchError, LostWorkerError, WorkerError
from anabranch.core.requests import Exchange, Request, RowRequest
from anabranch.wire.client import _ERROR_KINDS
from anabranch.wire.messages import kind_of
from simulated.world import Process, SimFuture, World

if TYPE_CHECKING:
    from simulated.workers import WorkerProcess

A = TypeVar("A")

#: Beyond this many lost or repeated messages the network behaves, so that every history ends.
FAULTS_MAX = 25
#: Rows of one piece of a stream.
PIECE_ROWS = 3


class Network:
    """Carries requests to workers and answers back."""

    def __init__(self, world: World, *, loss: float, duplication: float, delay: float, piece_s: float) -> None:
        self.world = world
        self._loss = loss
        self._duplication = duplication
        self._delay = delay
        #: How long the next piece of a stream is under way at most.
        self.piece_s = piece_s
        self.calm = False
        self._faults = 0
        #: By address.
        self.workers: dict[str, WorkerProcess] = {}
        #: Whether the next request of a worker to another one comes to nothing.
        self.peer_breaks = lambda: False

    def latency_s(self) -> float:
        chance = self.world.rng.random()
        if chance < self._delay and not self.calm:
            return self.world.rng.uniform(0.05, 0.4)
        return 0.0005 + 0.003 * chance

    def send(self, deliver: Any, *arguments: Any) -> None:
        """Carries one message, or loses it, or carries it twice."""
        rng = self.world.rng
        if not self.calm and self._faults < FAULTS_MAX:
            chance = rng.random()
            if chance < self._loss:
                self._faults += 1
                self.world.seen["a message is lost"] += 1
                return
            if chance > 1 - self._duplication:
                self._faults += 1
                self.world.seen["a message comes twice"] += 1
                self.world.at(rng.uniform(0.001, 0.3), deliver, *arguments)
        self.world.at(self.latency_s(), deliver, *arguments)

    def ask(
        self, address: str, request: Request[Any], tables: Mapping[str, pa.Table], answer: SimFuture, how: str
    ) -> None:
        self.send(self._deliver, address, request, tables, answer, how)

    def _deliver(self, address: str, request: Request[Any], tables: Any, answer: SimFuture, how: str) -> None:
        worker = self.workers.get(address)
        if worker is None or not worker.process.alive:
            lost = LostWorkerError(f"The state worker at {address} cannot be reached.")
            self.send(answer.fail, lost)
        elif self.world.now < worker.silent_until:
            if worker.silent_but_late:
                self.world.seen["late to a worker that was silent"] += 1
                wait_s = worker.silent_until - self.world.now
                self.world.at(wait_s, self._deliver, address, request, tables, answer, how)
        else:
            worker.process.start(
                partial(self._handle, worker, request, tables, answer, how), name=kind_of(type(request))
            )

    def _handle(self, worker: WorkerProcess, request: Request[Any], tables: Any, answer: SimFuture, how: str) -> None:
        try:
            result = worker.answer(request, tables) if how == "call" else worker.stream(request)
        except AnabranchError as error:
            self.world.seen[f"{type(error).__name__} on {kind_of(type(request))}"] += 1
            self.send(answer.fail, _travelled(error))
        else:
            self.send(answer.succeed, result)


class SimClient:
    """What the package knows as WorkerClient: a connection of a process to a worker."""

    def __init__(self, network: Network, process: Process, address: str, timeout_s: float) -> None:
        self.network = network
        self._process = process
        self.address = address
        self._timeout_s = timeout_s

    def call(self, request: Request[A], *, timeout_s: float | None = None) -> A:
        answer: A = self._ask(request, {}, timeout_s, "call")[0]
        return answer

    def exchange(self, request: Exchange, tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        answer: dict[str, pa.Table] = self._ask(request, tables, None, "call")[1]
        return answer

    def stream(self, request: RowRequest) -> Iterator[pa.RecordBatch]:
        batches = self._ask(request, {}, None, "stream")
        for batch in batches:
            for start in range(0, batch.num_rows, PIECE_ROWS):
                self._process.sleep(self.network.world.rng.uniform(0.0, self.network.piece_s))
                self._check_reached(request)
                yield batch.slice(start, PIECE_ROWS)

    def close(self) -> None: ...

    def _ask(self, request: Request[Any], tables: Mapping[str, pa.Table], timeout_s: float | None, how: str) -> Any:
        self._check_reached(request)
        answer = SimFuture(self._process)
        self.network.ask(self.address, request, tables, answer, how)
        try:
            return answer.result(self._timeout_s if timeout_s is None else timeout_s)
        except TimeoutError:
            message = f"The state worker at {self.address} did not answer {kind_of(type(request))!r}."
            raise LostWorkerError(message) from None

    def _check_reached(self, request: Request[Any]) -> None:
        """Requests from worker to worker break on their own as well."""
        if kind_of(type(request)).startswith("fetch") and self.network.peer_breaks():
            self.network.world.seen["a request to a former owner breaks"] += 1
            raise LostWorkerError(f"The state worker at {self.address} cannot be reached.")


def _travelled(error: AnabranchError) -> AnabranchError:
    """An error as it arrives on the other side, where not every kind is known."""
    kind = type(error).__name__
    return _ERROR_KINDS.get(kind, WorkerError)(str(error))
