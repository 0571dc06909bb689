"""Starting a job from its checkpoint: find the last epoch that Spark committed, and hand out its state."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.manifests import newest_route, save_route
from anabranch.checkpoint.rewind import newest_durable_epoch, rewind
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.control.membership.assignment import Assignment, carry_out, wipe_shared_store
from anabranch.control.membership.members import Membership
from anabranch.control.owned_checkpoint import Committed, OwnedCheckpoint
from anabranch.core.answers import SharedOffer
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch
from anabranch.core.routes import Route, initial_route, next_route
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """A job that is ready for its next epoch."""

    owned: OwnedCheckpoint
    route: Route
    committed: Committed
    files: StateFiles


def resume(
    owned: OwnedCheckpoint,
    members: Membership,
    *,
    shared_store: bool = False,
    heartbeat_s: float = 0.0,
    scheduler: Scheduler = THREADS,
) -> Resumed:
    """Open the job on all workers at the last epoch that Spark committed."""
    storage = owned.storage
    epoch = _return_to_durable_epoch(owned)
    # Manifests of later epochs stay: Spark may yet commit them for an older driver; else newer ones take their place.
    files = state_files(storage, epoch)
    route = _route(owned, members, Epoch(epoch + 1))
    committed = Committed(epoch, files.committed_by)
    if shared_store:
        wipe_shared_store(owned, members.all)
    offers: list[SharedOffer] | None = [] if shared_store else None
    assignment = Assignment(route, committed, files, offers=offers, heartbeat_s=heartbeat_s)
    carry_out(owned, members.all, assignment, scheduler)
    logger.info("job %s resumes after epoch %d, generation %d", owned.job.job_id, epoch, owned.generation)
    return Resumed(owned, route, committed, files)


def _return_to_durable_epoch(owned: OwnedCheckpoint) -> Epoch:
    """The last epoch that Spark committed; in a job that does not make every epoch durable, the last durable one."""
    committed = last_committed_epoch(owned.spark)
    if not owned.is_volatile:
        return committed
    durable = newest_durable_epoch(owned.storage, committed)
    if durable < committed:
        check_generation(owned.storage, owned.generation)
        try:
            repeated = rewind(owned.spark, owned.storage, durable)
        except CheckpointError:
            # A newer driver that does the same may have been faster.
            check_generation(owned.storage, owned.generation)
            raise
        logger.warning("epochs %s were not durable, and are repeated", repeated)
    return durable


def _route(owned: OwnedCheckpoint, members: Membership, first_epoch: Epoch) -> Route:
    current = newest_route(owned.storage)
    if current is None:
        route = initial_route(members.workers, owned.job.key_groups, first_epoch)
    elif set(current.workers) != set(members.workers):
        route = next_route(current, members.workers, first_epoch)
    else:
        return current
    save_route(owned.storage, route, generation=owned.generation)
    return route
