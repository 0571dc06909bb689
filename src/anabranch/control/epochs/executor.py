"""Carries out what the epoch machine decides: requests to all workers at once, manifests, and who is lost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anabranch.checkpoint.generations import check_generation
from anabranch.control.epochs.durability import Durability
from anabranch.control.membership.cluster import Cluster
from anabranch.control.owned_checkpoint import OwnedCheckpoint
from anabranch.core import epoch_events as events
from anabranch.core.answers import DroppedRows, Prepared, Refusal, VariableChanges
from anabranch.core.epochs import EpochMachine
from anabranch.core.errors import AnabranchError, CheckpointError, EpochError, FencedError, LostWorkerError
from anabranch.core.ids import StageNumber, WorkerId
from anabranch.core.pacing import DrainRate
from anabranch.core.requests import Abort, Begin, Commit, Prepare, ReportSeals
from anabranch.core.settings import Settings
from anabranch.runtime.scheduler import Future, Scheduler

logger = logging.getLogger(__name__)

#: How often a call that takes long is checked on.
_LOOK_INTERVAL_S = 0.2


@dataclass(frozen=True)
class ChangedState:
    """How much an epoch has changed: entries in all and by state variable, bytes written, and late rows by stage."""

    rows: int = 0
    bytes: int = 0
    variables: list[VariableChanges] = field(default_factory=list)
    dropped: list[DroppedRows] = field(default_factory=list)


class EpochExecutor:
    """Drives the epoch machine of one job, in the thread that runs epochs."""

    def __init__(
        self,
        machine: EpochMachine,
        cluster: Cluster,
        durability: Durability,
        settings: Settings,
        scheduler: Scheduler,
        owned: Callable[[], OwnedCheckpoint],
    ) -> None:
        self._machine = machine
        self._cluster = cluster
        self._durability = durability
        self._settings = settings
        self._scheduler = scheduler
        #: The generation that this driver has now.
        self._owned = owned
        #: Whether the epoch that runs is made durable.
        self.is_durable_now = True
        #: What each worker answered last when it had prepared an epoch.
        self._prepared: dict[WorkerId, Prepared] = {}
        #: How much the last epoch has changed.
        self.changed = ChangedState()
        self.pace = DrainRate()

    def drive(self, event: events.EpochEvent) -> list[events.EpochInstruction]:
        """Hand an event to the machine and carry out what it says, until it has nothing more for us to do."""
        leftover: list[events.EpochInstruction] = []
        queue = [event]
        while queue:
            instructions = self._machine.handle(queue.pop(0))
            for instruction in instructions:
                if isinstance(instruction, events.FailEpoch):
                    self._abort_on([i for i in instructions if isinstance(i, events.AbortOn)])
                    fenced = instruction.reason is events.Failure.FENCED
                    raise (FencedError if fenced else EpochError)(instruction.message)
            under_way = [(i, self._scheduler.submit(partial(self._carry_out, i))) for i in instructions]
            answers = [self._outcome(i, call) for i, call in under_way]
            followed = [answer for answer in answers if answer is not None]
            leftover += [i for i in instructions if isinstance(i, events.RunMissing)]
            queue += followed
        return leftover

    def _outcome(
        self, instruction: events.EpochInstruction, call: Future[events.EpochEvent | None]
    ) -> events.EpochEvent | None:
        """Wait for what was carried out, but not for a worker that has been found lost meanwhile."""
        while True:
            try:
                return call.result(timeout=_LOOK_INTERVAL_S)
            except TimeoutError:
                worker = getattr(instruction, "worker", None)
                if worker is not None and self._cluster.is_lost(worker):
                    message = f"The state worker {worker} fell silent."
                    return events.WorkerRefused(instruction.run, worker, Refusal.NOT_OPEN, message)

    def _lose(self, workers: Collection[WorkerId]) -> None:
        """Workers have not made an epoch part of their state that is part of the job's: others take their place."""
        for worker in workers:
            self._cluster.note_lost(worker, "it did not commit the epoch")

    def _carry_out(self, instruction: events.EpochInstruction) -> events.EpochEvent | None:
        match instruction:
            case events.WriteManifest():
                return self._write_manifest(instruction)
            case events.BeginOn() | events.CollectSeals() | events.PrepareOn() | events.CommitOn():
                try:
                    return self._ask(instruction)
                except LostWorkerError as error:
                    self._cluster.note_lost(instruction.worker, str(error))
                    return events.WorkerRefused(instruction.run, instruction.worker, Refusal.NOT_OPEN, str(error))
                except FencedError as error:
                    return events.WorkerRefused(instruction.run, instruction.worker, Refusal.FENCED, str(error))
                except AnabranchError as error:
                    return events.WorkerRefused(instruction.run, instruction.worker, Refusal.WRONG_STEP, str(error))
            case events.FinishEpoch():
                self._lose(instruction.lost)
                return None
            case events.RunTasks() | events.RunMissing():
                return None  # Spark's job does it
        raise EpochError(f"Nobody knows the instruction {type(instruction).__name__}. Report this.")

    def _ask(
        self, instruction: events.BeginOn | events.CollectSeals | events.PrepareOn | events.CommitOn
    ) -> events.EpochEvent:
        worker, run, numbers = instruction.worker, instruction.run, self._numbers(instruction)
        client = self._cluster.members.get(worker).client
        match instruction:
            case events.BeginOn():
                rows = self.pace.rows if self._cluster.migrations.is_under_way else -1
                # For each key group its owner: long, and of no use unless tasks ask for it.
                routing = None if self._settings.routing_cache else self._cluster.routing.to_table()
                newest = self._durability.newest.epoch
                client.call(Begin(**numbers, routing=routing, durable_epoch=newest, drain_rows=rows))
                return events.WorkerBegan(run, worker)
            case events.CollectSeals():
                attempts = client.call(ReportSeals(**numbers)).attempts
                return events.SealsReported(run, worker, attempts)
            case events.PrepareOn():
                durable = self.is_durable_now
                deferred = self._durability.deferred() if durable else ()
                request = Prepare(**numbers, chosen=instruction.chosen, durable=durable, deferred=deferred)
                self._prepared[worker] = prepared = client.call(request)
                return events.WorkerPrepared(run, worker, prepared.files)
            case events.CommitOn():
                self._cluster.note_progress(worker, client.call(Commit(**numbers)))
                return events.WorkerCommitted(run, worker)

    def _write_manifest(self, instruction: events.WriteManifest) -> events.EpochEvent:
        written = sum(file.bytes for _, file in instruction.files)
        workers = self._cluster.members.workers
        self.changed = _changed([self._prepared[worker] for worker in workers if worker in self._prepared], written)
        try:
            if self.is_durable_now:
                runs = {**self._durability.volatile, instruction.epoch: instruction.run}
                self._durability.write(self._owned(), self._cluster.route.version, instruction.files, runs)
            else:
                check_generation(self._owned().storage, self._owned().generation)
                self._durability.volatile[instruction.epoch] = instruction.run
        except FencedError as error:
            return events.ManifestFailed(instruction.run, str(error), fenced=True)
        except CheckpointError as error:
            return events.ManifestFailed(instruction.run, str(error))
        return events.ManifestWritten(instruction.run)

    def _abort_on(self, aborts: Sequence[events.AbortOn]) -> None:
        for abort in aborts:
            if self._cluster.is_lost(abort.worker):
                continue
            try:
                self._cluster.members.get(abort.worker).client.call(Abort(**self._numbers(abort)))
            except AnabranchError as error:
                logger.debug("worker %s could not be told to abort: %s", abort.worker, error)

    def _numbers(self, instruction: events.EpochInstruction) -> dict[str, Any]:
        owned = self._owned()
        return {
            "job": owned.job.job_id,
            "generation": owned.generation,
            "epoch": instruction.epoch,
            "run": instruction.run,
        }


def _changed(answers: Sequence[Prepared], bytes_written: int) -> ChangedState:
    put: Counter[tuple[StageNumber, str]] = Counter()
    removed: Counter[tuple[StageNumber, str]] = Counter()
    dropped: Counter[StageNumber] = Counter()
    for answer in answers:
        dropped.update({each.stage: each.rows for each in answer.late})
        for each in answer.variables:
            put[each.stage, each.variable] += each.put
            removed[each.stage, each.variable] += each.removed
    return ChangedState(
        rows=sum(answer.rows for answer in answers),
        bytes=bytes_written,
        variables=[
            VariableChanges(stage=stage, variable=variable, put=rows, removed=removed[stage, variable])
            for (stage, variable), rows in sorted(put.items())
        ],
        dropped=[DroppedRows(stage=stage, rows=rows) for stage, rows in sorted(dropped.items()) if rows],
    )
