"""The simulated world around the processes: time, a network that fails, the checkpoint, and the sink."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epoch_checkpoint import MemoryFiles, MemoryStorage
from epoch_history import History, SinkRows
from epoch_worker import Answer, WorkerProcess

from anabranch.core.errors import LostWorkerError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.requests import RunId, StageAttempt
from anabranch.core.transactions import TransactionMachine

TIMEOUT_TICKS = 30
#: Beyond this many lost or repeated messages the network behaves, so that every history ends.
NETWORK_FAULTS_MAX = 25
STEPS_MAX = 30_000


class World:
    """Time, the network, the processes. Everything that happens is an entry in one queue."""

    def __init__(self, history: History, worker_machine: type[TransactionMachine]) -> None:
        self.history = history
        self.rng = random.Random(history.seed ^ 0x5EED)
        self.storage = MemoryStorage(MemoryFiles(lambda: self.now))
        self.sink: dict[int, SinkRows] = {}
        #: The attempts whose changes a worker made durable in a run of an epoch.
        self.prepared: dict[tuple[Epoch, RunId, WorkerId], tuple[StageAttempt, ...]] = {}
        self.worker_machine = worker_machine
        self.workers: dict[WorkerId, WorkerProcess] = {}
        self.now = 0
        self.steps = 0
        self.network_faults = 0
        self.calm = False
        self.done = False
        #: Whether the next read of a worker breaks.
        self.reading_breaks: Callable[[], bool] = lambda: False
        #: What happened how often: shows that the histories reach what they are meant to reach.
        self.seen: Counter[str] = Counter()
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entries = 0

    def at(self, delay: int, action: Callable[..., None], *arguments: Any) -> None:
        self._entries += 1
        heapq.heappush(self._queue, (self.now + delay, self._entries, action, arguments))

    def run(self) -> None:
        queue = self._queue
        while queue and not self.done:
            self.steps += 1
            assert self.steps < STEPS_MAX, "the history does not end"
            self.now, _, action, arguments = heapq.heappop(queue)
            action(*arguments)
        assert self.done, "nothing is left to happen, but the job has not ended"

    def count(self, happening: Any) -> None:
        reason = getattr(happening, "reason", None)
        name = type(happening).__name__
        self.seen[f"{name} {reason}" if reason else name] += 1

    def start_worker(self) -> WorkerId:
        name = WorkerId(f"w{len(self.workers)}")
        self.workers[name] = WorkerProcess(self, name, self.worker_machine)
        return name

    def live_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.alive]

    def latency(self) -> int:
        chance = self.rng.random()
        if chance < self.history.delay_rate and not self.calm:
            return self.rng.randint(TIMEOUT_TICKS // 2, 4 * TIMEOUT_TICKS)
        return 1 + int(5 * chance)

    def call(self, worker: WorkerId, request: Any, data: Any, reply: Callable[[Answer], None]) -> None:
        """Ask a worker; ``reply`` gets exactly one answer: the first to arrive, or LostWorkerError after all tries."""
        self._try(Call(worker, request, data, reply, self.history.tries))

    def _try(self, call: Call) -> None:
        if call.answered:
            return
        if call.tries_left == 0:
            self._answer(call, LostWorkerError(f"{call.worker} does not answer"))
            return
        call.tries_left -= 1
        call.gives_up_at = self.now + TIMEOUT_TICKS
        arrives_at = self._send(self._deliver, call)
        if arrives_at >= call.gives_up_at:
            self.at(TIMEOUT_TICKS, self._try, call)

    def _send(self, arrive: Callable[..., None], *arguments: Any) -> int:
        """Returns when the message arrives; if it is lost, that is never."""
        chance = self.rng.random()
        troubled = not self.calm and self.network_faults < NETWORK_FAULTS_MAX
        if troubled and chance < self.history.loss_rate:
            self.network_faults += 1
            return self.now + STEPS_MAX
        delay = self.latency()
        self.at(delay, arrive, *arguments)
        if troubled and chance > 1 - self.history.duplicate_rate:
            self.network_faults += 1
            self.at(self.rng.randint(1, 200), arrive, *arguments)
        return self.now + delay

    def _deliver(self, call: Call) -> None:
        worker = self.workers[call.worker]
        if worker.reachable:
            arrives_at = self._send(self._answer, call, worker.receive(call.request, call.data))
            if arrives_at < call.gives_up_at or call.answered:
                return
        elif worker.alive and worker.silent_but_late:
            self.seen["late to a worker that was silent"] += 1
            self.at(worker.silent_until - self.now, self._deliver, call)
        if self.now < call.gives_up_at and not call.answered:
            self.at(call.gives_up_at - self.now, self._try, call)

    def _answer(self, call: Call, answer: Answer) -> None:
        if not call.answered:
            call.answered = True
            call.reply(answer)


@dataclass
class Call:
    worker: WorkerId
    request: Any
    data: Any
    reply: Callable[[Answer], None]
    tries_left: int
    gives_up_at: int = 0
    answered: bool = False
