"""The coordinator: in the driver, carries out what the epoch machine decides on workers and checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa

from anabranch.checkpoint.generations import check_generation, claim_generation
from anabranch.checkpoint.manifests import ChangeFile
from anabranch.checkpoint.savepoints import Savepoint
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.control.accesses import make_accesses
from anabranch.control.claims import VOLATILE
from anabranch.control.cluster import Cluster
from anabranch.control.durability import Durability
from anabranch.control.figures import ChangeFigures
from anabranch.control.looking import Looking
from anabranch.control.members import Member, Membership
from anabranch.control.rescale import Change, Rescale
from anabranch.control.resume import Resumed
from anabranch.control.savepoints import take_savepoint
from anabranch.control.supply import WorkerSupply
from anabranch.control.upkeep import Upkeep
from anabranch.core import epoch_events as events
from anabranch.core.epochs import EpochMachine
from anabranch.core.errors import AnabranchError, CheckpointError, EpochError, FencedError, LostWorkerError
from anabranch.core.ids import Attempt, Epoch, Partition, StageNumber
from anabranch.core.pacing import Pace
from anabranch.core.requests import Refusal, Run, StageAttempt, StagePartition
from anabranch.core.rhythm import Rhythm
from anabranch.core.routes import Route, owners_of_partitions
from anabranch.core.schemas import StageSpec
from anabranch.core.settings import Settings
from anabranch.wire import messages
from anabranch.wire.routed import StageAccess, encode_routing

logger = logging.getLogger(__name__)

#: Requests to workers that are under way at the same time.
_CALLS_AT_ONCE = 32
#: How often a call that takes long is checked on.
_LOOK_INTERVAL_S = 0.2


class Coordinator:
    """Runs the epochs of one job on its workers."""

    def __init__(
        self,
        resumed: Resumed,
        members: Membership,
        settings: Settings,
        parallelism: Mapping[StageNumber, int],
        supply: WorkerSupply,
    ) -> None:
        self._claimed = resumed.claimed
        self._settings = settings
        #: Partitions of each stateful stage; may change between epochs.
        self.parallelism = dict(parallelism)
        self.cluster = Cluster(resumed, members, settings, supply)
        self._machine = EpochMachine(resumed.committed.epoch)
        self._durability = Durability(resumed.committed, resumed.files, settings.checkpoint_interval_s)
        self._upkeep = Upkeep(resumed.claimed, settings, resumed.files, self.cluster.files_in_use)
        self._is_durable_now = True
        self._figures = ChangeFigures()
        self._pool = ThreadPoolExecutor(max_workers=_CALLS_AT_ONCE, thread_name_prefix="anabranch")
        self._looking = Looking(self.cluster, self._pool, self._job)
        self._accesses = make_accesses(self._claimed, self.cluster, self.parallelism, self._settings)
        self._changed: dict[str, Any] = {}
        #: Changes among the workers; those of the epoch that runs are reported with it.
        self.changes: list[Change] = []
        self._reported_changes = 0
        self._pace = Pace()
        self._rhythm = Rhythm()

    @property
    def route(self) -> Route:
        return self.cluster.route

    @property
    def members(self) -> Sequence[Member]:
        return self.cluster.members.all

    @property
    def checkpoint(self) -> str:
        """Where Spark keeps the job's offsets and commits."""
        return self._claimed.spark.location

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
        wishes = self.cluster.wishes
        if wishes.are_ready and (wishes.any_lost or not self._rhythm.postpones()):
            self._change(epoch)
        self._rhythm.begin(time.monotonic())
        owners = {
            StagePartition(StageNumber(number), Partition(partition)): frozenset(workers)
            for number, access in self._accesses.items()
            for partition, workers in enumerate(owners_of_partitions(self.route, access.partitions.tolist()))
        }
        self._drive(events.EpochBegun(Epoch(epoch), frozenset(m.worker for m in self.members), owners))
        return self._machine.run

    def accesses(self) -> Mapping[int, StageAccess]:
        return self._accesses

    def missing(self, epoch: int) -> Mapping[int, frozenset[int]]:
        del epoch
        missing: dict[int, set[int]] = {}
        for instruction in self._drive(events.TasksRan(self._machine.run)):
            if isinstance(instruction, events.RunMissing):
                for task in instruction.tasks:
                    missing.setdefault(task.stage, set()).add(task.partition)
        return {stage: frozenset(partitions) for stage, partitions in missing.items()}

    def commit(self, epoch: int) -> Mapping[str, Any]:
        self._is_durable_now = self._durability.is_due
        self._drive(events.SinkWritten(self._machine.run))
        self._upkeep.after_epoch(Epoch(min(epoch - 1, self.durable_epoch)), self._changed["changedRows"])
        changes = self.changes[self._reported_changes :]
        self._reported_changes = len(self.changes)
        self._note_duration()
        return {
            "epoch": epoch,
            "run": int(self._machine.run),
            "routeVersion": self.route.version,
            "workers": len(self.members),
            "durableEpoch": int(self.durable_epoch),
            "repairs": [change.to_json() for change in changes if change.lost],
            "changes": [change.to_json() for change in changes],
            "migrating": self.cluster.migrations.is_under_way,
            **self._changed,
        }

    def abort(self, epoch: int) -> None:
        try:
            self._drive(events.SinkFailed(self._machine.run, f"epoch {epoch} failed"))
        except AnabranchError as error:
            logger.info("epoch %d aborted: %s", epoch, error)

    def fenced(self) -> FencedError | None:
        """That a newer driver has taken over the job, if it has, as far as that can be told."""
        try:
            check_generation(self._claimed.storage, self._claimed.generation)
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
        change = self.cluster.change(Epoch(epoch), self._durability)
        self._rhythm.note_change()
        self.changes.append(change)
        for rescale in change.rescales:
            self.parallelism.update({StageNumber(stage): number for stage, number in rescale.parallelism.items()})
        self._accesses = make_accesses(self._claimed, self.cluster, self.parallelism, self._settings)

    def _note_duration(self) -> None:
        duration_ms = 1000 * self._rhythm.end(time.monotonic())
        if self.cluster.migrations.is_under_way:
            self._pace.note_busy(duration_ms)
        else:
            self._pace.note_usual(duration_ms)

    # ------------------------------------------------------------------------------------------- rescaling

    def rescale(self, rescale: Rescale) -> Rescale:
        """Let it take effect before the next epoch that finds its workers ready."""
        self.cluster.wishes.rescale(rescale)
        return rescale

    def change_while_idle(self) -> bool:
        """Do what was asked for without waiting for an epoch; whether there was anything. None may run meanwhile."""
        wishes = self.cluster.wishes
        if not wishes.are_ready or not (wishes.any_lost or self._rhythm.has_time(time.monotonic())):
            return False
        # Only what Spark has committed may become the start of something new.
        if last_committed_epoch(self._claimed.spark) != self._machine.committed:
            return False
        self._change(self._machine.committed + 1)
        return True

    def _return_to_durable_epoch(self) -> None:
        """As a new generation: for the old one, no worker ever goes back."""
        logger.warning("epochs %s were not durable and are run again", sorted(self._durability.volatile))
        info = {"returns_to": self._durability.newest.epoch, VOLATILE: True}
        generation = claim_generation(self._claimed.storage, info)
        self._claimed = replace(self._claimed, generation=generation)
        self.cluster.use(self._claimed)
        self._upkeep.use(self._claimed)
        self._machine.rewind(self._durability.newest.epoch)
        self._durability.volatile.clear()

    def flush(self) -> None:
        """Make all committed epochs durable."""
        if not self._durability.volatile:
            return
        answers = self._on_all(lambda member: self._call(member, messages.Flush(**self._job())))
        files = [_file(pair) for answer in answers for pair in answer["files"]]
        self._write_manifests(files, self._durability.volatile)

    def status(self) -> Mapping[str, Any]:
        """For the query's status: the workers, what was lost last, and what moves."""
        repairs = [change for change in self.changes if change.lost]
        return {
            "workers": list(self.cluster.members.workers),
            "routeVersion": self.route.version,
            "repairs": len(repairs),
            "lastRepair": repairs[-1].to_json() if repairs else None,
            "migrating": self.cluster.migrations.is_under_way,
            "lastSnapshot": self._upkeep.last_snapshot,
        }

    # ------------------------------------------------------------------------------------------- the state

    def scan(self, spec: StageSpec, variable: str) -> tuple[int, pa.Table]:
        """All rows of a state variable as of the last committed epoch, and that epoch."""
        return self._looking.scan(spec, variable, lambda: self._machine.committed)

    def describe(self, *, wait: bool = True) -> list[dict[str, Any]]:
        """What each worker holds; without waiting, as far as it can be told while workers change or stand still."""
        return self._looking.describe(wait=wait)

    def savepoint(self, target: str) -> Savepoint:
        """Save the job as of the last epoch that Spark committed, in a place of its own. Epochs go on meanwhile."""
        with self._upkeep.paused():
            return take_savepoint(self._claimed, target)

    def close(self) -> None:
        """Take leave of the workers, and leave nothing behind that is not durable."""
        try:
            self.flush()
        except AnabranchError as error:
            logger.warning("the last epochs are not durable, and will be repeated: %s", error)
        for member in self.members:
            try:
                self._call(member, messages.CloseJob(**self._job()))
            except AnabranchError as error:
                logger.debug("worker %s could not be told that the job ends: %s", member.worker, error)
        self._upkeep.close()
        self.cluster.close()
        self._pool.shutdown(wait=False)

    # ------------------------------------------------------------------------------------ the epoch machine

    def _drive(self, event: events.Event) -> list[events.Instruction]:
        """Hand an event to the machine and carry out what it says, until it has nothing more for us to do."""
        leftover: list[events.Instruction] = []
        queue = [event]
        while queue:
            instructions = self._machine.handle(queue.pop(0))
            for instruction in instructions:
                if isinstance(instruction, events.FailEpoch):
                    self._abort_on([i for i in instructions if isinstance(i, events.AbortOn)])
                    fenced = instruction.reason is events.Failure.FENCED
                    raise (FencedError if fenced else EpochError)(instruction.message)
            under_way = [(i, self._pool.submit(self._carry_out, i)) for i in instructions]
            answers = [self._outcome(i, call) for i, call in under_way]
            followed = [answer for answer in answers if answer is not None]
            leftover += [i for i in instructions if isinstance(i, events.RunMissing)]
            queue += followed
        return leftover

    def _outcome(self, instruction: events.Instruction, call: Future[events.Event | None]) -> events.Event | None:
        """Wait for what was carried out, but not for a worker that has been found lost meanwhile."""
        while True:
            try:
                return call.result(timeout=_LOOK_INTERVAL_S)
            except TimeoutError:
                worker = getattr(instruction, "worker", None)
                if worker is not None and self.cluster.wishes.is_lost(worker):
                    message = f"The state worker {worker} fell silent."
                    return events.WorkerRefused(instruction.run, worker, Refusal.NOT_OPEN, message)

    def _carry_out(self, instruction: events.Instruction) -> events.Event | None:
        match instruction:
            case events.WriteManifest():
                return self._write_manifest(instruction)
            case events.BeginOn() | events.CollectSeals() | events.PrepareOn() | events.CommitOn():
                try:
                    return self._ask(instruction)
                except LostWorkerError as error:
                    logger.warning("worker %s is lost: %s", instruction.worker, error)
                    self.cluster.wishes.note_lost(instruction.worker)
                    return events.WorkerRefused(instruction.run, instruction.worker, Refusal.NOT_OPEN, str(error))
                except FencedError as error:
                    return events.WorkerRefused(instruction.run, instruction.worker, Refusal.FENCED, str(error))
                except AnabranchError as error:
                    return events.WorkerRefused(instruction.run, instruction.worker, Refusal.WRONG_STEP, str(error))
        return None

    def _ask(
        self, instruction: events.BeginOn | events.CollectSeals | events.PrepareOn | events.CommitOn
    ) -> events.Event:
        member, run = self.cluster.members.get(instruction.worker), instruction.run
        numbers: dict[str, Any] = {**self._job(), "epoch": instruction.epoch, "run": run}
        match instruction:
            case events.BeginOn():
                rows = self._pace.rows if self.cluster.migrations.is_under_way else -1
                # For each key group its owner: long, and of no use unless tasks ask for it.
                routing = {} if self._settings.routing_cache else encode_routing(self.cluster.routing)
                self._call(member, messages.Begin(**numbers, routing=routing, drain_rows=rows))
                return events.WorkerBegan(run, member.worker)
            case events.CollectSeals():
                answer = self._call(member, messages.Seals(**numbers))
                return events.SealsReported(run, member.worker, frozenset(map(_attempt, answer["attempts"])))
            case events.PrepareOn():
                chosen = [list(attempt) for attempt in sorted(instruction.chosen)]
                request = messages.Prepare(**numbers, chosen=chosen, durable=self._is_durable_now)
                answer = self._call(member, request)
                self._figures.note(member.worker, answer)
                return events.WorkerPrepared(run, member.worker, tuple(_file(pair) for pair in answer["files"]))
            case events.CommitOn():
                progress = self._call(member, messages.Commit(**numbers))
                self.cluster.note_progress(member.worker, progress)
                return events.WorkerCommitted(run, member.worker)

    def _write_manifest(self, instruction: events.WriteManifest) -> events.Event:
        written = sum(file.bytes for _, file in instruction.files)
        self._changed = self._figures.report(self.cluster.members.workers, written)
        try:
            if self._is_durable_now:
                runs = {**self._durability.volatile, instruction.epoch: instruction.run}
                self._write_manifests(instruction.files, runs)
            else:
                check_generation(self._claimed.storage, self._claimed.generation)
                self._durability.volatile[instruction.epoch] = instruction.run
        except FencedError as error:
            return events.ManifestFailed(instruction.run, str(error), fenced=True)
        except CheckpointError as error:
            return events.ManifestFailed(instruction.run, str(error))
        return events.ManifestWritten(instruction.run)

    def _write_manifests(self, files: Sequence[tuple[Epoch, ChangeFile]], runs: Mapping[Epoch, Run]) -> None:
        self._durability.write(self._claimed, self.route.version, files, runs)

    def _abort_on(self, aborts: Sequence[events.AbortOn]) -> None:
        for abort in aborts:
            if self.cluster.wishes.is_lost(abort.worker):
                continue
            try:
                self._call(
                    self.cluster.members.get(abort.worker),
                    messages.Abort(**self._job(), epoch=abort.epoch, run=abort.run),
                )
            except AnabranchError as error:
                logger.debug("worker %s could not be told to abort: %s", abort.worker, error)

    # ----------------------------------------------------------------------------------------------- pieces

    def _call(self, member: Member, request: messages.Request) -> dict[str, Any]:
        header, _ = member.client.call(request)
        return header

    def _on_all(self, call: Callable[[Member], Any]) -> list[Any]:
        return list(self._pool.map(call, self.members))

    def _job(self) -> dict[str, Any]:
        return {"job": self._claimed.job.job_id, "generation": self._claimed.generation}


def _file(pair: Sequence[Any]) -> tuple[Epoch, ChangeFile]:
    return Epoch(pair[0]), ChangeFile(**pair[1])


def _attempt(numbers: Sequence[int]) -> StageAttempt:
    return StageAttempt(StageNumber(numbers[0]), Partition(numbers[1]), Attempt(numbers[2]))
