"""The workers of a job and the route over them: carries out what the membership machine decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from anabranch.checkpoint.statefiles import StateFiles
from anabranch.control.change_counter import ChangeCounter
from anabranch.control.epochs.durability import Durability
from anabranch.control.membership.change import ChangeInProgress
from anabranch.control.membership.heartbeat import Heartbeat
from anabranch.control.membership.members import Member, Membership
from anabranch.control.membership.rescale import Migrations, Rescale, asked_for
from anabranch.control.membership.worker_pool import WorkerPool
from anabranch.control.owned_checkpoint import OwnedCheckpoint
from anabranch.control.resume import Resumed
from anabranch.control.strategies.strategy import MigrationStrategy
from anabranch.core import membership_events as events
from anabranch.core.answers import SharedOffer, TransferProgress
from anabranch.core.errors import AnabranchError, EpochError, SettingsError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.membership import MembershipMachine
from anabranch.core.reports import ChangeReport
from anabranch.core.requests import CloseJob, Health, Release, ReportProgress
from anabranch.core.routes import Route
from anabranch.core.settings import Settings
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS
from anabranch.wire.routed import Routing

logger = logging.getLogger(__name__)


class Cluster:
    """Changes between epochs only, in the thread that runs them; everybody else only leaves notes with the machine."""

    def __init__(
        self,
        resumed: Resumed,
        members: Membership,
        settings: Settings,
        worker_pool: WorkerPool,
        strategy: MigrationStrategy,
        scheduler: Scheduler = THREADS,
    ) -> None:
        self.scheduler = scheduler
        self.owned: OwnedCheckpoint = resumed.owned
        self.settings = settings
        self.worker_pool = worker_pool
        self.strategy = strategy
        #: The workers that own key groups.
        self.members = members
        #: Held while the machine decides, and while these change with it.
        self.notes = scheduler.lock()
        self._machine = MembershipMachine(
            members.workers,
            resumed.route,
            resumed.owned.job.key_groups,
            can_start=worker_pool.can_start,
            can_leave=settings.drain,
        )
        #: Workers that wait to be let in, and those that own nothing any more and keep some for their new owners.
        self.waiting: dict[WorkerId, Member] = {}
        self.gone: dict[WorkerId, Member] = {}
        #: Workers that were lost, and in whose place no other has come yet.
        self.unreplaced: list[WorkerId] = []
        #: Rescales that have not taken effect, by number.
        self.rescales: dict[int, Rescale] = {}
        #: How many keys and further rows each key group had before the last rescale; None if that is not known.
        self.load: list[float] | None = None
        self.routing = self.make_routing()
        self.migrations = Migrations(scheduler)
        #: For those who look at all workers: whether key groups change hands meanwhile.
        self.change_counter = ChangeCounter(scheduler)
        #: Where key groups are that workers gave up during a change which failed, in a store that they share.
        self.offers: list[SharedOffer] = []
        #: Held while key groups are assigned: until that is over, workers do not know what they will read.
        self.assigning = scheduler.lock()
        #: What workers may still be reading from the checkpoint: each assignment points them to its own files.
        self.adopted_from: list[StateFiles] = [resumed.files]
        #: Called, in another thread, when a worker is found lost while an epoch may wait for it.
        self.on_loss: Callable[[WorkerId], None] = lambda _: None
        self._heartbeat = Heartbeat(
            self,
            worker_pool.exited,
            heartbeat_s=settings.heartbeat_s,
            worker_timeout_s=settings.worker_timeout_s,
            scheduler=scheduler,
        )

    def use(self, owned: OwnedCheckpoint) -> None:
        """The driver has claimed another generation."""
        self.owned = owned

    def close(self) -> None:
        self._heartbeat.close()
        self._do_all(self._decide(events.JobEnded("The query has ended.")))
        self.migrations.fail("The query has ended.")

    @property
    def route(self) -> Route:
        """The route in force."""
        return self._machine.route

    @property
    def departing(self) -> list[Member]:
        """Workers that own nothing any more, and keep some key groups for their new owners."""
        with self.notes:
            return list(self.gone.values())

    @property
    def pending_workers(self) -> list[Member]:
        """Workers that wait to be let in."""
        with self.notes:
            return list(self.waiting.values())

    @property
    def starting(self) -> int:
        """How many workers are being started."""
        return self._machine.starting

    @property
    def wanted(self) -> int:
        """How many workers the job should have."""
        return self._machine.wanted

    @property
    def is_ready_to_change(self) -> bool:
        """Whether a worker was lost, or all is ready for what was asked for."""
        with self.notes:
            return self._machine.is_ready

    @property
    def any_lost(self) -> bool:
        return bool(self._machine.lost)

    @property
    def must_change(self) -> bool:
        """Whether no epoch can begin before workers change."""
        with self.notes:
            return self._machine.is_urgent

    def is_lost(self, worker: WorkerId) -> bool:
        return worker in self._machine.lost

    def is_leaving(self, worker: WorkerId) -> bool:
        with self.notes:
            return self._machine.is_leaving(worker)

    # ---------------------------------------------------------------------------------- what is asked for

    def rescale(self, rescale: Rescale) -> Rescale:
        """Have so many workers; without a number: share the load out anew."""
        request = events.RescaleRequest(rescale.number, rescale.workers, dict(rescale.parallelism))
        return self._ask(rescale, events.RescaleWanted(request))

    def scale_out(self, in_force: Mapping[int, int]) -> Rescale:
        """One worker more than was asked for last, and one task more for each of these stages, given how many it has.

        All of it at once: whoever asks at the same time gets one more than that.
        """
        with self.notes:
            return self.rescale(asked_for(*self._machine.one_more(in_force)))

    def join(self, member: Member) -> Rescale:
        """Let a worker that was started elsewhere take part."""
        rescale = Rescale(f"worker {member.worker} joins")
        with self.notes:
            self._ask(rescale, events.WorkerCame(member.worker, rescale.number))
            self.waiting[member.worker] = member
        return rescale

    def drain(self, worker: WorkerId) -> Rescale:
        """Let a worker hand over all that it has, and leave."""
        rescale = Rescale(f"worker {worker} leaves")
        return self._ask(rescale, events.DrainWanted(worker, rescale.number))

    def _ask(self, rescale: Rescale, event: events.MembershipEvent) -> Rescale:
        with self.notes:
            instructions = self._machine.handle(event)
            self.rescales[rescale.number] = rescale
        self._do_all(instructions)
        return rescale

    def note_lost(self, worker: WorkerId, reason: str = "") -> bool:
        """Records a lost worker; returns False if it was known to be lost, or is none of the job's."""
        instructions = self._decide(events.WorkerMissed(worker))
        for instruction in instructions:
            if isinstance(instruction, events.NoteLoss):
                logger.warning("worker %s is lost: %s", worker, reason or "it does not answer")
        self._do_all(instructions)
        return bool(instructions)

    # ------------------------------------------------------------------------------------------- changes

    def look_for_losses(self) -> bool:
        """Ask every worker whether it is alive and knows the job; True if one is not or does not."""
        well = self.scheduler.gather(partial(self._is_well, member) for member in self.members.all)
        return not all(well) or self.any_lost

    def change(self, next_epoch: Epoch, durability: Durability) -> tuple[ChangeReport, tuple[Rescale, ...]]:
        """Let go of lost and leaving workers, let in new ones, and share the key groups out among those that stay.

        Returns what was done, and the rescales that took effect with it.
        """
        with self.change_counter.changing():
            change = ChangeInProgress(self, durability)
            queue: list[events.MembershipEvent] = [events.ChangeBegun(next_epoch)]
            while queue:
                instructions = self._decide(queue.pop(0))
                with self._given_up_on_errors():
                    for instruction in instructions:
                        queue += change.carry_out(instruction)
            return change.report, change.rescales

    @contextmanager
    def _given_up_on_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self._machine.change is not None:
                self._do_all(self._decide(events.ChangeFailed()))
            raise

    def _decide(self, event: events.MembershipEvent) -> list[events.MembershipInstruction]:
        with self.notes:
            return self._machine.handle(event)

    def _do_all(self, instructions: Sequence[events.MembershipInstruction]) -> None:
        for instruction in instructions:
            self.do(instruction)

    def do(self, instruction: events.MembershipInstruction) -> None:
        """Carries out what is not part of a change."""
        match instruction:
            case events.StartWorkers():
                self.scheduler.start(partial(self._start_workers, instruction.count), name="anabranch-start")
            case events.EndRescale():
                with self.notes:
                    rescale = self.rescales.pop(instruction.rescale)
                rescale.end(instruction.state, instruction.message)
            case events.TakeOver():
                self.rescales[instruction.rescale].take_over(instruction.parallelism)
            case events.TakeLeave():
                with self.notes:
                    member = self.gone.pop(instruction.worker, None) or self.waiting.pop(instruction.worker)
                self._take_leave(member)
            case events.LoseDeparting():
                logger.warning("worker %s is lost; what it kept comes from the checkpoint", instruction.worker)
                with self.notes:
                    self.gone.pop(instruction.worker).client.close()
                self.worker_pool.kill(instruction.worker)
            case events.FinishMigration():
                finish = partial(self._finish_migration, instruction)
                self.scheduler.start(finish, name="anabranch-release")
            case events.NoteLoss():
                pass  # whoever waits for the worker looks at is_lost
            case _:
                raise EpochError(f"Nobody knows the instruction {type(instruction).__name__}. Report this.")

    def _start_workers(self, count: int) -> None:
        for _ in range(count):
            try:
                member = self.worker_pool.start()
            except Exception as error:  # whatever it is: whoever waits for the worker has to hear of it
                logger.warning("a worker could not be started: %s", error)
                self._do_all(self._decide(events.StartFailed(str(error))))
                continue
            if member is None:
                self._do_all(self._decide(events.StartFailed("This query starts no workers itself.")))
                continue
            with self.notes:
                self.waiting[member.worker] = member
                instructions = self._machine.handle(events.WorkerStarted(member.worker))
            self._do_all(instructions)

    # ---------------------------------------------------------------------------------------- migrations

    def note_progress(self, worker: WorkerId, progress: TransferProgress) -> None:
        """What a worker says about the key groups that are on their way to it."""
        self.migrations.note(worker, progress)
        told = events.ProgressTold(worker, progress.assignment, progress.pending_groups)
        self._do_all(self._decide(told))

    def files_in_use(self) -> Sequence[StateFiles]:
        """What workers may still be reading from the checkpoint: it must not be cleaned up."""
        with self.assigning:
            files = self.adopted_from
            try:
                if any(self._progress_of(member).pending_groups for member in self.members.all):
                    return files
            except AnabranchError as error:
                logger.info("what workers are reading is not known: %s", error)
                return files
            self.adopted_from = []
            return []

    def _progress_of(self, member: Member) -> TransferProgress:
        request = ReportProgress(job=self.owned.job.job_id, generation=self.owned.generation)
        return member.client.call(request, timeout_s=max(self.settings.heartbeat_s, 1.0))

    def _finish_migration(self, instruction: events.FinishMigration) -> None:
        """All state has arrived: those that kept it may let go of it, and leave if they are to."""
        job, generation = self.owned.job.job_id, self.owned.generation
        request = Release(job=job, generation=generation, number=instruction.number)
        for member in self.members.all:
            try:
                member.client.call(request)
            except AnabranchError as error:
                logger.info("worker %s keeps what others have: %s", member.worker, error)
        for worker in instruction.departing:
            with self.notes:
                departing = self.gone.pop(worker, None)
            if departing is not None:
                self._take_leave(departing, goes_on=True)
        self.migrations.finish(instruction.number)

    def _take_leave(self, member: Member, *, goes_on: bool = False) -> None:
        job, generation = self.owned.job.job_id, self.owned.generation
        try:
            member.client.call(CloseJob(job=job, generation=generation, goes_on=goes_on))
        except AnabranchError as error:
            logger.info("worker %s could not be told that it may go: %s", member.worker, error)
        logger.info("worker %s has left", member.worker)
        member.client.close()
        self.worker_pool.retire(member.worker)

    # --------------------------------------------------------------------------------------------- watch

    def watched(self) -> Sequence[Member]:
        return [*self.members.all, *self.departing]

    def report_lost(self, worker: WorkerId, reason: str) -> None:
        if self.note_lost(worker, reason) and self.is_lost(worker):
            self.on_loss(worker)

    def report_leaving(self, worker: WorkerId) -> None:
        if self.is_leaving(worker) or worker not in self.members.workers:
            return
        try:
            self.drain(worker)
        except SettingsError as error:
            logger.warning("worker %s wants to leave: %s", worker, error)
        else:
            logger.info("worker %s has been told to stop, and hands over what it has", worker)

    def on_beat(self) -> None:
        if self.migrations.is_under_way:
            for member in self.members.all:
                try:
                    self.note_progress(member.worker, self._progress_of(member))
                except AnabranchError as error:
                    logger.info("worker %s does not say how far it is: %s", member.worker, error)

    def _is_well(self, member: Member) -> bool:
        if self.is_lost(member.worker):
            return False
        if member.worker in self.worker_pool.exited():
            self.note_lost(member.worker, "its process has ended")
            return False
        try:
            health = member.client.call(Health(), timeout_s=self.settings.worker_timeout_s)
        except AnabranchError as error:
            self.note_lost(member.worker, str(error))
            return False
        return health.worker == member.worker and self.owned.job.job_id in health.jobs

    def make_routing(self) -> Routing:
        position = {member.worker: number for number, member in enumerate(self.members.all)}
        return Routing(
            workers=self.members.workers,
            addresses=tuple(member.address for member in self.members.all),
            owners=np.array([position[owner] for owner in self.route.owners], dtype=np.int16),
        )
