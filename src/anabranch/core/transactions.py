"""The worker's side of an epoch as a state machine: requests in, instructions out, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anabranch.core.answers import Refusal
from anabranch.core.errors import WorkerError
from anabranch.core.ids import NO_EPOCH, NO_RUN, Epoch, Generation, RunId, StageAttempt
from anabranch.core.requests import (
    Abort,
    Begin,
    Commit,
    EpochRequest,
    JobRequest,
    OpenJob,
    Prepare,
    Read,
    ReportSeals,
    Write,
)


class WorkerInstruction:
    """What the process around the machine is to do, in the order given. No instructions: it is done already."""


@dataclass(frozen=True)
class ServeState(WorkerInstruction):
    """Answer the read with the state as of this epoch."""

    epoch: Epoch


@dataclass(frozen=True)
class AcceptChanges(WorkerInstruction):
    """Take in what the attempt sends."""

    attempt: StageAttempt


@dataclass(frozen=True)
class DiscardAttempt(WorkerInstruction):
    """Forget what the attempt has sent."""

    attempt: StageAttempt


@dataclass(frozen=True)
class AnswerSeals(WorkerInstruction):
    """Answer with the attempts that are sealed here."""

    attempts: frozenset[StageAttempt]


@dataclass(frozen=True)
class WriteChangeFiles(WorkerInstruction):
    """Write the attempts' changes to the checkpoint, under a name that holds epoch and run, and answer with the files.

    It comes again when the request is repeated; writing the same files again is harmless, and so is answering from
    memory.
    """

    epoch: Epoch
    run: RunId
    attempts: tuple[StageAttempt, ...]


@dataclass(frozen=True)
class AddLayer(WorkerInstruction):
    """Put the prepared changes on top of the state, as a layer of their own."""

    epoch: Epoch


@dataclass(frozen=True)
class DropLayersAfter(WorkerInstruction):
    """Drop every layer that is later than this epoch."""

    epoch: Epoch


@dataclass(frozen=True)
class FoldUpTo(WorkerInstruction):
    """Merge the layers up to this epoch into the base: they will not be rolled back any more."""

    epoch: Epoch


@dataclass(frozen=True)
class ResetState(WorkerInstruction):
    """Forget all local state: it is not that of this epoch. It comes back from its sources or the checkpoint."""

    epoch: Epoch


@dataclass(frozen=True)
class Refuse(WorkerInstruction):
    """Change nothing and answer with the reason."""

    reason: Refusal
    message: str


class TransactionMachine:
    """One job's epochs on one worker. The caller hands in one request at a time."""

    def __init__(self) -> None:
        #: The generation that opened the job last; None before the first. It never falls.
        self.generation: Generation | None = None
        #: The newest epoch that is part of the state, and the run it came from (None while there is no epoch).
        self.committed = NO_EPOCH
        self.committed_by: RunId | None = None
        #: The newest epoch in the base: the committed one, or the one before it. It cannot be rolled back.
        self.folded = NO_EPOCH
        self.folded_by: RunId | None = None
        #: The newest run of this generation that was heard of; NO_RUN after a new generation has opened the job.
        self.run = NO_RUN
        #: The epoch that runs, as run ``run``: always the one after the committed one. None between epochs.
        self.running: Epoch | None = None
        #: The attempts that sent changes, each with whether it is sealed. Empty between epochs.
        self.staged: dict[StageAttempt, bool] = {}
        #: How many parts of their changes have come. The first part replaces all that came before.
        self.parts: dict[StageAttempt, int] = {}
        #: Set when the worker could not do what it was told: until the job is opened anew, its state is of no use.
        self.broken = False
        #: The choice that is, or is being made, durable. Exactly these attempts are left in ``staged`` then.
        self.prepared: frozenset[StageAttempt] | None = None

    def handle(self, request: JobRequest[Any]) -> list[WorkerInstruction]:
        if isinstance(request, OpenJob):
            return self._open(request)
        refusal = self._check_generation(request)
        if refusal is not None:
            return [refusal]
        if self.broken:
            return [self._refuse_broken()]
        match request:
            case Begin():
                return self._begin(request)
            case Commit():
                return self._commit(request)
            case Abort():
                return self._abort(request)
            case Prepare() if self._is_committed(request):
                return []
            case EpochRequest() if (self.running, self.run) != (request.epoch, request.run):
                return [self._wrong_epoch(request)]
            case Read():
                return [ServeState(self.committed)]
            case Write():
                return self._write(request)
            case ReportSeals():
                return [AnswerSeals(frozenset(a for a, sealed in self.staged.items() if sealed))]
            case Prepare():
                return self._prepare(request)
        raise WorkerError(f"There is no request {type(request).__name__}; use driver and workers of one version.")

    def break_down(self) -> None:
        """Records that an instruction could not be carried out: the state has not followed this machine."""
        self.broken = True
        self._end_run()

    def check(self) -> None:
        """Check the invariants that the attributes' comments state."""
        if self.generation is None:
            assert (self.committed, self.folded, self.running) == (NO_EPOCH, NO_EPOCH, None), vars(self)
        assert self.folded <= self.committed <= self.folded + 1, vars(self)
        assert (self.committed_by is None) == (self.committed == NO_EPOCH), vars(self)
        assert (self.folded_by is None) == (self.folded == NO_EPOCH), vars(self)
        assert self.parts.keys() == self.staged.keys(), vars(self)
        if self.running is None:
            assert not self.staged, vars(self)
            assert self.prepared is None, vars(self)
        else:
            assert self.running == self.committed + 1, vars(self)
            assert self.folded == self.committed, vars(self)
            assert self.run > NO_RUN, vars(self)
        if self.prepared is not None:
            assert self.prepared == self.staged.keys(), vars(self)
            assert all(self.staged.values()), vars(self)

    def _open(self, request: OpenJob) -> list[WorkerInstruction]:
        goal = (request.committed_epoch, request.committed_by)
        if self.generation is not None and request.generation < self.generation:
            return [self._fenced(request.generation)]
        if self.broken:
            return self._open_anew(request)
        if request.generation == self.generation:
            if goal == (self.committed, self.committed_by):
                return self._fold()
            if self._is_older(request):
                return [self._refuse_wrong_epoch(f"opening at epoch {request.committed_epoch}")]
        instructions: list[WorkerInstruction] = []
        if self.prepared is not None and goal == (self.running, self._run_id):
            # The manifest holds exactly what is prepared here; only the word to commit it was lost.
            instructions += self._add_layer()
        instructions += self._end_run()
        if request.generation != self.generation:
            self.generation = request.generation
            self.run = NO_RUN
        if goal == (self.committed, self.committed_by):
            return instructions + self._fold()
        if goal == (self.folded, self.folded_by):
            return instructions + self._drop_layer()
        self.committed, self.committed_by = self.folded, self.folded_by = goal
        return [*instructions, ResetState(self.committed)]

    def _open_anew(self, request: OpenJob) -> list[WorkerInstruction]:
        """Nothing of what is here can be trusted."""
        if request.generation != self.generation:
            self.generation, self.run = request.generation, NO_RUN
        self.broken = False
        goal = (request.committed_epoch, request.committed_by)
        self.committed, self.committed_by = self.folded, self.folded_by = goal
        return [ResetState(self.committed)]

    def _is_older(self, request: OpenJob) -> bool:
        """Whether the request was overtaken: what it calls committed has been followed or replaced since."""
        if request.committed_epoch == self.committed and request.committed_by and self.committed_by:
            return request.committed_by < self.committed_by
        return request.committed_epoch < self.committed

    def _begin(self, request: Begin) -> list[WorkerInstruction]:
        if request.run == self.run and (request.epoch == self.running or self._is_committed(request)):
            return []
        may_roll_back = request.epoch == self.committed and self.folded < self.committed
        if request.run <= self.run or not (request.epoch == self.committed + 1 or may_roll_back):
            return [self._wrong_epoch(request)]
        instructions = self._end_run()
        if request.epoch == self.committed:
            instructions += self._drop_layer()
        self.running, self.run = request.epoch, request.run
        return instructions + self._fold()

    def _write(self, request: Write) -> list[WorkerInstruction]:
        if request.chunk == 0:
            return self._stage(request)
        attempt, parts = request.staged, self.parts.get(request.staged, 0)
        is_repeated = request.chunk < parts
        if self.prepared is not None and not (is_repeated and self.staged.get(attempt)):
            return [self._already_prepared(request)]
        if attempt not in self.staged or request.chunk > parts:
            message = f"Changes of {attempt} are missing before part {request.chunk}. Let the task run again."
            return [Refuse(Refusal.INCOMPLETE, message)]
        self.staged[attempt] |= request.last
        if is_repeated:
            return []
        self.parts[attempt] += 1
        return [AcceptChanges(attempt)]

    def _stage(self, request: Write) -> list[WorkerInstruction]:
        """Takes in the first part of an attempt's changes, in place of whatever the attempt has sent before."""
        if self.prepared is not None:
            return [self._already_prepared(request)]
        attempt = request.staged
        discarded = self._discard([attempt]) if attempt in self.staged else []
        self.staged[attempt], self.parts[attempt] = request.last, 1
        return [*discarded, AcceptChanges(attempt)]

    def _prepare(self, request: Prepare) -> list[WorkerInstruction]:
        if self.prepared is not None and self.prepared != request.chosen:
            return [self._already_prepared(request)]
        incomplete = sorted(attempt for attempt in request.chosen if not self.staged.get(attempt))
        if incomplete:
            message = f"{incomplete[0]} is not sealed here, nor are {len(incomplete) - 1} others; run the epoch again."
            return [Refuse(Refusal.NOT_SEALED, message)]
        self.prepared = request.chosen
        instructions: list[WorkerInstruction] = [
            WriteChangeFiles(request.epoch, self._run_id, tuple(sorted(request.chosen)))
        ]
        return instructions + self._discard(self.staged.keys() - request.chosen)

    def _commit(self, request: Commit) -> list[WorkerInstruction]:
        if self._is_committed(request):
            return []
        if (self.running, self.run) != (request.epoch, request.run):
            return [self._wrong_epoch(request)]
        if self.prepared is None:
            message = f"Epoch {request.epoch} is not prepared here; prepare it, or run it again."
            return [Refuse(Refusal.WRONG_STEP, message)]
        return self._add_layer()

    def _abort(self, request: Abort) -> list[WorkerInstruction]:
        if self._is_committed(request):
            message = f"Epoch {request.epoch} is committed and cannot be aborted any more."
            return [Refuse(Refusal.WRONG_STEP, message)]
        if request.run < self.run:
            return []
        # Remembered even if its Begin never came, so that one that comes late begins nothing.
        self.run = request.run
        return self._end_run()

    @property
    def _run_id(self) -> RunId:
        assert self.generation is not None
        return RunId(self.generation, self.run)

    def _is_committed(self, request: EpochRequest[Any]) -> bool:
        """Whether the very run that the request belongs to is committed here."""
        return (self.committed, self.committed_by) == (request.epoch, RunId(request.generation, request.run))

    def _add_layer(self) -> list[WorkerInstruction]:
        assert self.running is not None
        self.committed, self.committed_by = self.running, self._run_id
        self.running, self.prepared = None, None
        self.staged.clear()
        self.parts.clear()
        return [AddLayer(self.committed)]

    def _fold(self) -> list[WorkerInstruction]:
        """Fold the newest layer: the driver has shown that Spark committed its epoch."""
        if self.folded == self.committed:
            return []
        self.folded, self.folded_by = self.committed, self.committed_by
        return [FoldUpTo(self.folded)]

    def _drop_layer(self) -> list[WorkerInstruction]:
        self.committed, self.committed_by = self.folded, self.folded_by
        return [DropLayersAfter(self.committed)]

    def _end_run(self) -> list[WorkerInstruction]:
        self.running, self.prepared = None, None
        return self._discard(list(self.staged))

    def _discard(self, attempts: Iterable[StageAttempt]) -> list[WorkerInstruction]:
        ordered = sorted(attempts)
        for attempt in ordered:
            del self.staged[attempt], self.parts[attempt]
        return [DiscardAttempt(attempt) for attempt in ordered]

    def _check_generation(self, request: JobRequest[Any]) -> Refuse | None:
        if self.generation is None or request.generation > self.generation:
            message = f"Generation {request.generation} has not opened the job on this worker; open it first."
            return Refuse(Refusal.NOT_OPEN, message)
        return self._fenced(request.generation) if request.generation < self.generation else None

    def _fenced(self, generation: Generation) -> Refuse:
        message = (
            f"The driver of generation {self.generation} has taken over the job from generation {generation}; "
            "stop the older driver."
        )
        return Refuse(Refusal.FENCED, message)

    def _refuse_broken(self) -> Refuse:
        message = (
            "This worker could not apply the changes of an epoch, and its state of the job cannot be used. Open the "
            "job again: its state comes from the checkpoint."
        )
        return Refuse(Refusal.NOT_OPEN, message)

    def _wrong_epoch(self, request: EpochRequest[Any]) -> Refuse:
        return self._refuse_wrong_epoch(f"{type(request).__name__} for epoch {request.epoch}, run {request.run}")

    def _refuse_wrong_epoch(self, what: str) -> Refuse:
        step = f"epoch {self.running} runs" if self.running is not None else "none runs"
        message = (
            f"This worker does not expect {what}: epoch {self.committed} is committed, {self.folded} is folded, "
            f"{step}, and run {self.run} is the newest; start a new generation, which opens the job again."
        )
        return Refuse(Refusal.WRONG_EPOCH, message)

    def _already_prepared(self, request: Write | Prepare) -> Refuse:
        message = (
            f"Epoch {request.epoch} is prepared with other attempts and takes no more changes; "
            "stop the task, or run the epoch again."
        )
        return Refuse(Refusal.WRONG_STEP, message)
