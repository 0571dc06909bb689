"""The driver's side of an epoch as a state machine: what happened in, instructions out, no I/O.

begin on all workers -> Spark's tasks stage and seal, the sink writes -> collect seals -> prepare on all workers
-> write the manifest (the commit point) -> commit on all workers -> finish
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from anabranch.core.answers import Refusal
from anabranch.core.epoch_events import (
    AbortOn,
    BeginOn,
    CollectSeals,
    CommitOn,
    EpochBegun,
    EpochEvent,
    EpochInstruction,
    FailEpoch,
    Failure,
    FinishEpoch,
    ManifestFailed,
    ManifestWritten,
    PrepareOn,
    RunEvent,
    RunMissing,
    RunTasks,
    SealsReported,
    SinkFailed,
    SinkWritten,
    TasksRan,
    WorkerBegan,
    WorkerCommitted,
    WorkerPrepared,
    WorkerRefused,
    WriteManifest,
)
from anabranch.core.errors import EpochError, FencedError
from anabranch.core.ids import NO_EPOCH, NO_RUN, Epoch, Run, StageAttempt, StagePartition, WorkerId
from anabranch.core.state_files import ChangeFile

#: How often tasks whose changes are missing are run again before the epoch fails.
MISSING_ROUNDS_MAX = 2


class Step(StrEnum):
    """How far the run is."""

    IDLE = "idle"  #: between epochs
    BEGINNING = "beginning"  #: workers begin the epoch
    RUNNING = "running"  #: Spark's tasks run
    COLLECTING = "collecting"  #: workers report what is sealed
    PREPARING = "preparing"  #: workers write change files
    WRITING = "writing"  #: the manifest is being written
    COMMITTING = "committing"  #: the epoch is committed; workers add it to their state


class EpochMachine:
    """One job's epochs, one after another, within one generation. The caller hands in one event at a time."""

    def __init__(self, committed: Epoch) -> None:
        #: The newest epoch that is part of the state.
        self.committed = committed
        self.step = Step.IDLE
        #: The epoch that runs, or ran last.
        self.epoch = NO_EPOCH
        #: Counts the runs. It never falls, so that an event or a request tells which run it belongs to.
        self.run = NO_RUN
        #: Set once a newer driver was noticed. Nothing begins after that.
        self.fenced = False
        self.workers: frozenset[WorkerId] = frozenset()
        self.owners: Mapping[StagePartition, frozenset[WorkerId]] = {}
        #: The workers whose answer the current step still needs. Not empty in a step that waits for workers.
        self.waiting: set[WorkerId] = set()
        self.sink_written = False
        self.missing_rounds = 0
        #: What each worker last reported as sealed.
        self.seals: dict[WorkerId, frozenset[StageAttempt]] = {}
        #: One attempt for each task, sealed on all of its owners. None until every task has one.
        self.choice: frozenset[StageAttempt] | None = None
        #: The change files of the workers that have prepared.
        self.files: dict[WorkerId, tuple[tuple[Epoch, ChangeFile], ...]] = {}
        #: Workers that refused to commit. What they prepared is durable, so it does not hold up the epoch.
        self.lost: set[WorkerId] = set()

    def handle(self, event: EpochEvent) -> list[EpochInstruction]:
        match event:
            case EpochBegun():
                return self._begin(event)
            case RunEvent() if event.run == self.run and self.step is not Step.IDLE:
                return self._handle_run_event(event)
        return []

    def rewind(self, committed: Epoch) -> None:
        """Return to an older epoch, whose state the workers are given again. Runs go on counting."""
        self._end()
        self.committed = committed

    def check(self) -> None:
        """Check the invariants that the attributes' comments state."""
        waits = (Step.BEGINNING, Step.COLLECTING, Step.PREPARING, Step.COMMITTING)
        assert bool(self.waiting) == (self.step in waits), vars(self)
        assert self.waiting <= self.workers - self.lost, vars(self)
        if self.step in (Step.PREPARING, Step.WRITING, Step.COMMITTING):
            assert self.sink_written, vars(self)
            assert self.choice is not None, vars(self)
            assert {attempt.task for attempt in self.choice} == self.owners.keys(), vars(self)
            assert len(self.choice) == len(self.owners), vars(self)
        if self.step in (Step.WRITING, Step.COMMITTING):
            assert self.files.keys() == self.workers, vars(self)
        if self.lost:
            assert self.step is Step.COMMITTING, vars(self)
        if self.step is not Step.IDLE:
            assert self.epoch in (self.committed, self.committed + 1), vars(self)

    def _handle_run_event(self, event: RunEvent) -> list[EpochInstruction]:
        match event:
            case WorkerBegan() if self._expects(Step.BEGINNING, event.worker):
                return self._answered(event.worker, then=self._run_tasks)
            case TasksRan() if self.step is Step.RUNNING:
                return self._collect()
            case SinkWritten() if not self.sink_written:
                return self._sink_written()
            case SinkFailed() if self.step in (Step.RUNNING, Step.COLLECTING):
                return self._fail(Failure.SINK, event.message)
            case SealsReported() if self._expects(Step.COLLECTING, event.worker):
                self.seals[event.worker] = event.attempts
                return self._answered(event.worker, then=self._choose)
            case WorkerPrepared() if self._expects(Step.PREPARING, event.worker):
                self.files[event.worker] = event.files
                return self._answered(event.worker, then=self._write_manifest)
            case ManifestWritten() if self.step is Step.WRITING:
                return self._commit()
            case ManifestFailed() if self.step is Step.WRITING:
                return self._fail(Failure.FENCED if event.fenced else Failure.MANIFEST, event.message)
            case WorkerCommitted() if self._expects(Step.COMMITTING, event.worker):
                return self._answered(event.worker, then=self._finish)
            case WorkerRefused():
                return self._refused(event)
        return []

    def _expects(self, step: Step, worker: WorkerId) -> bool:
        return self.step is step and worker in self.waiting

    def _answered(self, worker: WorkerId, then: Callable[[], list[EpochInstruction]]) -> list[EpochInstruction]:
        self.waiting.discard(worker)
        return [] if self.waiting else then()

    def _begin(self, event: EpochBegun) -> list[EpochInstruction]:
        self._check_begin(event)
        self.epoch, self.run = event.epoch, Run(self.run + 1)
        self.workers, self.owners = event.workers, dict(event.owners)
        self.sink_written, self.missing_rounds, self.choice = False, 0, None
        self.seals, self.files, self.lost = {}, {}, set()
        self.step, self.waiting = Step.BEGINNING, set(self.workers)
        return [BeginOn(self.epoch, self.run, worker) for worker in sorted(self.workers)]

    def _check_begin(self, event: EpochBegun) -> None:
        if self.fenced:
            raise FencedError("A newer driver has taken over the job; stop this one.")
        if self.step is not Step.IDLE:
            raise EpochError(f"Epoch {self.epoch} has not ended; let it finish or fail before the next begins.")
        if event.epoch not in (self.committed, self.committed + 1):
            raise EpochError(
                f"Epoch {event.epoch} cannot follow epoch {self.committed}; restart the query, which reads the "
                "newest epoch from the checkpoint."
            )
        strangers = frozenset().union(*event.owners.values()) - event.workers
        if strangers or not event.workers or not all(event.owners.values()):
            raise EpochError(
                f"Epoch {event.epoch} has tasks without owners, or owners outside its workers {sorted(strangers)}; "
                "take tasks and workers from one route."
            )

    def _run_tasks(self) -> list[EpochInstruction]:
        self.step = Step.RUNNING
        return [RunTasks(self.epoch, self.run)]

    def _sink_written(self) -> list[EpochInstruction]:
        if self.step is Step.RUNNING:
            self.sink_written = True
            return self._collect() if self.choice is None else self._prepare()
        self.sink_written = self.step is Step.COLLECTING
        return []

    def _collect(self) -> list[EpochInstruction]:
        self.step, self.waiting = Step.COLLECTING, set(self.workers)
        return [CollectSeals(self.epoch, self.run, worker) for worker in sorted(self.workers)]

    def _choose(self) -> list[EpochInstruction]:
        chosen = choose_attempts(self.owners, self.seals)
        missing = frozenset(self.owners.keys() - chosen.keys())
        self.step = Step.RUNNING
        if not missing:
            self.choice = frozenset(chosen.values())
            return self._prepare() if self.sink_written else []
        self.missing_rounds += 1
        if self.missing_rounds > MISSING_ROUNDS_MAX:
            return self._fail(
                Failure.INCOMPLETE,
                f"The changes of {len(missing)} tasks ({min(missing)} is one) are not complete on the workers that "
                "own their keys; look for refused or failed requests in the logs of the tasks.",
            )
        return [RunMissing(self.epoch, self.run, missing)]

    def _prepare(self) -> list[EpochInstruction]:
        assert self.choice is not None
        self.step, self.waiting = Step.PREPARING, set(self.workers)
        chosen: dict[WorkerId, set[StageAttempt]] = {worker: set() for worker in self.workers}
        for attempt in self.choice:
            for worker in self.owners[attempt.task]:
                chosen[worker].add(attempt)
        return [PrepareOn(self.epoch, self.run, w, frozenset(chosen[w])) for w in sorted(self.workers)]

    def _write_manifest(self) -> list[EpochInstruction]:
        self.step = Step.WRITING
        files = tuple(file for worker in sorted(self.files) for file in self.files[worker])
        return [WriteManifest(self.epoch, self.run, files)]

    def _commit(self) -> list[EpochInstruction]:
        self.step, self.waiting = Step.COMMITTING, set(self.workers)
        return [CommitOn(self.epoch, self.run, worker) for worker in sorted(self.waiting)]

    def _finish(self) -> list[EpochInstruction]:
        lost = frozenset(self.lost)
        self._end()
        self.committed = self.epoch
        return [FinishEpoch(self.epoch, self.run, lost)]

    def _refused(self, event: WorkerRefused) -> list[EpochInstruction]:
        if event.reason is Refusal.FENCED:
            return self._fail(Failure.FENCED, event.message, [event.worker])
        if event.worker not in self.waiting:
            return []
        # What the worker prepared is durable and counts; that the worker does not have it makes it a lost one.
        if self.step is Step.COMMITTING:
            self.lost.add(event.worker)
            return self._answered(event.worker, then=self._finish)
        return self._fail(Failure.REFUSED, event.message, [event.worker])

    def _fail(self, reason: Failure, message: str, workers: Iterable[WorkerId] = ()) -> list[EpochInstruction]:
        reached = sorted(self.workers - set(workers))
        instructions: list[EpochInstruction] = [FailEpoch(self.epoch, self.run, reason, message, frozenset(workers))]
        self.fenced = self.fenced or reason is Failure.FENCED
        self._end()
        # The workers obey the newer driver already.
        aborts = [] if self.fenced else [AbortOn(self.epoch, self.run, worker) for worker in reached]
        return [*aborts, *instructions]

    def _end(self) -> None:
        self.step = Step.IDLE
        self.waiting.clear()
        self.lost.clear()


def choose_attempts(
    owners: Mapping[StagePartition, frozenset[WorkerId]],
    seals: Mapping[WorkerId, frozenset[StageAttempt]],
) -> dict[StagePartition, StageAttempt]:
    """For each task the lowest attempt that is sealed on all of the task's owners; tasks without one are left out."""
    sealed_on: dict[StageAttempt, set[WorkerId]] = {}
    for worker, attempts in seals.items():
        for attempt in attempts:
            sealed_on.setdefault(attempt, set()).add(worker)
    chosen: dict[StagePartition, StageAttempt] = {}
    for attempt in sorted(sealed_on):
        if attempt.task in owners and attempt.task not in chosen and owners[attempt.task] <= sealed_on[attempt]:
            chosen[attempt.task] = attempt
    return chosen
