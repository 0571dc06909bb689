"""The workers of a job and the route over them: who comes, who goes, who is lost, and what is done about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from anabranch.checkpoint.routes import save_route
from anabranch.checkpoint.statefiles import StateFiles
from anabranch.control.assigning import Assignment, carry_out
from anabranch.control.claims import Claimed
from anabranch.control.durability import Durability
from anabranch.control.members import Member, Membership
from anabranch.control.migrations import Migrations
from anabranch.control.rescale import Change, Migration
from anabranch.control.resume import Resumed
from anabranch.control.steadiness import Steadiness
from anabranch.control.supply import WorkerSupply
from anabranch.control.watch import Watch
from anabranch.control.wishes import Wishes
from anabranch.core.errors import AnabranchError, EpochError, LostWorkerError, SettingsError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.routes import Route, moves, next_route
from anabranch.core.settings import Settings
from anabranch.wire import messages
from anabranch.wire.routed import Routing

logger = logging.getLogger(__name__)

#: How often a change starts over because a worker was lost meanwhile.
_TRIES_MAX = 5
#: If less load has been seen lately, key groups are shared out by their number.
_LOAD_MIN = 2000


class Cluster:
    """Changes between epochs only, in the thread that runs them; everybody else only leaves notes."""

    def __init__(self, resumed: Resumed, members: Membership, settings: Settings, supply: WorkerSupply) -> None:
        self._claimed: Claimed = resumed.claimed
        self._settings = settings
        self._supply = supply
        #: The workers that own key groups.
        self.members = members
        #: Those that own none any more, and keep some for their new owners.
        self._departing: dict[WorkerId, Member] = {}
        self.route: Route = resumed.route
        #: The newest route that all workers have been told.
        self._applied: Route = resumed.route
        #: How many keys and further rows each key group had before the last rescale; None if that is not known.
        self.load: list[float] | None = None
        self.routing = self._make_routing()
        self.migrations = Migrations()
        #: For those who look at all workers: whether key groups change hands meanwhile.
        self.steadiness = Steadiness()
        self.wishes = Wishes(members, supply, resumed.claimed.job.key_groups, can_leave=settings.drain)
        #: Guards the departing ones, and who is a member.
        self._notes = threading.Lock()
        #: How often key groups were assigned by this driver, since it resumed the job.
        self._assignments = 0
        #: Where key groups are that workers gave up during a change which failed, in a store that they share.
        self._offers: list[dict[str, Any]] = []
        #: Held while key groups are assigned: until that is over, workers do not know what they will read.
        self._assigning = threading.Lock()
        #: What workers may still be reading from the checkpoint: each assignment points them to its own files.
        self._adopted_from: list[StateFiles] = [resumed.files]
        #: Called, in another thread, when a worker is found lost while an epoch may wait for it.
        self.on_loss: Callable[[WorkerId], None] = lambda _: None
        self._watch = Watch(
            self, supply.exited, heartbeat_s=settings.heartbeat_s, worker_timeout_s=settings.worker_timeout_s
        )

    def use(self, claimed: Claimed) -> None:
        """The driver has claimed another generation."""
        self._claimed = claimed

    def close(self) -> None:
        self._watch.close()
        self.wishes.end("The query has ended.")
        self.migrations.fail("The query has ended.")
        with self._notes:
            departing, self._departing = list(self._departing.values()), {}
        for member in [*departing, *self.wishes.recruits.take()]:
            self._take_leave(member)

    @property
    def departing(self) -> list[Member]:
        """Workers that own nothing any more, and keep some key groups for their new owners."""
        with self._notes:
            return list(self._departing.values())

    def note_progress(self, worker: WorkerId, progress: Mapping[str, Any]) -> None:
        """What a worker says about the key groups that are on their way to it."""
        if self.migrations.note(worker, progress):
            number = progress["assignment"]
            threading.Thread(
                target=self._finish_migration, args=(number,), name="anabranch-release", daemon=True
            ).start()

    def files_in_use(self) -> Sequence[StateFiles]:
        """What workers may still be reading from the checkpoint: it must not be cleaned up."""
        with self._assigning:
            files = self._adopted_from
            try:
                if any(self._progress_of(member)["pendingGroups"] for member in self.members.all):
                    return files
            except AnabranchError as error:
                logger.info("what workers are reading is not known: %s", error)
                return files
            self._adopted_from = []
            return []

    # ------------------------------------------------------------------------------------------- changes

    def look_for_losses(self) -> bool:
        """Ask every worker whether it is alive and knows the job; True if one is not or does not."""
        with ThreadPoolExecutor(max_workers=max(1, len(self.members))) as pool:
            well = list(pool.map(self._is_well, self.members.all))
        return not all(well) or self.wishes.any_lost

    def change(self, next_epoch: Epoch, durability: Durability) -> Change:
        """Let go of lost and leaving workers, let in new ones, and share the key groups out among those that stay."""
        with self.steadiness.changing():
            return self._change(next_epoch, durability)

    def _change(self, next_epoch: Epoch, durability: Durability) -> Change:
        started_at = time.monotonic()
        lost: list[WorkerId] = []
        joined: list[WorkerId] = []
        for _ in range(_TRIES_MAX):
            taken = self.wishes.take()
            lost += self._remove(taken.lost)
            joined += self._let_in(taken.newcomers)
            leaving = self._choose_leaving(taken.leaving)
            try:
                self._set_route(next_epoch, leaving, is_balancing=bool(taken.rescales) and not lost)
                assignment = self._assign(durability)
            except LostWorkerError as error:
                logger.warning("another worker was lost during a change: %s", error)
                self.wishes.give_back(taken)
                self.look_for_losses()
                continue
            except AnabranchError:
                self.wishes.give_back(taken)
                raise
            change = Change(
                lost=tuple(lost),
                started=tuple(joined),
                left=tuple(sorted(leaving)),
                key_groups=len(moves(self._applied, self.route)),
                route_version=self.route.version,
                duration_ms=round(1000 * (time.monotonic() - started_at)),
                rescales=tuple(taken.rescales),
            )
            self._applied, self._offers = self.route, []
            self._part_with(leaving)
            self.wishes.fulfilled()
            self.routing = self._make_routing()
            self._begin_migration(change, assignment, next_epoch)
            self.wishes.recruits.want(self.wishes.recruits.wanted, len(self.members))
            return change
        raise EpochError(
            f"Workers are lost faster than they can be replaced: {', '.join(lost)}. See their logs, then start the "
            "query again: it resumes from its checkpoint."
        )

    def _remove(self, lost: Sequence[WorkerId]) -> Sequence[WorkerId]:
        for worker in lost:
            logger.warning("worker %s is lost; its key groups go to others", worker)
            self.members.remove(worker)
            self._supply.kill(worker)
        return lost

    def _let_in(self, newcomers: Sequence[Member]) -> list[WorkerId]:
        if not self.members.all and not newcomers:
            newcomers = [self.wishes.recruits.start_now()]
        for member in newcomers:
            logger.info("worker %s takes part", member.worker)
            self.members.add(member)
        return [member.worker for member in newcomers]

    def _choose_leaving(self, named: Collection[WorkerId]) -> set[WorkerId]:
        """Those that were named, and as many more as there are too many: the newest first."""
        leaving = set(named) & set(self.members.workers)
        if len(leaving) == len(self.members):
            leaving = set()  # all others are lost: somebody has to stay
        for worker in reversed(self.members.workers):
            if len(self.members) - len(leaving) <= self.wishes.recruits.wanted:
                break
            leaving.add(worker)
        return leaving

    def _set_route(self, next_epoch: Epoch, leaving: set[WorkerId], *, is_balancing: bool) -> None:
        staying = [worker for worker in self.members.workers if worker not in leaving]
        if set(staying) == set(self.route.workers) and not is_balancing:
            return
        if is_balancing:
            self.load = self._measured_load()
        route = next_route(self.route, staying, next_epoch, self.load if is_balancing else None)
        if route.owners == self.route.owners:
            return
        self.route = route
        save_route(self._claimed.storage, self.route, generation=self._claimed.generation)

    def _measured_load(self) -> list[float] | None:
        """How many keys and further rows each key group had lately; None if too few to tell anything."""
        load = [0.0] * self._claimed.job.key_groups
        request = messages.Describe(job=self._claimed.job.job_id, generation=self._claimed.generation)
        for member in self.members.all:
            try:
                described, _ = member.client.call(request)
            except AnabranchError as error:  # one that has just joined knows nothing yet
                logger.debug("the load of worker %s is not known: %s", member.worker, error)
                continue
            for group, weight in described["load"]:
                load[group] += weight
        return load if sum(load) >= _LOAD_MIN else None

    def _assign(self, durability: Durability) -> Assignment:
        with self._assigning:
            # Asked for only now: from here on they are in use, and not cleaned up.
            self._adopted_from = [durability.files(self._claimed.storage)]
            self._assignments += 1
            assignment = Assignment(
                self.route,
                durability.newest,
                self._adopted_from[0],
                number=self._assignments,
                before=self._applied,
                peer_timeout_s=self._settings.worker_timeout_s,
                drain=self._settings.drain,
                heartbeat_s=self._settings.heartbeat_s,
                offers=self._offers if self._settings.store == "redis" else None,
            )
            carry_out(self._claimed, self.members.all, assignment)
        return assignment

    def _part_with(self, leaving: set[WorkerId]) -> None:
        for worker in leaving:
            member = self.members.get(worker)
            with self._notes:
                self._departing[worker] = member
                self.members.all = tuple(each for each in self.members.all if each.worker != worker)

    # ---------------------------------------------------------------------------------------- migrations

    def _begin_migration(self, change: Change, assignment: Assignment, first_epoch: Epoch) -> None:
        answers = assignment.answers
        migration = Migration(
            number=self._assignments,
            strategy=self._settings.migration,
            route_version=change.route_version,
            first_epoch=first_epoch,
            groups_moving=change.key_groups,
            joined=change.started,
            left=change.left,
            baseline=dict(answers),
            change_ms=change.duration_ms,
            drains=self._settings.drain,
        )
        self.migrations.begin(migration, change.rescales, self.members.workers)
        if self._settings.migration == "eager" and change.key_groups:
            with ThreadPoolExecutor(max_workers=len(self.members)) as pool:
                for member, answer in zip(self.members.all, pool.map(self._complete, self.members.all), strict=True):
                    answers[member.worker] = answer or answers[member.worker]
        for worker in self.members.workers:
            self.note_progress(worker, answers[worker])

    def _complete(self, member: Member) -> Mapping[str, Any] | None:
        """Wait until all has arrived at a worker. If that fails, the rest follows as it would have anyway."""
        request = messages.Complete(job=self._claimed.job.job_id, generation=self._claimed.generation)
        try:
            answer, _ = member.client.call(request)
        except AnabranchError as error:
            logger.warning("not all state has arrived at worker %s: %s", member.worker, error)
            return None
        return answer

    def _progress_of(self, member: Member) -> Mapping[str, Any]:
        request = messages.Progress(job=self._claimed.job.job_id, generation=self._claimed.generation)
        answer, _ = member.client.call(request, timeout_s=max(self._settings.heartbeat_s, 1.0))
        return answer

    def _finish_migration(self, number: int) -> None:
        """All state has arrived: those that kept it may let go of it, and leave if they are to."""
        with self._notes:
            if number != self._assignments:
                return
            departing, self._departing = list(self._departing.values()), {}
        request = messages.Release(job=self._claimed.job.job_id, generation=self._claimed.generation, number=number)
        for member in self.members.all:
            try:
                member.client.call(request)
            except AnabranchError as error:
                logger.info("worker %s keeps what others have: %s", member.worker, error)
        for member in departing:
            self._take_leave(member)
        self.migrations.finish(number)

    def _take_leave(self, member: Member) -> None:
        try:
            member.client.call(messages.CloseJob(job=self._claimed.job.job_id, generation=self._claimed.generation))
        except AnabranchError as error:
            logger.info("worker %s could not be told that it may go: %s", member.worker, error)
        logger.info("worker %s has left", member.worker)
        member.client.close()
        self._supply.retire(member.worker)

    # --------------------------------------------------------------------------------------------- watch

    def watched(self) -> Sequence[Member]:
        return [*self.members.all, *self.departing]

    def report_lost(self, worker: WorkerId, reason: str) -> None:
        with self._notes:
            departing = self._departing.pop(worker, None)
        if departing is not None:
            logger.warning("worker %s is lost (%s); what it kept comes from the checkpoint", worker, reason)
            self._supply.kill(worker)
        elif self.wishes.note_lost(worker):
            logger.warning("worker %s is lost: %s", worker, reason)
            self.on_loss(worker)

    def report_leaving(self, worker: WorkerId) -> None:
        if self.wishes.is_leaving(worker) or worker not in self.members.workers:
            return
        try:
            self.wishes.drain(worker)
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
        if self.wishes.is_lost(member.worker):
            return False
        if member.worker in self._supply.exited():
            self.wishes.note_lost(member.worker)
            return False
        try:
            health, _ = member.client.call(messages.Health(), timeout_s=self._settings.worker_timeout_s)
        except AnabranchError as error:
            logger.info("worker %s does not answer: %s", member.worker, error)
            self.wishes.note_lost(member.worker)
            return False
        return health["worker"] == member.worker and self._claimed.job.job_id in health["jobs"]

    def _make_routing(self) -> Routing:
        position = {member.worker: number for number, member in enumerate(self.members.all)}
        return Routing(
            workers=self.members.workers,
            addresses=tuple(member.address for member in self.members.all),
            owners=np.array([position[owner] for owner in self.route.owners], dtype=np.int16),
        )
