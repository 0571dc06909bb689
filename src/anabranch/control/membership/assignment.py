"""Handing out key groups: to whom, and from whom their state comes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from anabranch.checkpoint.statefiles import StateFiles
from anabranch.control.membership.members import Member
from anabranch.control.owned_checkpoint import Committed, OwnedCheckpoint
from anabranch.core.answers import SharedOffer, TransferProgress
from anabranch.core.ids import WorkerId
from anabranch.core.requests import Assign, HandOver, Health, OpenJob, PeerOffer, Wipe
from anabranch.core.routes import Route
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assignment:
    """Who is to hold which key groups, as of a committed epoch."""

    route: Route
    committed: Committed
    #: Where state is that no living worker has.
    files: StateFiles
    #: Counts the assignments of a generation.
    number: int = 0
    #: The route before: workers that owned key groups under it and are still here keep them for the new owners.
    before: Route | None = None
    peer_timeout_s: float = 30.0
    #: Whether state moves in the background as well.
    drain: bool = True
    #: How often workers are looked after.
    heartbeat_s: float = 0.0
    #: Where key groups are that nobody has any more, in a store that workers share: None if they share none.
    offers: list[SharedOffer] | None = None
    #: Answers by worker, once it is carried out.
    answers: dict[WorkerId, TransferProgress] = field(default_factory=dict)


def carry_out(
    owned: OwnedCheckpoint, members: Sequence[Member], assignment: Assignment, scheduler: Scheduler = THREADS
) -> None:
    """Bring every worker to the committed epoch, and give it its key groups.

    State that a worker has already stays where it is. All other state comes when it is needed, and in the background.
    """
    scheduler.gather(partial(_open, owned, member, assignment) for member in members)
    if assignment.offers is not None:
        for offers in scheduler.gather(partial(_hand_over, owned, member, assignment) for member in members):
            assignment.offers.extend(offers)
    answers = scheduler.gather(partial(_assign, owned, member, members, assignment) for member in members)
    assignment.answers.update(zip([member.worker for member in members], answers, strict=True))


def wipe_shared_store(owned: OwnedCheckpoint, members: Sequence[Member]) -> None:
    """Remove what an earlier driver left behind, unless a worker still takes part in the job."""
    for member in members:
        if owned.job.job_id in member.client.call(Health()).jobs:
            return
    members[0].client.call(Wipe(job=owned.job.job_id, generation=owned.generation))


def _open(owned: OwnedCheckpoint, member: Member, assignment: Assignment) -> None:
    job, committed = owned.job, assignment.committed
    member.client.call(
        OpenJob(
            job=job.job_id,
            generation=owned.generation,
            key_groups=job.key_groups,
            committed_epoch=committed.epoch,
            committed_by=committed.by,
            stages=job.stages,
            checkpoint=owned.storage.location,
            heartbeat_ms=round(1000 * assignment.heartbeat_s),
        )
    )


def _hand_over(owned: OwnedCheckpoint, member: Member, assignment: Assignment) -> tuple[SharedOffer, ...]:
    """Let a worker give up what it is not to have any more, before anybody else takes it."""
    answer = member.client.call(
        HandOver(
            job=owned.job.job_id,
            generation=owned.generation,
            epoch=assignment.committed.epoch,
            number=assignment.number,
            keep=assignment.route.groups_of(member.worker),
        )
    )
    return answer.offers


def _assign(
    owned: OwnedCheckpoint, member: Member, members: Sequence[Member], assignment: Assignment
) -> TransferProgress:
    committed, files = assignment.committed, assignment.files
    answer = member.client.call(
        Assign(
            job=owned.job.job_id,
            generation=owned.generation,
            epoch=committed.epoch,
            number=assignment.number,
            groups=assignment.route.groups_of(member.worker),
            snapshot=tuple(files.snapshot_files),
            changes=tuple(files.change_files),
            freeze=assignment.before is not None,
            peers=_peers_of(member, members, assignment),
            shared=tuple(assignment.offers or ()),
            drain=assignment.drain,
            peer_timeout_ms=round(1000 * assignment.peer_timeout_s),
        )
    )
    logger.debug("worker %s at epoch %d: %s", member.worker, committed.epoch, answer)
    return answer.progress


def _peers_of(member: Member, members: Collection[Member], assignment: Assignment) -> tuple[PeerOffer, ...]:
    """The other workers that had some of this worker's key groups before."""
    if assignment.before is None or assignment.offers is not None:
        return ()
    mine = set(assignment.route.groups_of(member.worker))
    offers = []
    for other in members:
        offered = mine.intersection(assignment.before.groups_of(other.worker)) if other is not member else ()
        if offered:
            offers.append(PeerOffer(address=other.address, groups=tuple(sorted(offered))))
    return tuple(offers)
