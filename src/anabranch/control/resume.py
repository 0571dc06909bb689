"""Starting a job from its checkpoint: claim it, find the last epoch that Spark committed, and restore its state."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.job import JobDescription, create_or_check
from anabranch.checkpoint.manifests import ChangeFile, chain, remove_after
from anabranch.checkpoint.routes import newest_route, save_route
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.control.members import Member, Membership
from anabranch.core.ids import NO_EPOCH, Epoch, Generation, JobId
from anabranch.core.routes import Route, initial_route, next_route
from anabranch.core.schemas import StageSpec
from anabranch.wire import messages

logger = logging.getLogger(__name__)

#: Change files of one restore request; more of them go in several, so that none takes longer than its time limit.
_FILES_PER_REQUEST = 64


@dataclass(frozen=True)
class Claimed:
    """A checkpoint that this driver may use."""

    storage: Storage
    job: JobDescription
    generation: Generation


@dataclass(frozen=True)
class Resumed:
    """A job that is ready for its next epoch."""

    storage: Storage
    job: JobDescription
    generation: Generation
    route: Route
    committed_epoch: Epoch


def claim(location: str, stages: Sequence[StageSpec], key_groups: int) -> Claimed:
    """Check that the checkpoint is this job's, and fence every earlier driver."""
    storage = Storage(location)
    wanted = JobDescription(FORMAT_VERSION, JobId(uuid.uuid4().hex), key_groups, tuple(stages))
    job = create_or_check(storage, wanted)
    generation = claim_generation(storage, {"host": socket.gethostname(), "pid": os.getpid()})
    return Claimed(storage, job, generation)


def resume(claimed: Claimed, members: Membership) -> Resumed:
    """Open the job on all workers and restore the state of the last epoch that Spark committed."""
    storage = claimed.storage
    committed = last_committed_epoch(storage)
    manifests = chain(storage, committed)
    remove_after(storage, committed)
    route = _route(claimed, members, Epoch(committed + 1))
    files = [file for manifest in manifests for file in manifest.files]
    by = [manifests[-1].generation, manifests[-1].run] if committed != NO_EPOCH else []
    opening = messages.OpenJob(
        job=claimed.job.job_id,
        generation=claimed.generation,
        key_groups=claimed.job.key_groups,
        committed_epoch=committed,
        committed_by=[int(number) for number in by],
        stages=[stage.to_json() for stage in claimed.job.stages],
        checkpoint=storage.location,
    )

    def open_on(member: Member) -> None:
        member.client.call(opening)
        _restore(claimed, member, route, files)

    with ThreadPoolExecutor(max_workers=max(1, len(members))) as pool:
        list(pool.map(open_on, members.all))
    logger.info("job %s resumes after epoch %d, generation %d", claimed.job.job_id, committed, claimed.generation)
    return Resumed(storage, claimed.job, claimed.generation, route, committed)


def _route(claimed: Claimed, members: Membership, first_epoch: Epoch) -> Route:
    workers = [member.worker for member in members.all]
    current = newest_route(claimed.storage)
    if current is None:
        route = initial_route(workers, claimed.job.key_groups, first_epoch)
    elif set(current.workers) != set(workers):
        route = next_route(current, workers, first_epoch)
    else:
        return current
    save_route(claimed.storage, route, generation=claimed.generation)
    return route


def _restore(claimed: Claimed, member: Member, route: Route, files: Sequence[ChangeFile]) -> None:
    groups = [int(group) for group in route.groups_of(member.worker)]
    for start in range(0, len(files), _FILES_PER_REQUEST):
        member.client.call(
            messages.Restore(
                job=claimed.job.job_id,
                generation=claimed.generation,
                groups=groups,
                files=[asdict(file) for file in files[start : start + _FILES_PER_REQUEST]],
            )
        )
