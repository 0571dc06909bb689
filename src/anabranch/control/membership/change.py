"""A change of workers and route, between two epochs: carries out what the membership machine says, step by step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from anabranch.checkpoint.manifests import save_route
from anabranch.control.epochs.durability import Durability
from anabranch.control.membership.assignment import Assignment, carry_out
from anabranch.control.membership.members import Member
from anabranch.control.membership.rescale import Migration, Rescale
from anabranch.core import membership_events as events
from anabranch.core.answers import TransferProgress
from anabranch.core.errors import AnabranchError, EpochError, LostWorkerError, WorkerError
from anabranch.core.ids import WorkerId
from anabranch.core.reports import ChangeReport
from anabranch.core.requests import Describe

if TYPE_CHECKING:
    from anabranch.control.membership.cluster import Cluster

logger = logging.getLogger(__name__)

#: If less load has been seen lately, key groups are shared out by their number.
_LOAD_MIN = 2000


class ChangeInProgress:
    """Carries out the instructions of one change, in the thread that runs epochs."""

    def __init__(self, cluster: Cluster, durability: Durability) -> None:
        self._cluster = cluster
        self._durability = durability
        self._started_s = cluster.scheduler.monotonic_s()
        self._answers: dict[WorkerId, TransferProgress] = {}
        #: What was done, and the rescales that took effect with it.
        self.report: ChangeReport
        self.rescales: tuple[Rescale, ...] = ()

    def carry_out(self, instruction: events.MembershipInstruction) -> list[events.MembershipEvent]:
        """Does what the machine says; what came of it."""
        cluster = self._cluster
        match instruction:
            case events.RemoveWorker():
                logger.warning("worker %s is gone; its key groups go to others", instruction.worker)
                cluster.members.remove(instruction.worker)
                cluster.unreplaced.append(instruction.worker)
                cluster.worker_pool.kill(instruction.worker)
            case events.StartWorkerNow():
                member = self._start_worker()
                cluster.waiting[member.worker] = member
                return [events.StartedAtOnce(member.worker)]
            case events.LetIn():
                self._tell_who_comes(instruction.worker)
                with cluster.notes:
                    cluster.members.add(cluster.waiting.pop(instruction.worker))
            case events.MeasureLoad():
                cluster.load = self._measured_load()
                return [events.LoadMeasured(None if cluster.load is None else tuple(cluster.load))]
            case events.SaveRoute():
                save_route(cluster.owned.storage, instruction.route, generation=cluster.owned.generation)
                return [events.RouteSaved()]
            case events.AssignGroups():
                return [self._assign(instruction)]
            case events.LookForLosses():
                cluster.look_for_losses()
                return [events.LossesLookedFor()]
            case events.Depart():
                with cluster.notes:
                    cluster.gone[instruction.worker] = cluster.members.take(instruction.worker)
            case events.ChangeMade():
                self._note_made(instruction)
            case events.FailChange():
                raise EpochError(instruction.message)
            case _:
                cluster.do(instruction)
        return []

    def _tell_who_comes(self, worker: WorkerId) -> None:
        """Whoever has read that a worker is lost reads that it is replaced."""
        if self._cluster.unreplaced:
            logger.warning("worker %s takes the place of %s", worker, self._cluster.unreplaced.pop(0))
        else:
            logger.info("worker %s takes part", worker)

    def _start_worker(self) -> Member:
        try:
            member = self._cluster.worker_pool.start()
        except AnabranchError:
            raise
        except Exception as error:
            raise WorkerError(
                f"No state worker is left, and none can be started: {error}. Start the query again when that is mended."
            ) from error
        if member is None:
            raise WorkerError("No state worker is left, and this query starts none itself. Start one, then the query.")
        return member

    def _assign(self, instruction: events.AssignGroups) -> events.MembershipEvent:
        cluster, settings = self._cluster, self._cluster.settings
        with cluster.assigning:
            # Asked for only now: from here on they are in use, and not cleaned up.
            cluster.adopted_from = [self._durability.files(cluster.owned.storage)]
            assignment = Assignment(
                instruction.route,
                self._durability.newest,
                cluster.adopted_from[0],
                number=instruction.number,
                before=instruction.before,
                peer_timeout_s=settings.worker_timeout_s,
                drain=settings.drain,
                heartbeat_s=settings.heartbeat_s,
                offers=cluster.offers if cluster.strategy.hands_over else None,
            )
            try:
                carry_out(cluster.owned, cluster.members.all, assignment, cluster.scheduler)
            except LostWorkerError as error:
                logger.warning("another worker was lost during a change: %s", error)
                return events.AssigningLost(str(error))
        self._answers = assignment.answers
        return events.GroupsAssigned()

    def _measured_load(self) -> list[float] | None:
        """How many keys and further rows each key group had lately; None if too few to tell anything."""
        cluster = self._cluster
        load = [0.0] * cluster.owned.job.key_groups
        request = Describe(job=cluster.owned.job.job_id, generation=cluster.owned.generation)
        for member in cluster.members.all:
            try:
                described = member.client.call(request)
            except AnabranchError as error:  # one that has just joined knows nothing yet
                logger.debug("the load of worker %s is not known: %s", member.worker, error)
                continue
            for group, weight in described.load:
                load[group] += weight
        return load if sum(load) >= _LOAD_MIN else None

    def _note_made(self, made: events.ChangeMade) -> None:
        """The change is over: tell who asked for it, and begin the migration."""
        cluster = self._cluster
        with cluster.notes:
            self.rescales = tuple(cluster.rescales.pop(number) for number in made.rescales)
        duration_ms = round(1000 * (cluster.scheduler.monotonic_s() - self._started_s))
        version = cluster.route.version
        self.report = ChangeReport(
            lost=list(made.lost),
            started=list(made.joined),
            left=list(made.left),
            key_groups=made.moved,
            route_version=version,
            duration_ms=duration_ms,
        )
        cluster.offers = []
        if len(cluster.members) >= cluster.wanted:
            cluster.unreplaced.clear()
        cluster.routing = cluster.make_routing()
        migration = Migration(
            number=made.number,
            strategy=cluster.strategy.name,
            route_version=version,
            first_epoch=made.next_epoch,
            groups_moving=made.moved,
            joined=made.joined,
            left=made.left,
            baseline=dict(self._answers),
            change_ms=duration_ms,
            drains=cluster.settings.drain,
        )
        cluster.migrations.begin(migration, self.rescales)
        members = cluster.members.all
        if made.moved:
            self._answers |= cluster.strategy.follow(cluster)
        for member in members:
            cluster.note_progress(member.worker, self._answers[member.worker])
