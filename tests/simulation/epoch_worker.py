"""A simulated worker process: machine and holdings are those of the package, and dictionaries stand for stores."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from epoch_checkpoint import VARIABLE, Changes, DataFile, FilesOrigin, Value, applied, change_file_of, origin_files
from epoch_history import STAGES, Row

from anabranch.checkpoint import paths
from anabranch.checkpoint.manifests import ChangeFile
from anabranch.checkpoint.statefiles import StateFiles
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import Epoch, Generation, RouteVersion, WorkerId
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
    ReportSeals,
    Request,
    ResetState,
    Seal,
    ServeState,
    Stage,
    StageAttempt,
    WriteChangeFiles,
)
from anabranch.core.transactions import TransactionMachine
from anabranch.worker.holdings import Holdings, Variable
from anabranch.worker.origins import Hashes
from anabranch.worker.staging import Staging

if TYPE_CHECKING:
    from epoch_world import World

Answer = Any  #: what a request is answered with, a Refuse, or an AnabranchError


@dataclass(frozen=True)
class Assign:
    """Hold exactly these key groups as of a committed epoch."""

    generation: Generation
    epoch: Epoch
    route_version: RouteVersion
    groups: tuple[int, ...]
    files: StateFiles


@dataclass(frozen=True)
class Describe:
    generation: Generation


@dataclass(frozen=True)
class CloseJob:
    generation: Generation


@dataclass(frozen=True)
class Health:
    """Answered with whether the worker knows the job."""


class UnableError(AnabranchError):
    """The worker cannot do what it was asked to."""


class DictState:
    """The state of one variable: a base, and one layer for each of the latest epochs."""

    def __init__(self, group_of: dict[Row, int]) -> None:
        self._group_of = group_of
        self.base: dict[Row, Value] = {}
        self.layers: list[tuple[Epoch, Changes]] = []

    def load(self, changes: list[tuple[Row, Value | None]]) -> None:
        for row, value in changes:
            if value is None:
                self.base.pop(row, None)
            else:
                self.base[row] = value

    def rows(self) -> dict[Row, Value]:
        """All that is here, as of the newest layer."""
        if not self.layers:
            return self.base
        return applied([*self.base.items(), *(change for _, layer in self.layers for change in layer.items())])

    def add_layer(self, epoch: Epoch, changes: Changes) -> None:
        self.layers.append((epoch, changes))

    def drop_layers_after(self, epoch: Epoch) -> None:
        self.layers = [layer for layer in self.layers if layer[0] <= epoch]

    def fold(self, up_to: Epoch) -> None:
        for epoch, changes in self.layers:
            if epoch <= up_to:
                self.load(list(changes.items()))
        self.layers = [layer for layer in self.layers if layer[0] > up_to]

    def drop_groups(self, groups: Collection[int]) -> None:
        group_of = self._group_of
        self.base = {row: value for row, value in self.base.items() if group_of[row] not in groups}
        self.layers = [
            (epoch, {row: value for row, value in changes.items() if group_of[row] not in groups})
            for epoch, changes in self.layers
        ]


class DictStaging(Staging):
    """Pieces are dictionaries here: they are combined by whoever needs them."""

    def pieces_of(self, attempt: StageAttempt) -> list[Any]:
        return self._pieces[attempt]


class StepwiseHoldings(Holdings):
    """Drained step by step when the simulation says so, in any order, instead of by a thread."""

    def _start_drain(self) -> None:
        pass

    def is_missing(self, variable: Variable, hashes: Hashes) -> bool:
        """Whether the state of one of these keys has not arrived."""
        return any(len(adoption._missing(hashes)) for adoption in self._adoptions.get(variable, ()))

    def drain_some(self, rng: random.Random) -> bool:
        """Bring some key groups; whether there is more to do."""
        self._let_go()
        unfinished = self._all()
        if not unfinished:
            return False
        adoption = rng.choice(unfinished)
        pending = adoption.pending
        adoption.drain(rng.sample(pending, rng.randint((len(pending) + 1) // 2, len(pending))))
        return True


class WorkerProcess:
    """What the service and the job do with a request: see the worker's job."""

    def __init__(self, world: World, name: WorkerId, machine_class: type[TransactionMachine]) -> None:
        self.world = world
        self.name = name
        self.machine_class = machine_class
        self.alive = True
        self.silent_until = 0
        self.silent_but_late = False
        self.forget()

    def forget(self) -> None:
        self.known = False
        self.machine = self.machine_class()
        #: The generation and version of the route that key groups were last assigned by.
        self.route = 0, 0
        self.reset()

    def reset(self) -> None:
        group_of = self.world.history.group_of
        self.states: dict[Variable, Any] = {(stage, VARIABLE): DictState(group_of) for stage in range(STAGES)}
        self.holdings = StepwiseHoldings(self.states, self.world.history.key_groups)
        self.staging = DictStaging()
        self.prepared: dict[int, Changes] = {}

    @property
    def reachable(self) -> bool:
        return self.alive and self.silent_until <= self.world.now

    def receive(self, request: Any, data: Any) -> Answer:
        try:
            match request:
                case Health():
                    return self.known
                case Open():
                    self.known = True
                case _ if not self.known:
                    raise UnableError("the worker does not take part in the job")
            match request:
                case Request():
                    return self.transact(request, data)
                case Assign() | Describe() | CloseJob():
                    return self.manage(request)
        except AnabranchError as error:
            self.world.count(error)
            return error

    def manage(self, request: Assign | Describe | CloseJob) -> Answer:
        newest = self.machine.generation
        if newest is not None and request.generation < newest:
            raise UnableError("a newer driver has taken over")
        match request:
            case Describe():
                return self.holdings.progress()["pendingGroups"]
            case CloseJob():
                self.forget()
            case Assign():
                self.assign(request)
        return None

    def assign(self, request: Assign) -> None:
        if request.epoch != self.machine.committed:
            raise UnableError(f"key groups as of epoch {request.epoch} do not fit")
        route = request.generation, request.route_version
        if route < self.route:
            self.world.seen["an older route is refused"] += 1
            raise UnableError(f"route {request.route_version} is not the newest")
        self.route = route
        if any(map(self.holdings.pending, self.states)):
            self.world.seen["assigned while groups are pending"] += 1
        adopted, dropped = self.holdings.assign(
            request.groups,
            lambda variable, _: FilesOrigin(
                self.world.storage, origin_files(request.files, variable[0]), self.world.reading_breaks
            ),
        )
        if dropped:
            self.world.seen["groups dropped"] += 1
        if adopted:
            self.world.seen["groups adopted"] += 1
            self.world.at(self.drain_pause(), self.drain, self.holdings)

    def drain_pause(self) -> int:
        return self.world.rng.randint(8, self.world.history.drain_ticks)

    def drain(self, holdings: StepwiseHoldings) -> None:
        if not self.alive or holdings is not self.holdings:
            return
        try:
            more = holdings.drain_some(self.world.rng)
        except AnabranchError as error:
            self.world.count(error)
            more = True
        if more:
            self.world.at(self.drain_pause(), self.drain, holdings)

    def transact(self, request: Request, data: Any) -> Answer:
        if isinstance(request, Stage | Seal):
            self.fetch(request.attempt.stage, data[1])
        if isinstance(request, Seal):
            refused = self.add_piece(request, *data)
            if refused is not None:
                return refused
        instructions = self.machine.handle(request)
        self.machine.check()
        answer: Answer = None
        for instruction in instructions:
            self.world.count(instruction)
            done = self.execute(instruction, data)
            answer = answer if done is None else done
        if isinstance(request, Open) and AddLayer(request.committed_epoch) in instructions:
            self.world.seen["caught up with a lost commit"] += 1
        elif isinstance(request, Begin) and DropLayersAfter(Epoch(request.epoch - 1)) in instructions:
            self.world.seen["rolled back to run an epoch again"] += 1
        return answer

    def add_piece(self, request: Seal, number: int, changes: Any) -> Refuse | None:
        """Take in a later piece, if it is of the run that is under way."""
        run = {"generation": request.generation, "epoch": request.epoch, "run": request.run}
        (checked,) = self.machine.handle(ReportSeals(**run))
        if isinstance(checked, Refuse):
            self.world.count(checked)
            return checked
        self.staging.add(request.attempt, number, changes)
        return None

    def execute(self, instruction: Instruction, data: Any) -> Answer:
        match instruction:
            case Refuse():
                return instruction
            case ServeState():
                assert instruction.epoch == self.machine.committed
                return self.read(*data)
            case AcceptChanges():
                self.staging.begin(instruction.attempt, data[1])
            case DiscardAttempt():
                self.staging.discard(instruction.attempt)
            case AnswerSeals():
                return instruction.attempts
            case WriteChangeFiles():
                return self.write_changes(instruction)
            case AddLayer():
                for (stage, _), state in self.states.items():
                    state.add_layer(instruction.epoch, self.prepared.get(stage, {}))
                self.prepared = {}
                self.staging.clear()
            case FoldUpTo():
                for state in self.states.values():
                    state.fold(instruction.epoch)
            case DropLayersAfter():
                for state in self.states.values():
                    state.drop_layers_after(instruction.epoch)
            case ResetState():
                self.reset()
        return None

    def fetch(self, stage: int, rows: Collection[Row]) -> None:
        self.holdings.fetch((stage, VARIABLE), self.hashes_of(rows))

    def hashes_of(self, rows: Collection[Row]) -> Hashes:
        hash_of = self.world.history.hash_of
        return np.array([hash_of[row] for row in rows], dtype=np.int64)

    def read(self, stage: int, keys: Collection[Row], rest: Collection[int] | None) -> dict[Row, Value]:
        """The state of these keys, and, if ``rest`` says so, all of some key groups."""
        self.fetch(stage, keys)
        state = self.states[stage, VARIABLE]
        if rest is None:
            here = state.rows()
            return {row: here[row] for row in keys if row in here}
        self.holdings.complete((stage, VARIABLE), rest)
        group_of = self.world.history.group_of
        return {row: value for row, value in state.rows().items() if row in keys or group_of[row] in rest}

    def write_changes(self, do: WriteChangeFiles) -> tuple[ChangeFile, ...]:
        history, written = self.world.history, []
        self.world.prepared[do.epoch, do.run, self.name] = do.attempts
        self.prepared = {}
        for attempt in do.attempts:
            for piece in self.staging.pieces_of(attempt):
                if piece:
                    self.prepared.setdefault(attempt.stage, {}).update(piece)
        for stage, changes in sorted(self.prepared.items()):
            path = paths.change_file(
                f"s{stage}", VARIABLE, epoch=do.epoch, generation=do.run.generation, run=do.run.run, worker=self.name
            )
            data: Any = DataFile(changes, history.hash_of)
            self.world.storage.write(path, data)
            written.append(change_file_of(stage, self.name, path, len(changes)))
        return tuple(written)

    def check(self, expected: dict[Row, int]) -> None:
        """What is here is what it should be, and nothing is missing but what is still on its way."""
        group_of, held = self.world.history.group_of, self.holdings.groups
        for (stage, variable), state in self.states.items():
            pending = self.holdings.pending((stage, variable))
            here = {row: count for row, (count, _) in state.rows().items()}
            wanted = {row: count for row, count in expected.items() if row[0] == stage and group_of[row] in held}
            wrong = [row for row, count in here.items() if wanted.get(row) != count]
            # A read that broke may have left something older, which nobody sees before the rest has come.
            wrong = [row for row in wrong if not self.holdings.is_missing((stage, variable), self.hashes_of([row]))]
            assert not wrong, f"{self.name} holds {here} instead of {wanted}"
            missing = [row for row in wanted if row not in here and group_of[row] not in pending]
            assert not missing, f"{self.name} lacks {missing}"
