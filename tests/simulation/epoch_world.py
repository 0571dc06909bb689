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
from epoch_peers import BusyError
from epoch_worker import Answer, WorkerProcess

from anabranch.core.errors import AnabranchError, LostWorkerError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.requests import RunId, StageAttempt
from anabranch.core.transactions import TransactionMachine

TIMEOUT_TICKS = 30
#: Beyond this many lost or repeated messages the network behaves, so that every history ends.
NETWORK_FAULTS_MAX = 25
STEPS_MAX = 30_000
#: So many may wait for an answer inside each other; whoever comes then starts over a little later.
WAITS_MAX = 6


class EndedError(Exception):
    """The history has ended while somebody waited."""


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
        #: How many wait for something to happen, each inside the one before.
        self.waits = 0
        #: The calls that are being handled, each inside the one before.
        self._handled: list[Call] = []
        #: Whether the next read of a worker breaks.
        self.reading_breaks: Callable[[], bool] = lambda: False
        #: Whether the next time that a worker asks another one fails.
        self.peer_breaks: Callable[[], bool] = lambda: False
        #: What happened how often: shows that the histories reach what they are meant to reach.
        self.seen: Counter[str] = Counter()
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entries = 0

    def at(self, delay: int, action: Callable[..., None], *arguments: Any) -> None:
        self._entries += 1
        heapq.heappush(self._queue, (self.now + delay, self._entries, action, arguments))

    def run(self) -> None:
        try:
            while not self.done:
                self._step()
        except EndedError:
            assert self.done

    def _step(self) -> None:
        self.steps += 1
        assert self.steps < STEPS_MAX, "the history does not end"
        assert self._queue, "nothing is left to happen, but the job has not ended"
        self.now, _, action, arguments = heapq.heappop(self._queue)
        action(*arguments)

    # -- waiting

    def ask(self, worker: WorkerId, request: Any, patience: int) -> Answer:
        """Ask a worker once, and wait for its answer while everything else goes on.

        Those who come meanwhile and have to wait too do so inside this wait, so that the last one goes on first.
        """
        answers: list[Answer] = []
        self._begin_wait()
        self._try(Call(worker, request, None, answers.append, 1, patience))
        self._wait(answers)
        return answers[0]

    def sleep(self, ticks: int) -> None:
        over: list[bool] = []
        self._begin_wait()
        self.at(ticks, over.append, True)
        self._wait(over)

    def _begin_wait(self) -> None:
        if self.waits == WAITS_MAX:
            self.seen["too many wait"] += 1
            raise BusyError
        for call in self._handled:
            self._takes_long(call)

    def _takes_long(self, call: Call) -> None:
        """Who asked is in no hurry as long as the worker is busy, but does not wait forever."""
        if not call.takes_long:
            call.takes_long = True
            call.gives_up_at = max(call.gives_up_at, self.now) + 2 * self.history.peer_timeout
            self.at(call.gives_up_at - self.now, self._give_up, call, call.tries_left)

    def _wait(self, until: list[Any]) -> None:
        self.waits += 1
        handled, self._handled = self._handled, []
        try:
            while not until:
                self._step()
                if self.done:
                    raise EndedError
        except AnabranchError as error:
            # It has nothing to do with what is waited for.
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        finally:
            self.waits -= 1
            self._handled = handled

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
        call.takes_long = False
        call.gives_up_at = self.now + call.patience
        arrives_at = self._send(self._deliver, call)
        if arrives_at >= call.gives_up_at:
            self.at(call.patience, self._give_up, call, call.tries_left)

    def _give_up(self, call: Call, tries_left: int) -> None:
        """Nobody waits for this try any more."""
        if call.tries_left == tries_left:
            self._try(call)

    def loses_message(self) -> bool:
        if self.calm or self.network_faults >= NETWORK_FAULTS_MAX or self.rng.random() >= self.history.loss_rate:
            return False
        self.network_faults += 1
        return True

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
            process = worker.process
            self._handled.append(call)
            try:
                answer = worker.receive(call.request, call.data)
            except BusyError:
                self._takes_long(call)
                if self.now < call.gives_up_at and not call.answered:
                    self.at(self.rng.randint(2, 6), self._deliver, call)
                return
            finally:
                self._handled.pop()
            if worker.alive and worker.process == process:
                arrives_at = self._send(self._answer, call, answer)
                if arrives_at < call.gives_up_at or call.answered:
                    return
        elif worker.alive and worker.silent_but_late:
            self.seen["late to a worker that was silent"] += 1
            self.at(worker.silent_until - self.now, self._deliver, call)
        if self.now < call.gives_up_at and not call.answered:
            self.at(call.gives_up_at - self.now, self._give_up, call, call.tries_left)

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
    #: How long a try is waited for.
    patience: int = TIMEOUT_TICKS
    gives_up_at: int = 0
    #: Whether the worker that handles the try waits for another one.
    takes_long: bool = False
    answered: bool = False
