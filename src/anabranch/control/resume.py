"""Starting a job from its checkpoint: find the last epoch that Spark committed, and hand out its state."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.rewind import newest_durable_epoch, rewind
from anabranch.checkpoint.routes import newest_route, save_route
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.control.assigning import Assignment, carry_out, wipe_shared_store
from anabranch.control.claims import Claimed, Committed
from anabranch.control.members import Membership
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch
from anabranch.core.routes import Route, initial_route, next_route
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """A job that is ready for its next epoch."""

    claimed: Claimed
    route: Route
    committed: Committed
    files: StateFiles


def resume(
    claimed: Claimed,
    members: Membership,
    *,
    shared_store: bool = False,
    heartbeat_s: float = 0.0,
    scheduler: Scheduler = THREADS,
) -> Resumed:
    """Open the job on all workers at the last epoch that Spark committed."""
    storage = claimed.storage
    epoch = _return_to_durable_epoch(claimed)
    # Manifests of later epochs stay: Spark may yet commit them for an older driver; else newer ones take their place.
    files = state_files(storage, epoch)
    route = _route(claimed, members, Epoch(epoch + 1))
    committed = Committed(epoch, files.committed_by)
    if shared_store:
        wipe_shared_store(claimed, members.all)
    offers: list[dict[str, Any]] | None = [] if shared_store else None
    assignment = Assignment(route, committed, files, offers=offers, heartbeat_s=heartbeat_s)
    carry_out(claimed, members.all, assignment, scheduler)
    logger.info("job %s resumes after epoch %d, generation %d", claimed.job.job_id, epoch, claimed.generation)
    return Resumed(claimed, route, committed, files)


def _return_to_durable_epoch(claimed: Claimed) -> Epoch:
    """The last epoch that Spark committed; in a job that does not make every epoch durable, the last durable one."""
    committed = last_committed_epoch(claimed.spark)
    if not claimed.is_volatile:
        return committed
    durable = newest_durable_epoch(claimed.storage, committed)
    if durable < committed:
        check_generation(claimed.storage, claimed.generation)
        try:
            repeated = rewind(claimed.spark, claimed.storage, durable)
        except CheckpointError:
            # A newer driver that does the same may have been faster.
            check_generation(claimed.storage, claimed.generation)
            raise
        logger.warning("epochs %s were not durable, and are repeated", repeated)
    return durable


def _route(claimed: Claimed, members: Membership, first_epoch: Epoch) -> Route:
    current = newest_route(claimed.storage)
    if current is None:
        route = initial_route(members.workers, claimed.job.key_groups, first_epoch)
    elif set(current.workers) != set(members.workers):
        route = next_route(current, members.workers, first_epoch)
    else:
        return current
    save_route(claimed.storage, route, generation=claimed.generation)
    return route
