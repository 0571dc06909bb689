"""The simulated world around the machines: time, a network that fails, a checkpoint, and worker processes."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from epoch_history import History, Row, State

from anabranch.core.ids import NO_EPOCH, Epoch, WorkerId
from anabranch.core.requests import (
    AcceptChanges,
    AddLayer,
    AnswerSeals,
    Begin,
    DiscardAttempt,
    DropLayersAfter,
    FoldUpTo,
    Instruction,
    Open,
    Refuse,
    Request,
    ResetState,
    RunId,
    Seal,
    ServeState,
    StageAttempt,
    WriteChangeFiles,
)
from anabranch.core.routes import Route
from anabranch.core.transactions import TransactionMachine

TIMEOUT_TICKS = 30
TRIES_MAX = 3
#: Beyond this many lost or repeated messages the network behaves, so that every history ends.
NETWORK_FAULTS_MAX = 40
STEPS_MAX = 60_000

Answer = Any  #: what a request is answered with, or a Refuse
#: Counts, each with what tells apart the attempts that may have written it: a mixture of two runs does not go unseen.
Stored = dict[Row, tuple[int, tuple[int, ...]]]
FileName = tuple[Epoch, RunId, WorkerId]


class Lost:
    """Stands for the answer that never came."""


@dataclass(frozen=True)
class ChangeFile:
    name: FileName
    attempts: tuple[StageAttempt, ...]
    changes: Stored


@dataclass(frozen=True)
class Manifest:
    """What an epoch consists of: its parent's manifest and its own change files."""

    parent: tuple[Epoch, RunId | None]
    files: tuple[FileName, ...]


@dataclass
class Checkpoint:
    """What survives: the claimed generation, routes, manifests, change files, Spark's commits, and the sink."""

    claimed: int = 0
    routes: list[Route] = field(default_factory=list)
    manifests: dict[tuple[Epoch, RunId], Manifest] = field(default_factory=dict)
    files: dict[FileName, ChangeFile] = field(default_factory=dict)
    spark_commits: list[Epoch] = field(default_factory=list)
    sink: dict[int, State] = field(default_factory=dict)

    def newest(self) -> tuple[Epoch, RunId | None]:
        """The newest epoch that Spark committed, and its run: of several manifests the greatest one's."""
        if not self.spark_commits:
            return NO_EPOCH, None
        epoch = max(self.spark_commits)
        return epoch, max(run for written, run in self.manifests if written == epoch)

    def state_at(self, epoch: Epoch, run: RunId | None) -> Stored:
        if run is None:
            return {}
        manifest = self.manifests[epoch, run]
        state = self.state_at(*manifest.parent)
        for name in manifest.files:
            state |= self.files[name].changes
        return state


class WorkerProcess:
    """A worker: the machine, and dictionaries in place of stores."""

    def __init__(self, world: World, name: WorkerId, machine: TransactionMachine) -> None:
        self.world = world
        self.name = name
        self.machine = machine
        self.alive = True
        self.isolated_until = 0
        self.base: Stored = {}
        self.layer: Stored = {}
        self.pending: dict[StageAttempt, Stored] = {}
        self.prepared: Stored = {}
        self.groups: frozenset[int] = frozenset()
        self.route_order = (-1, -1)

    def receive(self, request: Request, data: Any) -> Answer:
        answer: Answer = None
        instructions = self.machine.handle(request)
        self.machine.check()
        for instruction in instructions:
            self.world.count(instruction)
            done = self.execute(instruction, data)
            answer = answer if done is None else done
        if isinstance(answer, Refuse):
            assert len(instructions) == 1, instructions
            return answer
        if isinstance(request, Open) and AddLayer(request.committed_epoch) in instructions:
            self.world.seen["caught up with a lost commit"] += 1
        if isinstance(request, Begin) and DropLayersAfter(Epoch(request.epoch - 1)) in instructions:
            self.world.seen["rolled back to run an epoch again"] += 1
        if isinstance(request, Seal):
            self.pending[request.attempt] |= data
        elif isinstance(request, Open):
            self.take_route(request, data)
        return answer

    def execute(self, instruction: Instruction, data: Any) -> Answer:
        match instruction:
            case Refuse():
                return instruction
            case ServeState():
                assert instruction.epoch == self.machine.committed
                return {row: value for row, value in self.state.items() if row in data}
            case AcceptChanges():
                self.pending[instruction.attempt] = dict(data)
            case DiscardAttempt():
                del self.pending[instruction.attempt]
            case AnswerSeals():
                return instruction.attempts
            case WriteChangeFiles():
                return self.write_changes(instruction)
            case AddLayer():
                self.layer, self.prepared = self.prepared, {}
                self.pending.clear()
            case FoldUpTo():
                self.base, self.layer = self.state, {}
            case DropLayersAfter():
                self.layer = {}
            case ResetState():
                self.base, self.layer, self.groups = {}, {}, frozenset()
        return None

    @property
    def state(self) -> Stored:
        return self.base | self.layer

    def write_changes(self, instruction: WriteChangeFiles) -> tuple[FileName, ...]:
        self.prepared = {}
        for attempt in instruction.attempts:
            self.prepared |= self.pending[attempt]
        group_of = self.world.history.group_of
        assert all(group_of(row) in self.groups for row in self.prepared), "changes to groups of another worker"
        name = (instruction.epoch, instruction.run, self.name)
        self.world.checkpoint.files[name] = ChangeFile(name, instruction.attempts, dict(self.prepared))
        return (name,)

    def take_route(self, request: Open, route: Route) -> None:
        """Restore the groups that the route adds from the checkpoint, and let go of those that it takes away."""
        order = (request.generation, route.version)
        if order < self.route_order:
            return
        self.route_order = order
        owned = frozenset(int(group) for group in route.groups_of(self.name))
        group_of = self.world.history.group_of
        restored = self.world.checkpoint.state_at(request.committed_epoch, request.committed_by)
        kept = owned & self.groups
        self.layer = {row: value for row, value in self.layer.items() if group_of(row) in kept}
        self.base = {row: value for row, value in self.base.items() if group_of(row) in kept}
        self.base |= {row: value for row, value in restored.items() if group_of(row) in owned - kept}
        self.groups = owned


class World:
    """Time, the network, the processes. Everything that happens is an entry in one queue."""

    def __init__(self, history: History, worker_machine: type[TransactionMachine]) -> None:
        self.history = history
        self.rng = random.Random(history.seed ^ 0x5EED)
        self.checkpoint = Checkpoint()
        self.worker_machine = worker_machine
        self.workers: dict[WorkerId, WorkerProcess] = {}
        self.now = 0
        self.steps = 0
        self.network_faults = 0
        self.calm = False
        self.done = False
        #: What happened how often: shows that the histories reach what they are meant to reach.
        self.seen: Counter[str] = Counter()
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entries = 0

    def at(self, delay: int, action: Callable[..., None], *arguments: Any) -> None:
        self._entries += 1
        heapq.heappush(self._queue, (self.now + delay, self._entries, action, arguments))

    def run(self) -> None:
        while self._queue and not self.done:
            self.steps += 1
            assert self.steps < STEPS_MAX, "the history does not end"
            self.now, _, action, arguments = heapq.heappop(self._queue)
            action(*arguments)
        assert self.done, "nothing is left to happen, but the job has not ended"

    def count(self, happening: Any) -> None:
        name = type(happening).__name__
        reason = getattr(happening, "reason", None)
        self.seen[f"{name} {reason}" if reason else name] += 1

    def start_worker(self) -> None:
        name = WorkerId(f"w{len(self.workers)}")
        self.workers[name] = WorkerProcess(self, name, self.worker_machine())

    def live_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.alive]

    def latency(self) -> int:
        if self.rng.random() < self.history.delay_rate and not self.calm:
            return self.rng.randint(TIMEOUT_TICKS // 2, 4 * TIMEOUT_TICKS)
        return 1 + int(5 * self.rng.random())

    def call(self, worker: WorkerId, request: Request, data: Any, reply: Callable[[Answer], None]) -> None:
        """Ask a worker; ``reply`` gets exactly one answer: the first to arrive, or Lost after all tries."""
        self._try(Call(worker, request, data, reply), 0)

    def _try(self, call: Call, tries: int) -> None:
        if call.answered:
            return
        if tries == TRIES_MAX:
            self._answer(call, Lost())
            return
        self._send(self._deliver, call)
        self.at(TIMEOUT_TICKS, self._try, call, tries + 1)

    def _send(self, arrive: Callable[..., None], *arguments: Any) -> None:
        chance = self.rng.random()
        troubled = not self.calm and self.network_faults < NETWORK_FAULTS_MAX
        if troubled and chance < self.history.loss_rate:
            self.network_faults += 1
            return
        self.at(self.latency(), arrive, *arguments)
        if troubled and chance > 1 - self.history.duplicate_rate:
            self.network_faults += 1
            self.at(self.rng.randint(1, 200), arrive, *arguments)

    def _deliver(self, call: Call) -> None:
        worker = self.workers[call.worker]
        if worker.alive and worker.isolated_until <= self.now:
            self._send(self._answer, call, worker.receive(call.request, call.data))

    def _answer(self, call: Call, answer: Answer) -> None:
        if not call.answered:
            call.answered = True
            call.reply(answer)


@dataclass
class Call:
    worker: WorkerId
    request: Request
    data: Any
    reply: Callable[[Answer], None]
    answered: bool = False
