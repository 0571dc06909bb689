"""One job on one worker: carries out what the transaction machine decides on the state of the job's variables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from anabranch.checkpoint import paths
from anabranch.checkpoint.datafiles import write_changes
from anabranch.core import answers, requests
from anabranch.core import transactions as instructions
from anabranch.core.answers import Done, Refusal
from anabranch.core.errors import EpochError, FencedError, WorkerError
from anabranch.core.ids import NO_RUN, Epoch, Generation, JobId, Run, RunId, WorkerId
from anabranch.core.requests import JobRequest, Request
from anabranch.core.state_files import ChangeFile
from anabranch.core.transactions import TransactionMachine, WorkerInstruction
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import Parts, Tables
from anabranch.wire.messages import FURTHER_ROWS
from anabranch.worker.parts import PRODUCTION, WorkerParts
from anabranch.worker.server.background import BackgroundWork
from anabranch.worker.server.staging import DeferredChanges, Staging, changes_in, keys_in
from anabranch.worker.state.job_state import JobShape, JobState
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.transfer.group_ownership import Variable

#: The columns of an answer, and its rows in pieces.
Batches = tuple[pa.Schema, Iterator[pa.RecordBatch]]


class WorkerJob:
    """The state of one job. Requests come from several threads; the machine decides about one at a time."""

    def __init__(
        self,
        worker: WorkerId,
        job: JobId,
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
        self._background = BackgroundWork(parts.scheduler)
        self._opened: JobState | None = None
        self._staging = Staging()
        #: The chosen changes of the epoch that is prepared, by stage and variable.
        self._prepared: dict[Variable, pa.Table] = {}
        self._prepared_late: tuple[answers.DroppedRows, ...] = ()
        self._prepared_by = RunId(Generation(0), NO_RUN)
        self._deferred = DeferredChanges()
        self._defers = False
        self._routing: answers.RouteTable | None = None
        #: The generation and number of the assignment that was carried out last.
        self._assignment = 0, 0
        #: What answers each type of request about the job, but for those that open and close it.
        self.handlers: dict[type[Request[Any]], Callable[[Any], Any]] = {
            requests.Assign: self.assign,
            requests.HandOver: self.hand_over,
            requests.ReportProgress: self.progress,
            requests.Complete: self.complete,
            requests.Release: self.release,
            requests.Begin: self.begin,
            requests.LookUpRoute: self.look_up_route,
            requests.ReportSeals: self.report_seals,
            requests.Prepare: self.prepare,
            requests.Commit: self.commit,
            requests.Abort: self.abort,
            requests.Flush: self.flush,
            requests.Describe: self.describe,
        }
        #: The same, of those that carry tables and are answered with tables.
        self.exchanges: dict[type[Request[Any]], Callable[[Any, Tables], Parts]] = {
            requests.Read: self.read,
            requests.Write: self.write,
            requests.FetchKeys: self.fetch_keys,
        }
        #: The same, of those whose answer is a stream of rows.
        self.streams: dict[type[Request[Any]], Callable[[Any], Batches]] = {
            requests.Scan: self.scan,
            requests.FetchGroups: self.fetch_groups,
            requests.FetchDue: self.fetch_due,
        }

    def open(self, request: requests.OpenJob) -> answers.Opened:
        """Take part from an epoch on. State of that epoch that is here stays; any other is forgotten."""
        with self._lock:
            if self._opened is not None:
                self._opened.look()
            decided = self._follow(request)
            outdated = any(isinstance(instruction, instructions.ResetState) for instruction in decided)
            shape = JobShape(request.key_groups, request.checkpoint, {spec.number: spec for spec in request.stages})
            if outdated or self._opened is None or self._opened.shape != shape:
                self._reset(shape)
            self._deferred.forget_up_to(request.committed_epoch)  # a job is opened at a durable epoch
            self._state.ownership.end_epoch()  # the driver before may have left one unfinished
            return answers.Opened(groups=tuple(sorted(self._state.ownership.groups)))

    def assign(self, request: requests.Assign) -> answers.Assigned:
        """Hold exactly these key groups; answers with how many came and went."""
        with self._lock:
            self._check_assignment(request)
            adopted, dropped = self._state.assign(request, self._credentials)
            return answers.Assigned(adopted=adopted, dropped=dropped, progress=self._progress())

    def hand_over(self, request: requests.HandOver) -> answers.HandedOver:
        with self._lock:
            self._check_assignment(request)
            return answers.HandedOver(offers=self._state.hand_over(request))

    def _check_assignment(self, request: requests.Assign | requests.HandOver) -> None:
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

    def begin(self, request: requests.Begin) -> Done:
        with self._lock:
            self._follow(request)
            self._routing = request.routing
            self._deferred.forget_up_to(request.durable_epoch)
            self._state.ownership.begin_epoch(request.drain_rows)
        try:
            self._background.settle_folds()
        except Exception:
            with self._lock:
                self._machine.break_down()
            raise
        return Done()

    def look_up_route(self, request: requests.LookUpRoute) -> answers.RouteTable:
        with self._lock:
            self._check_usable(request)
            if self._routing is None:
                raise WorkerError(f"Worker {self._worker} has not been told the route. Let the task run again.")
            return self._routing

    def read(self, request: requests.Read, tables: Tables) -> Parts:
        with self._lock:
            decided = self._follow(request)
            state = self._state
        epoch = next(i.epoch for i in decided if isinstance(i, instructions.ServeState))
        state.note_further_rows(tables.get(FURTHER_ROWS))
        return state.read(request, keys_in(tables), epoch)

    def write(self, request: requests.Write, tables: Tables) -> Parts:
        checked = self._state.checked_changes(request.stage, tables)
        with self._lock:
            for instruction in self._follow(request):
                if isinstance(instruction, instructions.AcceptChanges):
                    self._staging.add(request, checked)
        return ()

    def report_seals(self, request: requests.ReportSeals) -> answers.SealedAttempts:
        with self._lock:
            decided = self._follow(request)
        return answers.SealedAttempts(
            attempts=next(i.attempts for i in decided if isinstance(i, instructions.AnswerSeals))
        )

    def prepare(self, request: requests.Prepare) -> answers.Prepared:
        with self._lock:
            files: list[tuple[Epoch, ChangeFile]] = []
            for instruction in self._follow(request):
                if isinstance(instruction, instructions.WriteChangeFiles):
                    self._prepared = self._staging.combined(instruction.attempts)
                    self._prepared_late = self._staging.late(instruction.attempts)
                    self._prepared_by = instruction.run
                    self._defers = not request.durable
                    if request.durable:
                        files = self._write_deferred(request.deferred)
                        files += self._write_files(instruction.epoch, instruction.run, self._prepared)
            return answers.Prepared(
                files=tuple(files),
                rows=sum(len(changes) for changes in self._prepared.values()),
                variables=tuple(changes_in(*each) for each in sorted(self._prepared.items())),
                late=self._prepared_late,
            )

    def flush(self, request: requests.Flush) -> answers.Flushed:
        with self._lock:
            self._check_usable(request)
            # They stay deferred until the driver says that they are durable: it may fail to write the manifests.
            return answers.Flushed(files=tuple(self._write_deferred(request.deferred)))

    def commit(self, request: requests.Commit) -> answers.TransferProgress:
        with self._lock:
            # Whatever a shared store has lost: the epoch counts, and what is here is put right before the next one.
            self._carry_out(self._machine.handle(request))
            self._state.ownership.end_epoch()
        return self._progress()

    def abort(self, request: requests.Abort) -> Done:
        with self._lock:
            self._follow(request)
            self._state.ownership.end_epoch()
        return Done()

    def describe(self, request: requests.Describe) -> answers.HeldState:
        return self._state_for(request).describe(self._progress())

    def progress(self, request: requests.ReportProgress) -> answers.TransferProgress:
        self._state_for(request).ownership.start_drain()
        return self._progress()

    def complete(self, request: requests.Complete) -> answers.TransferProgress:
        self._state_for(request).ownership.complete_all()
        return self._progress()

    def _progress(self) -> answers.TransferProgress:
        """How far key groups are, and since which assignment. The number first: later figures may pass for earlier."""
        with self._lock:
            number, ownership = self._assignment[1], self._state.ownership
        return ownership.progress(number)

    def release(self, request: requests.Release) -> Done:
        state = self._state_for(request)
        with self._lock:
            if (request.generation, request.number) == self._assignment:
                self._background.release(state.ownership)
        return Done()

    def fetch_keys(self, request: requests.FetchKeys, tables: Tables) -> Parts:
        return self._state_for(request).fetch_keys(request, keys_in(tables))

    def scan(self, request: requests.Scan) -> Batches:
        state = self._state_for(request)
        if request.epoch > self._machine.committed:  # the word to commit it has not come
            raise EpochError(f"Worker {self._worker} does not have epoch {request.epoch} yet. Look again.")
        return state.scan(request)

    def fetch_due(self, request: requests.FetchDue) -> Batches:
        return self._state_for(request).fetch_due(request)

    def fetch_groups(self, request: requests.FetchGroups) -> Batches:
        state = self._state_for(request)
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

    def check_generation(self, request: JobRequest[Any]) -> None:
        """Refuses the request of an older driver."""
        with self._lock:
            self._check_generation(request)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.ownership.stop()
        self._background.close()
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            # The tables of handlers refer to this object, so it is freed late: let go of what is large now.
            self._staging.clear()
            self._prepared, self._prepared_late = {}, ()
            self._deferred.clear()

    # ------------------------------------------------------------------------------------------ instructions

    def _follow(self, request: JobRequest[Any]) -> list[WorkerInstruction]:
        """Carries out what the machine decides about a request; gives the decisions, some of which the caller does."""
        if self._opened is not None and self._opened.is_lost:
            self._machine.break_down()
        return self._carry_out(self._machine.handle(request))

    def _carry_out(self, decided: list[WorkerInstruction]) -> list[WorkerInstruction]:
        for instruction in decided:
            if isinstance(instruction, instructions.Refuse):
                raise _refusal(instruction)
            try:
                self._do(instruction)
            except Exception:
                # The machine has gone on, and the state has not followed.
                self._machine.break_down()
                raise
        return decided

    def _do(self, instruction: WorkerInstruction) -> None:
        match instruction:
            case instructions.DiscardAttempt():
                self._staging.discard(instruction.attempt)
            case instructions.AddLayer():
                self._add_layer(instruction.epoch)
            case instructions.DropLayersAfter():
                self._state.drop_layers_after(instruction.epoch)
                self._deferred.forget_after(instruction.epoch)
            case instructions.FoldUpTo():
                self._background.fold(partial(self._state.fold, instruction.epoch))
            case instructions.ResetState() | instructions.ServeState() | instructions.AcceptChanges():
                pass  # the request's own method does it: it has what is needed
            case instructions.AnswerSeals() | instructions.WriteChangeFiles():
                pass
            case _:
                raise WorkerError(f"A worker does not know the instruction {type(instruction).__name__}.")

    def _add_layer(self, epoch: Epoch) -> None:
        prepared, self._prepared, self._prepared_late = self._prepared, {}, ()
        self._staging.clear()
        if self._defers:
            self._deferred.add(epoch, self._prepared_by, dict(prepared))
        else:
            self._deferred.clear()
        self._state.add_layer(epoch, prepared)

    def _write_deferred(self, wanted: Collection[tuple[Epoch, Run]]) -> list[tuple[Epoch, ChangeFile]]:
        found = self._deferred.take_out(wanted, self._worker)
        return [file for deferred in found for file in self._write_files(*deferred)]

    def _write_files(
        self, epoch: Epoch, run: RunId, tables: Mapping[Variable, pa.Table]
    ) -> list[tuple[Epoch, ChangeFile]]:
        files = []
        for (stage, variable), changes in sorted(tables.items()):
            spec = self._state.shape.stages[stage]
            path = paths.change_file(
                spec.name, variable, epoch=epoch, generation=run.generation, run=run.run, worker=self._worker
            )
            shape, layout = self._state.shape, spec.layouts[variable]
            written = write_changes(self._state.storage, path, layout, shape.key_groups, changes)
            files.append((epoch, ChangeFile(spec.number, variable, self._worker, path, *written)))
        return files

    # ----------------------------------------------------------------------------------------------- lookups

    def _reset(self, shape: JobShape) -> None:
        if self._opened is not None:
            self._opened.close()
        self._staging.clear()
        self._prepared, self._prepared_late = {}, ()
        self._background.forget_folds()
        self._deferred.clear()
        self._opened = JobState(shape, self._stores, self._job, self._parts)

    @property
    def _state(self) -> JobState:
        if self._opened is None:
            raise WorkerError("The job has not been opened on this worker. Start the query again.")
        return self._opened

    def _state_for(self, request: JobRequest[Any]) -> JobState:
        with self._lock:
            self._check_usable(request)
            return self._state

    def _check_usable(self, request: JobRequest[Any]) -> None:
        self._check_generation(request)
        if self.is_broken:
            raise WorkerError(f"The worker {self._worker} could not apply an epoch. Open the job on it again.")

    def _check_generation(self, request: JobRequest[Any]) -> None:
        newest = self._machine.generation
        if newest is not None and request.generation < newest:
            raise FencedError(
                f"A newer driver (generation {newest}) has taken over this job; this one is generation "
                f"{request.generation}. Stop this query: one checkpoint belongs to one running query."
            )


def _refusal(refused: instructions.Refuse) -> WorkerError | EpochError:
    if refused.reason is Refusal.FENCED:
        return FencedError(refused.message)
    if refused.reason is Refusal.INCOMPLETE:
        return EpochError(refused.message)
    return WorkerError(refused.message)
