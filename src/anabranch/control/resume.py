"""Starting a job from its checkpoint: claim it, find the last epoch that Spark committed, and hand out its state."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.generations import NO_GENERATION, claim_generation, generation_info, latest_generation
from anabranch.checkpoint.job import JobDescription, create_or_check, save_shape
from anabranch.checkpoint.rewind import newest_durable_epoch, rewind
from anabranch.checkpoint.routes import newest_route, save_route
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.checkpoint.storage import Storage
from anabranch.control.members import Member, Membership
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch, Generation, JobId
from anabranch.core.requests import RunId
from anabranch.core.routes import Route, initial_route, next_route
from anabranch.core.schemas import StageSpec
from anabranch.wire import messages

logger = logging.getLogger(__name__)

#: In what a driver says about itself: whether epochs may be not durable for a while.
VOLATILE = "checkpoint_interval"


@dataclass(frozen=True)
class Claimed:
    """A checkpoint that this driver may use."""

    storage: Storage
    #: Where Spark keeps its own offsets and commits; the same, unless the state has a place of its own.
    spark: Storage
    job: JobDescription
    generation: Generation
    #: Whether the driver before this one did not make every epoch durable.
    is_volatile: bool = False


@dataclass(frozen=True)
class Committed:
    """The newest epoch that is part of the state, and the run that it came from (None before the first epoch)."""

    epoch: Epoch
    by: RunId | None


@dataclass(frozen=True)
class Resumed:
    """A job that is ready for its next epoch."""

    claimed: Claimed
    route: Route
    committed: Committed
    files: StateFiles


def claim(
    location: str,
    stages: Sequence[StageSpec],
    key_groups: int,
    *,
    state_location: str = "",
    interval_s: float = 0.0,
) -> Claimed:
    """Check that the checkpoint is this job's, and fence every earlier driver."""
    spark = Storage(location)
    storage = Storage(state_location) if state_location else spark
    wanted = JobDescription(FORMAT_VERSION, JobId(uuid.uuid4().hex), key_groups, tuple(stages))
    job = create_or_check(storage, wanted, spark)
    is_volatile = _was_volatile(storage)
    info = {"host": socket.gethostname(), "pid": os.getpid(), VOLATILE: interval_s or is_volatile}
    generation = claim_generation(storage, info)
    save_shape(storage, job, generation, spark)
    return Claimed(storage, spark, job, generation, is_volatile)


def _was_volatile(storage: Storage) -> bool:
    """Whether the newest driver did not make every epoch durable. If nobody can tell, a missing epoch is an error."""
    before = latest_generation(storage)
    if before == NO_GENERATION:
        return False
    try:
        return bool(generation_info(storage, before).get(VOLATILE))
    except CheckpointError as error:
        logger.warning("%s", error)
        return False


def resume(claimed: Claimed, members: Membership) -> Resumed:
    """Open the job on all workers at the last epoch that Spark committed."""
    storage = claimed.storage
    epoch = _return_to_durable_epoch(claimed)
    # Manifests of later epochs stay: Spark may yet commit them for an older driver; else newer ones take their place.
    files = state_files(storage, epoch)
    route = _route(claimed, members, Epoch(epoch + 1))
    committed = Committed(epoch, files.committed_by)
    open_on_all(claimed, members, route, committed, files)
    logger.info("job %s resumes after epoch %d, generation %d", claimed.job.job_id, epoch, claimed.generation)
    return Resumed(claimed, route, committed, files)


def _return_to_durable_epoch(claimed: Claimed) -> Epoch:
    """The last epoch that Spark committed; in a job that does not make every epoch durable, the last durable one."""
    committed = last_committed_epoch(claimed.spark)
    if not claimed.is_volatile:
        return committed
    durable = newest_durable_epoch(claimed.storage, committed)
    if durable < committed:
        repeated = rewind(claimed.spark, claimed.storage, durable)
        logger.warning("epochs %s were not durable, and are repeated", repeated)
    return durable


def open_on_all(
    claimed: Claimed, members: Membership, route: Route, committed: Committed, files: StateFiles, number: int = 0
) -> None:
    """Bring every worker to a committed epoch, and give it its key groups under a route.

    State that a worker has already stays where it is. All other state comes from the checkpoint, when it is needed.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(members))) as pool:
        list(pool.map(lambda member: _open_on(claimed, member, route, committed, files, number), members.all))


def _open_on(
    claimed: Claimed, member: Member, route: Route, committed: Committed, files: StateFiles, number: int
) -> None:
    member.client.call(
        messages.OpenJob(
            job=claimed.job.job_id,
            generation=claimed.generation,
            key_groups=claimed.job.key_groups,
            committed_epoch=committed.epoch,
            committed_by=[int(number) for number in committed.by or ()],
            stages=[stage.to_json() for stage in claimed.job.stages],
            checkpoint=claimed.storage.location,
        )
    )
    answer, _ = member.client.call(
        messages.Assign(
            job=claimed.job.job_id,
            generation=claimed.generation,
            epoch=committed.epoch,
            number=number,
            groups=[int(group) for group in route.groups_of(member.worker)],
            snapshot=[asdict(file) for file in files.snapshot_files],
            changes=[asdict(file) for file in files.change_files],
        )
    )
    logger.debug("worker %s at epoch %d: %s", member.worker, committed.epoch, answer)


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
