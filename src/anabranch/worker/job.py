"""One job on one worker: carries out what the transaction machine decides on the state of the job's variables."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.checkpoint import paths
from anabranch.checkpoint.changes import write_changes
from anabranch.checkpoint.manifests import ChangeFile
from anabranch.core import requests
from anabranch.core.errors import EpochError, FencedError, WorkerError
from anabranch.core.ids import Attempt, Epoch, Generation, Partition, StageNumber, WorkerId
from anabranch.core.requests import Refusal, Run, RunId, StageAttempt
from anabranch.core.schemas import OP, Op, StageSpec
from anabranch.core.transactions import TransactionMachine
from anabranch.wire import messages
from anabranch.worker.background import in_background, stand_back
from anabranch.worker.holdings import Holdings, Variable
from anabranch.worker.jobstate import JobShape, JobState
from anabranch.worker.staging import Staging, Tables
from anabranch.worker.storeoptions import StoreOptions

logger = logging.getLogger(__name__)

#: Layers that may wait for the background fold before a new epoch has to wait for it.
_MAX_UNFOLDED = 3


class WorkerJob:
    """The state of one job. Requests come from several threads; the machine decides about one at a time."""

    def __init__(self, worker: WorkerId, job: str, stores: StoreOptions, token: str = "") -> None:
        self._worker = worker
        self._job = job
        self._stores = stores
        self._token = token
        self._lock = threading.RLock()
        self._machine = TransactionMachine()
        self._folder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._releaser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="release", initializer=stand_back)
        self._folds: list[Future[None]] = []
        self._opened: JobState | None = None
        self._staging = Staging()
        #: The chosen changes of the epoch that is prepared, by stage and variable.
        self._prepared: dict[Variable, pa.Table] = {}
        self._prepared_late: dict[int, int] = {}
        self._prepared_by = RunId(Generation(0), requests.NO_RUN)
        #: Epochs that are part of the state and not durable yet, oldest first: each with its run and changes.
        self._deferred: list[tuple[Epoch, RunId, dict[Variable, pa.Table]]] = []
        self._defers = False
        self._routing: dict[str, Any] = {}
        #: The generation and number of the assignment that was carried out last.
        self._assignment = 0, 0

    def open(self, request: messages.OpenJob) -> dict[str, Any]:
        """Take part from an epoch on. State of that epoch that is here stays; any other is forgotten."""
        by = RunId(Generation(request.committed_by[0]), Run(request.committed_by[1])) if request.committed_by else None
        stages = {spec["number"]: StageSpec.from_json(spec) for spec in request.stages}
        with self._lock:
            instructions = self._machine.handle(
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
            self._state.holdings.end_epoch()  # the driver before may have left one unfinished
            return {"worker": self._worker, "groups": sorted(self._state.holdings.groups)}

    def assign(self, request: messages.Assign) -> dict[str, Any]:
        """Hold exactly these key groups; answers with how many came and went."""
        with self._lock:
            self._check_assignment(request)
            return {**self._state.assign(request, self._token), **self._progress()}

    def hand_over(self, request: messages.HandOver) -> dict[str, Any]:
        with self._lock:
            self._check_assignment(request)
            return self._state.hand_over(request)

    def _check_assignment(self, request: messages.Assign | messages.HandOver) -> None:
        """That it fits the state that is here, and is the newest."""
        self._check_generation(request)
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
            self._carry_out(self._machine.handle(requests.Begin(**_epoch(request))))
            self._routing = request.routing
            self._state.holdings.begin_epoch(request.drain_rows)
            self._folds = [fold for fold in self._folds if not _is_done(fold)]
            waiting = self._folds[:-_MAX_UNFOLDED]
        for fold in waiting:
            fold.result()
        return {}

    def look_up_route(self, request: messages.LookUpRoute) -> dict[str, Any]:
        with self._lock:
            self._check_generation(request)
            return self._routing

    def read(self, request: messages.Read, tables: Tables) -> Tables:
        with self._lock:
            instructions = self._machine.handle(requests.Read(**_epoch(request)))
            self._carry_out(instructions)
            state = self._state
        epoch = next(i.epoch for i in instructions if isinstance(i, requests.ServeState))
        state.note_further_rows(tables.get(messages.FURTHER_ROWS))
        return state.read(request, _keys(tables), epoch)

    def write(self, request: messages.Write, tables: Tables) -> dict[str, Any]:
        attempt = StageAttempt(StageNumber(request.stage), Partition(request.partition), Attempt(request.attempt))
        epoch = _epoch(request)
        checked = self._state.checked_changes(request.stage, tables)
        with self._lock:
            if request.chunk == 0:
                staged = requests.Stage(**epoch, attempt=attempt, sealed=request.last)
                self._carry_out(self._machine.handle(staged))
                self._staging.begin(attempt, checked, request.late)
                return {}
            # An attempt of an older run may have the same number: its pieces must not get among those of a newer one.
            self._carry_out(self._machine.handle(requests.ReportSeals(**epoch)))
            self._staging.add(attempt, request.chunk, checked)
            if request.last:
                self._carry_out(self._machine.handle(requests.Seal(**epoch, attempt=attempt)))
        return {}

    def seals(self, request: messages.Seals) -> dict[str, Any]:
        with self._lock:
            instructions = self._machine.handle(requests.ReportSeals(**_epoch(request)))
            self._carry_out(instructions)
        answer = next(i for i in instructions if isinstance(i, requests.AnswerSeals))
        return {"attempts": [list(attempt) for attempt in sorted(answer.attempts)]}

    def prepare(self, request: messages.Prepare) -> dict[str, Any]:
        chosen = frozenset(
            StageAttempt(StageNumber(stage), Partition(partition), Attempt(attempt))
            for stage, partition, attempt in request.chosen
        )
        with self._lock:
            instructions = self._machine.handle(requests.Prepare(**_epoch(request), chosen=chosen))
            self._carry_out(instructions)
            files = []
            for instruction in instructions:
                if isinstance(instruction, requests.WriteChangeFiles):
                    self._prepared = self._staging.combined(instruction.attempts)
                    self._prepared_late = self._staging.late(instruction.attempts)
                    self._prepared_by = instruction.run
                    self._defers = not request.durable
                    if request.durable:
                        files = self._write_deferred()
                        files += self._write_files(instruction.epoch, instruction.run, self._prepared)
            rows = sum(len(changes) for changes in self._prepared.values())
            variables = [[*variable, *_counts(changes)] for variable, changes in sorted(self._prepared.items())]
            late = sorted(self._prepared_late.items())
        return {"files": files, "rows": rows, "variables": variables, "late": late}

    def flush(self, request: messages.Flush) -> dict[str, Any]:
        with self._lock:
            self._check_generation(request)
            files = self._write_deferred()
            self._deferred = []
        return {"files": files}

    def commit(self, request: messages.Commit) -> dict[str, Any]:
        with self._lock:
            self._carry_out(self._machine.handle(requests.Commit(**_epoch(request))))
            self._state.holdings.end_epoch()
        return self._progress()

    def abort(self, request: messages.Abort) -> dict[str, Any]:
        with self._lock:
            self._carry_out(self._machine.handle(requests.Abort(**_epoch(request))))
            self._state.holdings.end_epoch()
        return {}

    def describe(self, request: messages.Describe) -> dict[str, Any]:
        return self._state_for(request).describe()

    def progress(self, request: messages.Progress) -> dict[str, Any]:
        self._state_for(request).holdings.start_drain()
        return self._progress()

    def complete(self, request: messages.Complete) -> dict[str, Any]:
        self._state_for(request).holdings.complete_all()
        return self._progress()

    def _progress(self) -> dict[str, Any]:
        """How far key groups are, and since which assignment. The number first: later figures may pass for earlier."""
        with self._lock:
            number, holdings = self._assignment[1], self._state.holdings
        return {"assignment": number, **holdings.progress()}

    def release(self, request: messages.Release) -> dict[str, Any]:
        state = self._state_for(request)
        with self._lock:
            if (request.generation, request.number) == self._assignment:
                self._releaser.submit(_release, state.holdings, state.holdings.frozen)
        return {}

    def fetch_keys(self, request: messages.FetchKeys, tables: Tables) -> Tables:
        return self._state_for(request).fetch_keys(request, _keys(tables))

    def scan(
        self, request: messages.Scan | messages.FetchGroups | messages.FetchDue
    ) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        state = self._state_for(request)
        match request:
            case messages.Scan():
                return state.scan(request)
            case messages.FetchDue():
                return state.fetch_due(request)
        fetch = partial(state.fetch_groups, request)
        if not request.can_wait:
            return fetch()
        # What has not arrived here itself may come from files, and Arrow keeps the threads that read them.
        state.holdings.complete_frozen((request.stage, request.variable), request.groups, request.as_of)
        return in_background(fetch)

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be missing if this worker went: it holds no key groups, and keeps none for others."""
        opened = self._opened
        return opened is None or not (opened.holdings.groups or opened.holdings.frozen)

    def check_generation(self, request: messages.JobRequest) -> None:
        with self._lock:
            self._check_generation(request)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.holdings.stop()
        self._folder.shutdown(wait=True)
        self._releaser.shutdown(wait=True)
        with self._lock:
            if self._opened is not None:
                self._opened.close()

    # ------------------------------------------------------------------------------------------ instructions

    def _carry_out(self, instructions: list[requests.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case requests.Refuse():
                    raise _refusal(instruction)
                case requests.DiscardAttempt():
                    self._staging.discard(instruction.attempt)
                case requests.AddLayer():
                    self._add_layer(instruction.epoch)
                case requests.DropLayersAfter():
                    self._state.drop_layers_after(instruction.epoch)
                    self._deferred = [deferred for deferred in self._deferred if deferred[0] <= instruction.epoch]
                case requests.FoldUpTo():
                    self._folds.append(self._folder.submit(self._state.fold, instruction.epoch))

    def _add_layer(self, epoch: Epoch) -> None:
        self._state.add_layer(epoch, self._prepared)
        if self._defers:
            self._deferred.append((epoch, self._prepared_by, self._prepared))
        else:
            self._deferred = []
        self._prepared, self._prepared_late = {}, {}
        self._staging.clear()

    def _write_deferred(self) -> list[list[Any]]:
        return [file for deferred in self._deferred for file in self._write_files(*deferred)]

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
        self._prepared, self._prepared_late, self._deferred = {}, {}, []
        self._opened = JobState(shape, self._stores, self._job)

    @property
    def _state(self) -> JobState:
        if self._opened is None:
            raise WorkerError("The job has not been opened on this worker. Start the query again.")
        return self._opened

    def _state_for(self, request: messages.JobRequest) -> JobState:
        with self._lock:
            self._check_generation(request)
            return self._state

    def _check_generation(self, request: messages.JobRequest) -> None:
        newest = self._machine.generation
        if newest is not None and request.generation < newest:
            raise FencedError(
                f"A newer driver (generation {newest}) has taken over this job; this one is generation "
                f"{request.generation}. Stop this query: one checkpoint belongs to one running query."
            )


def _release(holdings: Holdings, kept: Mapping[int, int]) -> None:
    """Let go of what others have brought to themselves, out of the way of epochs; only the next assignment waits."""
    try:
        if holdings.wait_for_time():
            holdings.release(kept)
    except Exception:
        logger.exception("key groups that others have now still take memory here, until they come back or the job ends")


def _epoch(request: messages.EpochRequest) -> dict[str, Any]:
    return {"generation": Generation(request.generation), "epoch": Epoch(request.epoch), "run": Run(request.run)}


def _keys(tables: Tables) -> pa.Table:
    keys = tables.get(messages.KEYS)
    if keys is None:
        raise WorkerError("A read came without keys. Run the same version of anabranch everywhere.")
    return keys


def _refusal(refused: requests.Refuse) -> WorkerError | EpochError:
    if refused.reason is Refusal.FENCED:
        return FencedError(refused.message)
    return WorkerError(refused.message)


def _is_done(fold: Future[None]) -> bool:
    """Whether a fold has ended; its error, if it has one, comes to light here."""
    if not fold.done():
        return False
    fold.result()
    return True


def _counts(changes: pa.Table) -> tuple[int, int]:
    """How many changes set an entry, and how many remove something."""
    puts: int = pc.sum(pc.equal(changes.column(OP), Op.PUT)).as_py() or 0
    return puts, len(changes) - puts
