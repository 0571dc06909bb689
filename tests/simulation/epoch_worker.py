"""A simulated worker process: machine and holdings are those of the package, and dictionaries stand for stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epoch_checkpoint import VARIABLE, DataFile, change_file_of
from epoch_peers import BusyError
from epoch_requests import (
    Assign,
    CloseJob,
    Complete,
    FetchGroups,
    FetchKeys,
    Health,
    JobRequest,
    Progress,
    Release,
    UnableError,
)
from epoch_rows import Changes
from epoch_state import HeldState

from anabranch.checkpoint import paths
from anabranch.checkpoint.manifests import ChangeFile
from anabranch.core.errors import AnabranchError, FencedError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.requests import (
    Abort,
    AcceptChanges,
    AddLayer,
    AnswerSeals,
    Begin,
    Commit,
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
from anabranch.worker.drain import NO_LIMIT
from anabranch.worker.staging import Staging

if TYPE_CHECKING:
    from epoch_world import World

Answer = Any  #: what a request is answered with, a Refuse, or an AnabranchError


class DictStaging(Staging):
    """Pieces are dictionaries here: they are combined by whoever needs them."""

    def pieces_of(self, attempt: StageAttempt) -> list[Any]:
        return self._pieces[attempt]


class WorkerProcess:
    """What the service and the job do with a request: see the worker's job."""

    def __init__(self, world: World, name: WorkerId, machine_class: type[TransactionMachine]) -> None:
        self.world = world
        self.name = name
        self.machine_class = machine_class
        self.alive = True
        #: Counts the processes of this name.
        self.process = 0
        self.silent_until = 0
        self.silent_but_late = False
        self.state: Any = None
        self.forget()

    def forget(self) -> None:
        self.known = False
        self.machine = self.machine_class()
        #: The generation and number of the assignment that was carried out last.
        self.assignment = 0, 0
        self.reset()

    def reset(self) -> None:
        if self.state is not None:
            self.state.close()
        self.state = HeldState(self)
        self.staging = DictStaging()
        self.prepared: dict[int, Changes] = {}

    def restart(self) -> None:
        """The process ends, and another one with its name starts."""
        self.process += 1
        self.forget()

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
            if isinstance(request, JobRequest):
                return self.manage(request)
            return self.transact(request, data)
        except AnabranchError as error:
            self.world.count(error)
            return error

    def manage(self, request: JobRequest) -> Answer:
        newest = self.machine.generation
        if newest is not None and request.generation < newest:
            raise FencedError("a newer driver has taken over")
        match request:
            case Assign():
                return self.assign(request)
            case Progress():
                self.state.holdings.start_drain()
                return self.progress()
            case Complete():
                self.state.holdings.complete_all()
                return self.progress()
            case Release():
                self.release(request)
            case FetchKeys():
                return self.state.fetch_keys(request)
            case FetchGroups():
                return self.state.fetch_groups(request)
            case CloseJob():
                self.forget()
        return None

    def assign(self, request: Assign) -> Answer:
        if request.epoch != self.machine.committed:
            raise UnableError(f"key groups as of epoch {request.epoch} do not fit")
        if (request.generation, request.number) < self.assignment:
            self.world.seen["an older assignment is refused"] += 1
            raise UnableError(f"assignment {request.number} is not the newest")
        self.assignment = request.generation, request.number
        self.state.assign(request)
        return self.progress()

    def progress(self) -> dict[str, int]:
        return {**self.state.holdings.progress(), "assignment": self.assignment[1]}

    def release(self, request: Release) -> None:
        if (request.generation, request.number) != self.assignment:
            self.world.seen["a release comes after a newer assignment"] += 1
            return
        self.world.seen["kept groups are released"] += bool(self.state.holdings.frozen)
        # In a thread of its own, which may have other things to do first.
        holdings = self.state.holdings
        self.world.at(self.world.rng.choice((0, 0, 10, 60)), holdings.release, holdings.frozen)

    def drain_pause(self) -> int:
        return self.world.rng.randint(8, self.world.history.drain_ticks)

    def start_drain(self, state: HeldState) -> None:
        if not state.draining:
            state.draining = True
            self.world.at(self.drain_pause(), self.drain, state)

    def drain(self, state: HeldState) -> None:
        state.draining = False
        if not self.alive or state is not self.state:
            return
        state.draining = True
        try:
            more = state.holdings.drain_some(self.world.rng)
        except BusyError:
            more = True
        except AnabranchError as error:
            self.world.count(error)
            more = True
        state.draining = False
        if more:
            self.start_drain(state)

    def transact(self, request: Request, data: Any) -> Answer:
        if isinstance(request, Stage | Seal):
            self.state.fetch_changed(request.attempt.stage, data[1])
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
        if not isinstance(answer, Refuse):
            answer = self.note_epoch(request, answer)
        if isinstance(request, Open) and AddLayer(request.committed_epoch) in instructions:
            self.world.seen["caught up with a lost commit"] += 1
        elif isinstance(request, Begin) and DropLayersAfter(Epoch(request.epoch - 1)) in instructions:
            self.world.seen["rolled back to run an epoch again"] += 1
        return answer

    def note_epoch(self, request: Request, answer: Answer) -> Answer:
        """Holdings are told where epochs begin and end; a commit is answered with how far they are."""
        holdings = self.state.holdings
        match request:
            case Begin():
                holdings.begin_epoch(NO_LIMIT)
            case Commit():
                holdings.end_epoch()
                return self.progress()
            case Abort():
                holdings.end_epoch()
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
                return self.state.read(*data, instruction.epoch)
            case AcceptChanges():
                self.staging.begin(instruction.attempt, data[1])
            case DiscardAttempt():
                self.staging.discard(instruction.attempt)
            case AnswerSeals():
                return instruction.attempts
            case WriteChangeFiles():
                return self.write_changes(instruction)
            case AddLayer():
                for (stage, _), state in self.state.states.items():
                    state.add_layer(instruction.epoch, self.prepared.get(stage, {}))
                self.prepared = {}
                self.staging.clear()
            case FoldUpTo():
                for state in self.state.states.values():
                    state.fold(instruction.epoch)
            case DropLayersAfter():
                for state in self.state.states.values():
                    state.drop_layers_after(instruction.epoch)
            case ResetState():
                self.reset()
        return None

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
