"""One job on one worker: carries out what the transaction machine decides on the state of the job's variables."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa

from anabranch.checkpoint import paths
from anabranch.checkpoint.datafiles import write_changes
from anabranch.checkpoint.manifests import ChangeFile
from anabranch.core import requests
from anabranch.core.errors import EpochError, FencedError, WorkerError
from anabranch.core.ids import Attempt, Epoch, Generation, Partition, StageNumber, WorkerId
from anabranch.core.requests import Refusal, Run, RunId, StageAttempt
from anabranch.core.schemas import StageSpec
from anabranch.core.transactions import TransactionMachine
from anabranch.wire import messages
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import Parts
from anabranch.worker.parts import PRODUCTION, WorkerParts
from anabranch.worker.server.deferred_changes import DeferredChanges
from anabranch.worker.server.folds import Folds
from anabranch.worker.server.staging import Staging, Tables, counts_of, keys_in
from anabranch.worker.state.job_state import JobShape, JobState
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.transfer.group_ownership import GroupOwnership, Variable

logger = logging.getLogger(__name__)


class WorkerJob:
    """The state of one job. Requests come from several threads; the machine decides about one at a time."""

    def __init__(
        self,
        worker: WorkerId,
        job: str,
        stores: StoreOptions,
        credentials: Credentials,
        parts: WorkerParts = PRODUCTION,
    ) -> None:
        self._parts = parts
        self._worker = worker
        self._job = job
        self._stores = stores
        self._credentials = credentials
        self._lock = parts.scheduler.lock()
        self._machine = TransactionMachine()
        self._folds = Folds(parts.scheduler)
        self._releaser = parts.scheduler.line("release", stands_back=True)
        self._opened: JobState | None = None
        self._staging = Staging()
        #: The chosen changes of the epoch that is prepared, by stage and variable.
        self._prepared: dict[Variable, pa.Table] = {}
        self._prepared_late: dict[int, int] = {}
        self._prepared_by = RunId(Generation(0), requests.NO_RUN)
        self._deferred = DeferredChanges()
        self._defers = False
        self._routing: dict[str, Any] = {}
        #: The generation and number of the assignment that was carried out last.
        self._assignment = 0, 0

    def open(self, request: messages.OpenJob) -> dict[str, Any]:
        """Take part from an epoch on. State of that epoch that is here stays; any other is forgotten."""
        by = RunId(Generation(request.committed_by[0]), Run(request.committed_by[1])) if request.committed_by else None
        stages = {spec["number"]: StageSpec.from_json(spec) for spec in request.stages}
        with self._lock:
            if self._opened is not None:
                self._opened.look()
            instructions = self._decide(
                requests.Open(
                    generation=Generation(request.generation),
                    committed_epoch=Epoch(request.committed_epoch),
                    committed_by=by,
                )
            )
            self._carry_out(instructions)
            outdated = any(isinstance(instruction, requests.ResetState) for instruction in instructions)
            shape = JobShape(request.key_groups, request.checkpoint, stages)
            if outdated or self._opened is None or self._opened.shape != shape:
                self._reset(shape)
            self._deferred.forget_up_to(request.committed_epoch)  # a job is opened at a durable epoch
            self._state.ownership.end_epoch()  # the driver before may have left one unfinished
            return {"worker": self._worker, "groups": sorted(self._state.ownership.groups)}

    def assign(self, request: messages.Assign) -> dict[str, Any]:
        """Hold exactly these key groups; answers with how many came and went."""
        with self._lock:
            self._check_assignment(request)
            return {**self._state.assign(request, self._credentials), **self._progress()}

    def hand_over(self, request: messages.HandOver) -> dict[str, Any]:
        with self._lock:
            self._check_assignment(request)
            return self._state.hand_over(request)

    def _check_assignment(self, request: messages.Assign | messages.HandOver) -> None:
        """That it fits the state that is here, and is the newest."""
        self._check_usable(request)
        if request.epoch != self._machine.committed:
            raise EpochError(
                f"Key groups as of epoch {request.epoch} do not fit worker {self._worker}, which has epoch "
                f"{self._machine.committed}. Open the job at that epoch first."
            )
        if (request.generation, request.number) < self._assignment:
            raise EpochError(f"Worker {self._worker} has been given other key groups since. Leave them.")
        self._assignment = request.generation, request.number

    def begin(self, request: messages.Begin) -> dict[str, Any]:
        with self._lock:
            self._carry_out(self._decide(requests.Begin(**_epoch(request))))
            self._routing = request.routing
            self._deferred.forget_up_to(request.durable_epoch)
            self._state.ownership.begin_epoch(request.drain_rows)
        try:
            self._folds.settle()
        except Exception:
            with self._lock:
                self._machine.break_down()
            raise
        return {}

    def look_up_route(self, request: messages.LookUpRoute) -> dict[str, Any]:
        with self._lock:
            self._check_usable(request)
            return self._routing

    def read(self, request: messages.Read, tables: Tables) -> Parts:
        with self._lock:
            instructions = self._decide(requests.Read(**_epoch(request)))
            self._carry_out(instructions)
            state = self._state
        epoch = next(i.epoch for i in instructions if isinstance(i, requests.ServeState))
        state.note_further_rows(tables.get(messages.FURTHER_ROWS))
        return state.read(request, keys_in(tables), epoch)

    def write(self, request: messages.Write, tables: Tables) -> dict[str, Any]:
        attempt = StageAttempt(StageNumber(request.stage), Partition(request.partition), Attempt(request.attempt))
        epoch = _epoch(request)
        checked = self._state.checked_changes(request.stage, tables)
        with self._lock:
            if request.chunk == 0:
                staged = requests.Stage(**epoch, attempt=attempt, sealed=request.last)
                self._carry_out(self._decide(staged))
                self._staging.begin(attempt, checked, request.late)
                return {}
            # An attempt of an older run may have the same number: its pieces must not get among those of a newer one.
            self._carry_out(self._decide(requests.ReportSeals(**epoch)))
            self._staging.add(attempt, request.chunk, checked)
            if request.last:
                self._carry_out(self._decide(requests.Seal(**epoch, attempt=attempt)))
        return {}

    def seals(self, request: messages.Seals) -> dict[str, Any]:
        with self._lock:
            instructions = self._decide(requests.ReportSeals(**_epoch(request)))
            self._carry_out(instructions)
        answer = next(i for i in instructions if isinstance(i, requests.AnswerSeals))
        return {"attempts": [list(attempt) for attempt in sorted(answer.attempts)]}

    def prepare(self, request: messages.Prepare) -> dict[str, Any]:
        chosen = frozenset(StageAttempt(StageNumber(s), Partition(p), Attempt(a)) for s, p, a in request.chosen)
        with self._lock:
            instructions = self._decide(requests.Prepare(**_epoch(request), chosen=chosen))
            self._carry_out(instructions)
            files = []
            for instruction in instructions:
                if isinstance(instruction, requests.WriteChangeFiles):
                    self._prepared = self._staging.combined(instruction.attempts)
                    self._prepared_late = self._staging.late(instruction.attempts)
                    self._prepared_by = instruction.run
                    self._defers = not request.durable
                    if request.durable:
                        files = self._write_deferred(request.deferred)
                        files += self._write_files(instruction.epoch, instruction.run, self._prepared)
            rows = sum(len(changes) for changes in self._prepared.values())
            variables = [[*variable, *counts_of(changes)] for variable, changes in sorted(self._prepared.items())]
            late = sorted(self._prepared_late.items())
        return {"files": files, "rows": rows, "variables": variables, "late": late}

    def flush(self, request: messages.Flush) -> dict[str, Any]:
        with self._lock:
            self._check_usable(request)
            # They stay deferred until the driver says that they are durable: it may fail to write the manifests.
            files = self._write_deferred(request.deferred)
        return {"files": files}

    def commit(self, request: messages.Commit) -> dict[str, Any]:
        with self._lock:
            # Whatever a shared store has lost: the epoch counts, and what is here is put right before the next one.
            self._carry_out(self._machine.handle(requests.Commit(**_epoch(request))))
            self._state.ownership.end_epoch()
        return self._progress()

    def abort(self, request: messages.Abort) -> dict[str, Any]:
        with self._lock:
            self._carry_out(self._decide(requests.Abort(**_epoch(request))))
            self._state.ownership.end_epoch()
        return {}

    def describe(self, request: messages.Describe) -> dict[str, Any]:
        return self._state_for(request).describe()

    def progress(self, request: messages.Progress) -> dict[str, Any]:
        self._state_for(request).ownership.start_drain()
        return self._progress()

    def complete(self, request: messages.Complete) -> dict[str, Any]:
        self._state_for(request).ownership.complete_all()
        return self._progress()

    def _progress(self) -> dict[str, Any]:
        """How far key groups are, and since which assignment. The number first: later figures may pass for earlier."""
        with self._lock:
            number, ownership = self._assignment[1], self._state.ownership
        return {"assignment": number, **ownership.progress()}

    def release(self, request: messages.Release) -> dict[str, Any]:
        state = self._state_for(request)
        with self._lock:
            if (request.generation, request.number) == self._assignment:
                self._releaser.submit(partial(_release, state.ownership, state.ownership.frozen))
        return {}

    def fetch_keys(self, request: messages.FetchKeys, tables: Tables) -> Parts:
        return self._state_for(request).fetch_keys(request, keys_in(tables))

    def scan(
        self, request: messages.Scan | messages.FetchGroups | messages.FetchDue
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        state = self._state_for(request)
        match request:
            case messages.Scan():
                if request.epoch > self._machine.committed:  # the word to commit it has not come
                    raise EpochError(f"Worker {self._worker} does not have epoch {request.epoch} yet. Look again.")
                return state.scan(request)
            case messages.FetchDue():
                return state.fetch_due(request)
        fetch = partial(state.fetch_groups, request)
        if not request.can_wait:
            return fetch()
        # What has not arrived here itself may come from files, and Arrow keeps the threads that read them.
        state.ownership.complete_frozen((request.stage, request.variable), request.groups, request.as_of)
        return self._parts.scheduler.in_background(fetch)

    @property
    def is_broken(self) -> bool:
        """Whether the state here is of no use until the job is opened again."""
        return self._machine.broken or (self._opened is not None and self._opened.is_lost)

    @property
    def shape(self) -> JobShape:
        """What the job's state looks like; an error if the job was not opened."""
        return self._state.shape

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be missing if this worker went: it holds no key groups, and keeps none for others."""
        opened = self._opened
        return opened is None or not (opened.ownership.groups or opened.ownership.frozen)

    def check_generation(self, request: messages.JobRequest) -> None:
        with self._lock:
            self._check_generation(request)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.ownership.stop()
        self._folds.close()
        self._releaser.close()
        with self._lock:
            if self._opened is not None:
                self._opened.close()

    # ------------------------------------------------------------------------------------------ instructions

    def _decide(self, request: requests.Request) -> list[requests.Instruction]:
        if self._opened is not None and self._opened.is_lost:
            self._machine.break_down()
        return self._machine.handle(request)

    def _carry_out(self, instructions: list[requests.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, requests.Refuse):
                raise _refusal(instruction)
            try:
                self._do(instruction)
            except Exception:
                # The machine has gone on, and the state has not followed.
                self._machine.break_down()
                raise

    def _do(self, instruction: requests.Instruction) -> None:
        match instruction:
            case requests.DiscardAttempt():
                self._staging.discard(instruction.attempt)
            case requests.AddLayer():
                self._add_layer(instruction.epoch)
            case requests.DropLayersAfter():
                self._state.drop_layers_after(instruction.epoch)
                self._deferred.forget_after(instruction.epoch)
            case requests.FoldUpTo():
                self._folds.add(partial(self._state.fold, instruction.epoch))
            case requests.ResetState() | requests.ServeState() | requests.AcceptChanges():
                pass  # whoever sent the request does it: it has what is needed
            case requests.AnswerSeals() | requests.WriteChangeFiles():
                pass
            case _:
                raise WorkerError(f"A worker does not know the instruction {type(instruction).__name__}.")

    def _add_layer(self, epoch: Epoch) -> None:
        prepared, self._prepared, self._prepared_late = self._prepared, {}, {}
        self._staging.clear()
        if self._defers:
            self._deferred.add(epoch, self._prepared_by, dict(prepared))
        else:
            self._deferred.clear()
        self._state.add_layer(epoch, prepared)

    def _write_deferred(self, wanted: Collection[Sequence[int]]) -> list[list[Any]]:
        found = self._deferred.take_out(wanted, self._worker)
        return [file for deferred in found for file in self._write_files(*deferred)]

    def _write_files(self, epoch: Epoch, run: RunId, tables: Mapping[Variable, pa.Table]) -> list[list[Any]]:
        files = []
        for (stage, variable), changes in sorted(tables.items()):
            spec = self._state.shape.stages[stage]
            path = paths.change_file(
                spec.name, variable, epoch=epoch, generation=run.generation, run=run.run, worker=self._worker
            )
            shape, layout = self._state.shape, spec.layouts[variable]
            written = write_changes(self._state.storage, path, layout, shape.key_groups, changes)
            files.append([epoch, asdict(ChangeFile(spec.number, variable, self._worker, path, *written))])
        return files

    # ----------------------------------------------------------------------------------------------- lookups

    def _reset(self, shape: JobShape) -> None:
        if self._opened is not None:
            self._opened.close()
        self._staging.clear()
        self._prepared, self._prepared_late = {}, {}
        self._folds.forget()
        self._deferred.clear()
        self._opened = JobState(shape, self._stores, self._job, self._parts)

    @property
    def _state(self) -> JobState:
        if self._opened is None:
            raise WorkerError("The job has not been opened on this worker. Start the query again.")
        return self._opened

    def _state_for(self, request: messages.JobRequest) -> JobState:
        with self._lock:
            self._check_usable(request)
            return self._state

    def _check_usable(self, request: messages.JobRequest) -> None:
        self._check_generation(request)
        if self.is_broken:
            raise WorkerError(f"The worker {self._worker} could not apply an epoch. Open the job on it again.")

    def _check_generation(self, request: messages.JobRequest) -> None:
        newest = self._machine.generation
        if newest is not None and request.generation < newest:
            raise FencedError(
                f"A newer driver (generation {newest}) has taken over this job; this one is generation "
                f"{request.generation}. Stop this query: one checkpoint belongs to one running query."
            )


def _release(ownership: GroupOwnership, kept: Mapping[int, int]) -> None:
    """Let go of what others have brought to themselves, out of the way of epochs; only the next assignment waits."""
    try:
        if ownership.wait_for_time():
            ownership.release(kept)
    except Exception:
        logger.exception("key groups that others have now still take memory here, until they come back or the job ends")


def _epoch(request: messages.EpochRequest) -> dict[str, Any]:
    return {"generation": Generation(request.generation), "epoch": Epoch(request.epoch), "run": Run(request.run)}


def _refusal(refused: requests.Refuse) -> WorkerError | EpochError:
    if refused.reason is Refusal.FENCED:
        return FencedError(refused.message)
    return WorkerError(refused.message)
