"""The worker's side of an epoch as a state machine: requests in, instructions out, no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.core.errors import WorkerError
from anabranch.core.ids import NO_EPOCH, Epoch, Generation
from anabranch.core.requests import (
    NO_RUN,
    Abort,
    AcceptChanges,
    AddLayer,
    AnswerSeals,
    Begin,
    Commit,
    DiscardAttempt,
    DropLayersAfter,
    EpochRequest,
    FoldUpTo,
    Instruction,
    Open,
    Prepare,
    Read,
    Refusal,
    Refuse,
    ReportSeals,
    Request,
    ResetState,
    RunId,
    Seal,
    ServeState,
    Stage,
    StageAttempt,
    WriteChangeFiles,
)


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
        #: Set when the worker could not do what it was told: until the job is opened anew, its state is of no use.
        self.broken = False
        #: The choice that is, or is being made, durable. Exactly these attempts are left in ``staged`` then.
        self.prepared: frozenset[StageAttempt] | None = None

    def handle(self, request: Request) -> list[Instruction]:
        if isinstance(request, Open):
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
            case Stage():
                return self._stage(request)
            case Seal():
                return self._seal(request)
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

    def _open(self, request: Open) -> list[Instruction]:
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
        instructions: list[Instruction] = []
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

    def _open_anew(self, request: Open) -> list[Instruction]:
        """Nothing of what is here can be trusted."""
        if request.generation != self.generation:
            self.generation, self.run = request.generation, NO_RUN
        self.broken = False
        goal = (request.committed_epoch, request.committed_by)
        self.committed, self.committed_by = self.folded, self.folded_by = goal
        return [ResetState(self.committed)]

    def _is_older(self, request: Open) -> bool:
        """Whether the request was overtaken: what it calls committed has been followed or replaced since."""
        if request.committed_epoch == self.committed and request.committed_by and self.committed_by:
            return request.committed_by < self.committed_by
        return request.committed_epoch < self.committed

    def _begin(self, request: Begin) -> list[Instruction]:
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

    def _stage(self, request: Stage) -> list[Instruction]:
        if self.prepared is not None:
            return [self._already_prepared(request)]
        again = request.attempt in self.staged
        self.staged[request.attempt] = request.sealed
        accept = AcceptChanges(request.attempt)
        return [DiscardAttempt(request.attempt), accept] if again else [accept]

    def _seal(self, request: Seal) -> list[Instruction]:
        if self.staged.get(request.attempt):
            return []
        if self.prepared is not None:
            return [self._already_prepared(request)]
        if request.attempt not in self.staged:
            return [Refuse(Refusal.NOT_SEALED, f"{request.attempt} has sent no changes; let the task run again.")]
        self.staged[request.attempt] = True
        return []

    def _prepare(self, request: Prepare) -> list[Instruction]:
        if self.prepared is not None and self.prepared != request.chosen:
            return [self._already_prepared(request)]
        incomplete = sorted(attempt for attempt in request.chosen if not self.staged.get(attempt))
        if incomplete:
            message = f"{incomplete[0]} is not sealed here, nor are {len(incomplete) - 1} others; run the epoch again."
            return [Refuse(Refusal.NOT_SEALED, message)]
        self.prepared = request.chosen
        instructions: list[Instruction] = [WriteChangeFiles(request.epoch, self._run_id, tuple(sorted(request.chosen)))]
        return instructions + self._discard(self.staged.keys() - request.chosen)

    def _commit(self, request: Commit) -> list[Instruction]:
        if self._is_committed(request):
            return []
        if (self.running, self.run) != (request.epoch, request.run):
            return [self._wrong_epoch(request)]
        if self.prepared is None:
            message = f"Epoch {request.epoch} is not prepared here; prepare it, or run it again."
            return [Refuse(Refusal.WRONG_STEP, message)]
        return self._add_layer()

    def _abort(self, request: Abort) -> list[Instruction]:
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

    def _is_committed(self, request: EpochRequest) -> bool:
        """Whether the very run that the request belongs to is committed here."""
        return (self.committed, self.committed_by) == (request.epoch, RunId(request.generation, request.run))

    def _add_layer(self) -> list[Instruction]:
        assert self.running is not None
        self.committed, self.committed_by = self.running, self._run_id
        self.running, self.prepared = None, None
        self.staged.clear()
        return [AddLayer(self.committed)]

    def _fold(self) -> list[Instruction]:
        """Fold the newest layer: the driver has shown that Spark committed its epoch."""
        if self.folded == self.committed:
            return []
        self.folded, self.folded_by = self.committed, self.committed_by
        return [FoldUpTo(self.folded)]

    def _drop_layer(self) -> list[Instruction]:
        self.committed, self.committed_by = self.folded, self.folded_by
        return [DropLayersAfter(self.committed)]

    def _end_run(self) -> list[Instruction]:
        self.running, self.prepared = None, None
        return self._discard(list(self.staged))

    def _discard(self, attempts: Iterable[StageAttempt]) -> list[Instruction]:
        ordered = sorted(attempts)
        for attempt in ordered:
            del self.staged[attempt]
        return [DiscardAttempt(attempt) for attempt in ordered]

    def _check_generation(self, request: Request) -> Refuse | None:
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

    def _wrong_epoch(self, request: EpochRequest) -> Refuse:
        return self._refuse_wrong_epoch(f"{type(request).__name__} for epoch {request.epoch}, run {request.run}")

    def _refuse_wrong_epoch(self, what: str) -> Refuse:
        step = f"epoch {self.running} runs" if self.running is not None else "none runs"
        message = (
            f"This worker does not expect {what}: epoch {self.committed} is committed, {self.folded} is folded, "
            f"{step}, and run {self.run} is the newest; start a new generation, which opens the job again."
        )
        return Refuse(Refusal.WRONG_EPOCH, message)

    def _already_prepared(self, request: Stage | Seal | Prepare) -> Refuse:
        message = (
            f"Epoch {request.epoch} is prepared with other attempts and takes no more changes; "
            "stop the task, or run the epoch again."
        )
        return Refuse(Refusal.WRONG_STEP, message)
