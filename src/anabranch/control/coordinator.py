"""The coordinator: in the driver, carries out what the epoch machine decides on workers and checkpoint."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.checkpoint.generations import check_generation, claim_next
from anabranch.checkpoint.savepoints import Savepoint
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.control.epochs.durability import Durability
from anabranch.control.epochs.executor import EpochExecutor
from anabranch.control.epochs.maintenance import Maintenance
from anabranch.control.epochs.savepoints import take_savepoint
from anabranch.control.inspection import Inspection
from anabranch.control.membership.cluster import Cluster
from anabranch.control.membership.members import Member, Membership
from anabranch.control.membership.rescale import Rescale
from anabranch.control.membership.worker_pool import WorkerPool
from anabranch.control.owned_checkpoint import OwnedCheckpoint, who_claims
from anabranch.control.parts import PRODUCTION, DriverParts
from anabranch.control.resume import Resumed
from anabranch.control.strategies import strategy_of
from anabranch.control.strategies.strategy import MigrationStrategy
from anabranch.core import epoch_events as events
from anabranch.core.epochs import EpochMachine
from anabranch.core.errors import AnabranchError, FencedError
from anabranch.core.ids import Epoch, Partition, StageNumber, StagePartition
from anabranch.core.pacing import ChangeTiming
from anabranch.core.reports import ChangeReport, EpochReport, StatusReport, WorkerReport
from anabranch.core.requests import CloseJob, Flush
from anabranch.core.routes import Route, assign_partitions, owners_of_partitions
from anabranch.core.schemas import StageSpec
from anabranch.core.settings import Settings
from anabranch.wire.credentials import Credentials
from anabranch.wire.routed import StageAccess

logger = logging.getLogger(__name__)

_CHANGES_REMEMBERED = 1000
#: How long it may take to give the key groups of a lost worker to others, once it is noticed.
_REPAIR_S = 20.0
#: How long a savepoint waits for epochs to become durable.
_SAVEPOINT_WAIT_S = 60.0


class Coordinator:
    """Runs the epochs of one job on its workers."""

    def __init__(
        self,
        resumed: Resumed,
        members: Membership,
        settings: Settings,
        parallelism: Mapping[StageNumber, int],
        worker_pool: WorkerPool,
        parts: DriverParts = PRODUCTION,
        strategy: MigrationStrategy | None = None,
    ) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._owned = resumed.owned
        self._settings = settings
        #: Partitions of each stateful stage; may change between epochs.
        self.parallelism = dict(parallelism)
        self.cluster = Cluster(
            resumed, members, settings, worker_pool, strategy or strategy_of(settings.migration), parts.scheduler
        )
        self._machine = EpochMachine(resumed.committed.epoch)
        self._durability = Durability(resumed.committed, resumed.files, settings.checkpoint_interval_s, parts.scheduler)
        self._maintenance = Maintenance(resumed.owned, settings, resumed.files, self.cluster.files_in_use, parts)
        #: Held while workers change between epochs, or the coordinator is closed: nothing changes after that.
        self._idle = parts.scheduler.lock()
        self._closed = False
        self._epochs = EpochExecutor(
            self._machine, self.cluster, self._durability, settings, parts.scheduler, lambda: self._owned
        )
        self._inspection = Inspection(self.cluster, parts.scheduler, self._job, _REPAIR_S + settings.worker_timeout_s)
        self._accesses = _make_accesses(self._owned, self.cluster, self.parallelism, self._settings)
        #: The last changes among the workers. Those before an epoch are reported with it.
        self.changes: deque[ChangeReport] = deque(maxlen=_CHANGES_REMEMBERED)
        #: How many changes were made because of lost workers.
        self._repairs = 0
        self._unreported: list[ChangeReport] = []
        self._timing = ChangeTiming()

    @property
    def route(self) -> Route:
        return self.cluster.route

    @property
    def members(self) -> Sequence[Member]:
        return self.cluster.members.all

    @property
    def worker_count(self) -> int:
        return len(self.cluster.members)

    def lost_lately(self, changes: int) -> list[str]:
        """The workers that were lost before the last changes, so many of them."""
        return [worker for change in list(self.changes)[-changes:] for worker in change.lost]

    @property
    def checkpoint(self) -> str:
        """Where Spark keeps the job's offsets and commits."""
        return self._owned.spark.location

    @property
    def committed_epoch(self) -> int:
        return self._machine.committed

    @property
    def durable_epoch(self) -> int:
        """The newest epoch that is safe whatever dies; later ones are repeated from Spark's offsets then."""
        return self._durability.newest.epoch

    # ------------------------------------------------------------------------------------------- the epoch

    def begin(self, epoch: int) -> int:
        # That Spark runs this epoch proves that it has committed the one before: from here on workers may change.
        if self.cluster.is_ready_to_change and (self.cluster.must_change or not self._timing.postpones()):
            self._change(epoch)
        self._timing.begin(self._scheduler.monotonic_s())
        owners = {
            StagePartition(StageNumber(number), Partition(partition)): frozenset(workers)
            for number, access in self._accesses.items()
            for partition, workers in enumerate(owners_of_partitions(self.route, access.partitions.tolist()))
        }
        self._epochs.drive(events.EpochBegun(Epoch(epoch), frozenset(m.worker for m in self.members), owners))
        return self._machine.run

    def accesses(self) -> Mapping[int, StageAccess]:
        return self._accesses

    def missing(self, epoch: int) -> Mapping[int, frozenset[int]]:
        del epoch
        missing: dict[int, set[int]] = {}
        for instruction in self._epochs.drive(events.TasksRan(self._machine.run)):
            if isinstance(instruction, events.RunMissing):
                for task in instruction.tasks:
                    missing.setdefault(task.stage, set()).add(task.partition)
        return {stage: frozenset(partitions) for stage, partitions in missing.items()}

    def commit(self, epoch: int) -> EpochReport:
        # One that is run again takes the place of a run that was durable, so it has to be durable as well.
        self._epochs.is_durable_now = self._durability.is_due or epoch <= self.durable_epoch
        self._epochs.drive(events.SinkWritten(self._machine.run))
        self._maintenance.after_epoch(Epoch(min(epoch - 1, self.durable_epoch)), self._epochs.changed.rows)
        changes, self._unreported = self._unreported, []
        self._note_duration()
        changed = self._epochs.changed
        return EpochReport(
            epoch=epoch,
            run=self._machine.run,
            route_version=self.route.version,
            workers=len(self.members),
            durable_epoch=self.durable_epoch,
            repairs=[change for change in changes if change.lost],
            changes=changes,
            migrating=self.cluster.migrations.is_under_way,
            changed_rows=changed.rows,
            changed_bytes=changed.bytes,
            changed_variables=changed.variables,
            dropped_rows=changed.dropped,
            # Only the engine knows these.
            duration_ms={},
            watermark_ms=None,
        )

    def abort(self, epoch: int) -> None:
        try:
            self._epochs.drive(events.SinkFailed(self._machine.run, f"epoch {epoch} failed"))
        except AnabranchError as error:
            logger.info("epoch %d aborted: %s", epoch, error)

    def fenced(self) -> FencedError | None:
        """That a newer driver has taken over the job, if it has, as far as that can be told."""
        try:
            check_generation(self._owned.storage, self._owned.generation)
        except FencedError as error:
            return error
        except AnabranchError as error:
            logger.info("whether a newer driver has taken over is not known: %s", error)
        return None

    def recover(self, epoch: int) -> bool:
        """After a failed run: bring lost workers' key groups to others. False if no worker is to blame.

        Epochs after the durable one are lost with a worker: then all state returns to that one.
        """
        if self._machine.fenced or not self.cluster.look_for_losses():
            return False
        if self._durability.volatile:
            self._return_to_durable_epoch()
        self._change(epoch)
        return True

    def _change(self, epoch: int) -> None:
        self.flush()
        change, rescales = self.cluster.change(Epoch(epoch), self._durability)
        self._timing.note_change()
        self.changes.append(change)
        self._unreported.append(change)
        self._repairs += bool(change.lost)
        for rescale in rescales:
            self.parallelism.update({StageNumber(stage): number for stage, number in rescale.parallelism.items()})
        self._accesses = _make_accesses(self._owned, self.cluster, self.parallelism, self._settings)

    def _note_duration(self) -> None:
        duration_ms = 1000 * self._timing.end(self._scheduler.monotonic_s())
        if self.cluster.migrations.is_under_way:
            self._epochs.pace.note_busy(duration_ms)
        else:
            self._epochs.pace.note_usual(duration_ms)

    # ------------------------------------------------------------------------------------------- rescaling

    def rescale(self, rescale: Rescale) -> Rescale:
        """Let it take effect before the next epoch that finds its workers ready."""
        return self.cluster.rescale(rescale)

    def change_while_idle(self) -> bool:
        """Do what was asked for without waiting for an epoch; whether there was anything. None may run meanwhile."""
        with self._idle:
            if self._durability.is_wanted and not self._closed:
                self.flush()
            has_time = self._timing.has_time(self._scheduler.monotonic_s())
            if self._closed or not self.cluster.is_ready_to_change or not (self.cluster.must_change or has_time):
                return False
            # Only what Spark has committed may become the start of something new.
            if last_committed_epoch(self._owned.spark) != self._machine.committed:
                return False
            self._change(self._machine.committed + 1)
            return True

    def _return_to_durable_epoch(self) -> None:
        """As a new generation: for the old one, no worker ever goes back. Raises FencedError if that is taken."""
        logger.warning("epochs %s were not durable and are run again", sorted(self._durability.volatile))
        info = {**who_claims(volatile=True), "returns_to": self._durability.newest.epoch}
        generation = claim_next(self._owned.storage, self._owned.generation, info)
        self._owned = replace(self._owned, generation=generation)
        self.cluster.use(self._owned)
        self._maintenance.use(self._owned)
        self._machine.rewind(self._durability.newest.epoch)
        self._durability.volatile.clear()

    def flush(self) -> None:
        """Make all committed epochs durable."""
        if not self._durability.volatile:
            return
        flush = Flush(**self._job(), deferred=self._durability.deferred())
        answers = self._on_all(lambda member: member.client.call(flush))
        files = [file for answer in answers for file in answer.files]
        self._durability.write(self._owned, self.route.version, files, self._durability.volatile)

    def status(self) -> StatusReport:
        """Tells the workers, what was lost last, and whether state moves."""
        repairs = [change for change in self.changes if change.lost]
        return StatusReport(
            workers=list(self.cluster.members.workers),
            route_version=self.route.version,
            repairs=self._repairs,
            last_repair=repairs[-1] if repairs else None,
            migrating=self.cluster.migrations.is_under_way,
            last_snapshot=self._maintenance.last_snapshot,
        )

    # ------------------------------------------------------------------------------------------- the state

    def scan(self, spec: StageSpec, variable: str) -> tuple[int, pa.Table]:
        """All rows of a state variable as of the last committed epoch, and that epoch."""
        return self._inspection.scan(spec, variable, lambda: self._machine.committed)

    def describe(self, *, wait: bool = True) -> list[WorkerReport]:
        """What each worker holds; without waiting, as far as it can be told while workers change or stand still."""
        return self._inspection.describe(wait=wait)

    def savepoint(self, target: str) -> Savepoint:
        """Save the job as of the last epoch that Spark committed, in a place of its own. Epochs go on meanwhile.

        Where not every epoch is made durable, the next one is, or those that there are as soon as none runs.
        """
        committed = last_committed_epoch(self._owned.spark)
        if not self._durability.wait_until_durable(committed, _SAVEPOINT_WAIT_S):
            logger.warning("epoch %d has not become durable in time; an older one is saved", committed)
        with self._maintenance.paused():
            return take_savepoint(self._owned, target, Epoch(min(committed, self.durable_epoch)), self._parts)

    def close(self) -> None:
        """Take leave of the workers, and leave nothing behind that is not durable."""
        with self._idle:
            self._closed = True
        try:
            self.flush()
        except AnabranchError as error:
            logger.warning("the last epochs are not durable, and will be repeated: %s", error)
        for member in self.members:
            try:
                member.client.call(CloseJob(**self._job()))
            except AnabranchError as error:
                logger.debug("worker %s could not be told that the job ends: %s", member.worker, error)
        self._durability.close()
        self._maintenance.close()
        self.cluster.close()
        self._inspection.is_closed = True

    # ----------------------------------------------------------------------------------------------- pieces

    def _on_all(self, call: Callable[[Member], Any]) -> list[Any]:
        return self._scheduler.gather(partial(call, member) for member in self.members)

    def _job(self) -> dict[str, Any]:
        return {"job": self._owned.job.job_id, "generation": self._owned.generation}


def _make_accesses(
    owned: OwnedCheckpoint, cluster: Cluster, parallelism: Mapping[StageNumber, int], settings: Settings
) -> Mapping[int, StageAccess]:
    """What tasks are given to reach the state of each stage, under the route that is in force; by stage."""
    accesses: dict[int, StageAccess] = {}
    for spec in owned.job.stages:
        partitions = min(parallelism[spec.number], owned.job.key_groups)
        accesses[spec.number] = StageAccess(
            job=owned.job.job_id,
            generation=owned.generation,
            key_groups=owned.job.key_groups,
            stage=spec,
            routing=cluster.routing,
            parallelism=partitions,
            partitions=np.array(assign_partitions(cluster.route, partitions, cluster.load), dtype=np.int32),
            cache_route=settings.routing_cache,
            timeout_s=settings.request_timeout_s,
            credentials=Credentials.of(settings),
        )
    return accesses
