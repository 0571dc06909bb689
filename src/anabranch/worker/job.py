"""One job on one worker: carries out what the transaction machine decides on the state of the job's variables."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.checkpoint import paths
from anabranch.checkpoint.changes import write_changes
from anabranch.checkpoint.manifests import ChangeFile
from anabranch.checkpoint.snapshots import SnapshotFile
from anabranch.checkpoint.storage import Storage
from anabranch.core import requests
from anabranch.core.errors import EpochError, FencedError, WorkerError
from anabranch.core.eventtime import EventTime
from anabranch.core.ids import Attempt, Epoch, Generation, Partition, StageNumber, WorkerId
from anabranch.core.requests import Refusal, Run, RunId, StageAttempt
from anabranch.core.schemas import HASH, StageSpec
from anabranch.core.transactions import TransactionMachine
from anabranch.wire import messages
from anabranch.wire.routed import EXPIRED, REST
from anabranch.worker.expiry import ExpiryIndex
from anabranch.worker.holdings import Holdings
from anabranch.worker.layers import VariableState
from anabranch.worker.origins import CheckpointOrigin
from anabranch.worker.staging import Staging, Tables
from anabranch.worker.stores import open_store

logger = logging.getLogger(__name__)

#: Layers that may wait for the background fold before a new epoch has to wait for it.
_MAX_UNFOLDED = 3


class WorkerJob:
    """The state of one job. Requests come from several threads; the machine decides about one at a time."""

    def __init__(self, worker: WorkerId, job: str, store: str, directory: Path | None) -> None:
        self._worker = worker
        self._job = job
        self._store = store
        self._directory = directory
        self._lock = threading.RLock()
        self._machine = TransactionMachine()
        self._folder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._folds: list[Future[None]] = []
        self._key_groups = 0
        self._location = ""
        self._storage: Storage | None = None
        self._stages: dict[int, StageSpec] = {}
        self._states: dict[tuple[int, str], VariableState] = {}
        self._staging = Staging()
        #: The chosen changes of the epoch that is prepared, by stage and variable.
        self._prepared: dict[tuple[int, str], pa.Table] = {}
        self._prepared_by = RunId(Generation(0), requests.NO_RUN)
        #: Epochs that are part of the state and not durable yet, oldest first: each with its run and changes.
        self._deferred: list[tuple[Epoch, RunId, dict[tuple[int, str], pa.Table]]] = []
        self._defers = False
        #: For stages whose keys expire, made when they first ask.
        self._expiries: dict[tuple[int, str], ExpiryIndex] = {}
        self._routing: dict[str, Any] = {}
        self._holdings = Holdings({}, 0)
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
            described = (request.key_groups, request.checkpoint, stages)
            if outdated or described != (self._key_groups, self._location, self._stages):
                self._key_groups, self._location, self._stages = described
                self._storage = Storage(request.checkpoint)
                self._reset()
            return {"worker": self._worker, "groups": sorted(self._holdings.groups)}

    def assign(self, request: messages.Assign) -> dict[str, Any]:
        """Hold exactly these key groups; answers with how many came and went."""
        with self._lock:
            self._check_generation(request)
            if request.epoch != self._machine.committed:
                raise EpochError(
                    f"Key groups as of epoch {request.epoch} do not fit worker {self._worker}, which has epoch "
                    f"{self._machine.committed}. Open the job at that epoch first."
                )
            if (request.generation, request.number) < self._assignment:
                raise EpochError(f"Worker {self._worker} has been given other key groups since. Leave them.")
            self._assignment = request.generation, request.number
            snapshot = [SnapshotFile(**file) for file in request.snapshot]
            changes = [ChangeFile(**file) for file in request.changes]

            def make_origin(variable: tuple[int, str], groups: Collection[int]) -> CheckpointOrigin:
                return CheckpointOrigin(
                    self._checkpoint(),
                    self._states[variable].layout,
                    groups,
                    [file for file in snapshot if (file.stage, file.variable) == variable],
                    [file for file in changes if (file.stage, file.variable) == variable],
                )

            adopted, dropped = self._holdings.assign(request.groups, make_origin)
            if adopted or dropped:
                self._expiries = {}
        return {"adopted": len(adopted), "dropped": len(dropped)}

    def begin(self, request: messages.Begin) -> dict[str, Any]:
        with self._lock:
            self._carry_out(self._machine.handle(requests.Begin(**_epoch(request))))
            self._routing = request.routing
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
            states = self._states_of(request.stage)
        epoch = next(i.epoch for i in instructions if isinstance(i, requests.ServeState))
        keys = tables.get(messages.KEYS)
        if keys is None:
            raise WorkerError("A read came without keys. Run the same version of anabranch everywhere.")
        answers: Tables = {}
        hashes = keys.column(HASH).to_numpy()
        for name, state in states.items():
            self._holdings.fetch((request.stage, name), hashes)
            answers[name] = pa.Table.from_batches([state.read(keys, epoch)])
            if request.rest:
                self._holdings.complete((request.stage, name), request.groups)
                rest = list(state.scan(epoch, request.groups, without=keys))
                answers[REST + name] = pa.Table.from_batches(rest, schema=state.layout.rows)
            if request.expired:
                answers[EXPIRED + name] = self._expired((request.stage, name), request, epoch)
        return answers

    def _expired(self, variable: tuple[int, str], request: messages.Read, epoch: int) -> pa.Table:
        """Rows whose event time is over. Only groups that may have such rows are scanned."""
        column, field, up_to_us = request.expired
        state = self._states[variable]
        event_time = EventTime(column, field)
        with self._lock:
            index = self._expiries.get(variable)
            if index is None or index.event_time != event_time:
                index = self._expiries[variable] = ExpiryIndex(event_time, self._key_groups)
            # What has not arrived is let go of later: nobody can tell, as rows that are late are dropped before.
            here = frozenset(request.groups) - self._holdings.pending(variable)
            groups = index.candidates(here, up_to_us)
        batches = list(state.scan(epoch, groups)) if groups else []
        with self._lock:
            expired = index.split(batches, groups, up_to_us)
        return pa.Table.from_batches(expired, schema=state.layout.rows)

    def write(self, request: messages.Write, tables: Tables) -> dict[str, Any]:
        attempt = StageAttempt(StageNumber(request.stage), Partition(request.partition), Attempt(request.attempt))
        epoch = _epoch(request)
        checked = self._check_changes(request.stage, tables)
        for name, table in checked.items():
            # Those that were read are here; no key may change before it is.
            self._holdings.fetch((request.stage, name), table.column(HASH).to_numpy())
        with self._lock:
            if request.chunk == 0:
                staged = requests.Stage(**epoch, attempt=attempt, sealed=request.last)
                self._carry_out(self._machine.handle(staged))
                self._staging.begin(attempt, checked)
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
                    self._prepared_by = instruction.run
                    self._defers = not request.durable
                    if request.durable:
                        files = self._write_deferred()
                        files += self._write_files(instruction.epoch, instruction.run, self._prepared)
            rows = sum(len(changes) for changes in self._prepared.values())
        return {"files": files, "rows": rows}

    def flush(self, request: messages.Flush) -> dict[str, Any]:
        with self._lock:
            self._check_generation(request)
            files = self._write_deferred()
            self._deferred = []
        return {"files": files}

    def commit(self, request: messages.Commit) -> dict[str, Any]:
        with self._lock:
            self._carry_out(self._machine.handle(requests.Commit(**_epoch(request))))
        return {}

    def abort(self, request: messages.Abort) -> dict[str, Any]:
        with self._lock:
            self._carry_out(self._machine.handle(requests.Abort(**_epoch(request))))
        return {}

    def describe(self, request: messages.Describe) -> dict[str, Any]:
        with self._lock:
            self._check_generation(request)
            states = dict(self._states)
        return {
            **self._holdings.progress(),
            "variables": [
                {"stage": stage, "variable": variable, "rows": state.rows(), "bytes": state.bytes()}
                for (stage, variable), state in sorted(states.items())
            ],
        }

    def scan(self, request: messages.Scan) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        with self._lock:
            self._check_generation(request)
            state = self._state(request.stage, request.variable)
            holdings = self._holdings
        holdings.complete((request.stage, request.variable))
        return state.layout.rows, state.scan(request.epoch)

    def check_generation(self, request: messages.JobRequest) -> None:
        with self._lock:
            self._check_generation(request)

    def close(self) -> None:
        self._folder.shutdown(wait=True)
        self._holdings.close()
        with self._lock:
            for state in self._states.values():
                state.close()
            self._states = {}

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
                    for state in self._states.values():
                        state.drop_layers_after(instruction.epoch)
                    self._deferred = [deferred for deferred in self._deferred if deferred[0] <= instruction.epoch]
                    self._expiries = {}
                case requests.FoldUpTo():
                    self._folds.append(self._folder.submit(self._fold, list(self._states.values()), instruction.epoch))

    def _add_layer(self, epoch: Epoch) -> None:
        for (stage, variable), state in self._states.items():
            changes = self._prepared.get((stage, variable))
            if changes is None:
                changes = state.layout.changes.empty_table()
            elif (expiry := self._expiries.get((stage, variable))) is not None:
                expiry.note(changes)
            state.add_layer(epoch, changes)
        if self._defers:
            self._deferred.append((epoch, self._prepared_by, self._prepared))
        else:
            self._deferred = []
        self._prepared = {}
        self._staging.clear()

    @staticmethod
    def _fold(states: Collection[VariableState], epoch: Epoch) -> None:
        for state in states:
            state.fold(epoch)

    def _write_deferred(self) -> list[list[Any]]:
        return [file for deferred in self._deferred for file in self._write_files(*deferred)]

    def _write_files(self, epoch: Epoch, run: RunId, tables: Mapping[tuple[int, str], pa.Table]) -> list[list[Any]]:
        files = []
        for (stage, variable), changes in sorted(tables.items()):
            spec = self._stages[stage]
            path = paths.change_file(
                spec.name, variable, epoch=epoch, generation=run.generation, run=run.run, worker=self._worker
            )
            written = write_changes(self._checkpoint(), path, spec.layouts[variable], self._key_groups, changes)
            files.append([epoch, asdict(ChangeFile(spec.number, variable, self._worker, path, *written))])
        return files

    # ----------------------------------------------------------------------------------------------- lookups

    def _reset(self) -> None:
        self._holdings.close()
        for state in self._states.values():
            state.close()
        self._staging.clear()
        self._prepared, self._expiries, self._deferred = {}, {}, []
        self._states = {}
        for spec in self._stages.values():
            for variable, layout in spec.layouts.items():
                folder = (
                    self._directory / paths.safe_name(spec.name) / paths.safe_name(variable)
                    if self._directory
                    else None
                )
                store = open_store(self._store, layout, self._key_groups, folder)
                self._states[spec.number, variable] = VariableState(layout, self._key_groups, store)
        self._holdings = Holdings(self._states, self._key_groups)

    def _state(self, stage: int, variable: str) -> VariableState:
        state = self._states.get((stage, variable))
        if state is None:
            known = [f"{s}/{v}" for s, v in sorted(self._states)]
            raise WorkerError(f"Stage {stage} has no state variable {variable!r} here. There are: {known}.")
        return state

    def _states_of(self, stage: int) -> dict[str, VariableState]:
        if stage not in self._stages:
            raise WorkerError(f"There is no stage {stage} here. There are: {sorted(self._stages)}.")
        return {variable: self._states[stage, variable] for variable in self._stages[stage].layouts}

    def _check_changes(self, stage: int, tables: Tables) -> Tables:
        for variable, table in tables.items():
            layout = self._state(stage, variable).layout
            if not table.schema.equals(layout.changes):
                raise WorkerError(
                    f"Changes of {variable!r} in stage {stage} have the columns {table.schema.names}, not "
                    f"{layout.changes.names} of the declared types. Run the same version of anabranch everywhere."
                )
        return tables

    def _check_generation(self, request: messages.JobRequest) -> None:
        newest = self._machine.generation
        if newest is not None and request.generation < newest:
            raise FencedError(
                f"A newer driver (generation {newest}) has taken over this job; this one is generation "
                f"{request.generation}. Stop this query: one checkpoint belongs to one running query."
            )

    def _checkpoint(self) -> Storage:
        if self._storage is None:
            raise WorkerError("The job has not been opened on this worker. Start the query again.")
        return self._storage


def _epoch(request: messages.EpochRequest) -> dict[str, Any]:
    return {"generation": Generation(request.generation), "epoch": Epoch(request.epoch), "run": Run(request.run)}


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
