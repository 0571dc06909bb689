"""The eager strategy: all state has moved before the next epoch begins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from anabranch.control.membership.members import Member
from anabranch.control.strategies.lazy import LazyMigration
from anabranch.core.answers import TransferProgress
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import WorkerId
from anabranch.core.requests import Complete

if TYPE_CHECKING:
    from anabranch.control.membership.cluster import Cluster

logger = logging.getLogger(__name__)


class EagerMigration(LazyMigration):
    """See MigrationStrategy. The query goes on while it is rescaled, but for one pause."""

    name = "eager"
    has_drain = False

    def follow(self, cluster: Cluster) -> Mapping[WorkerId, TransferProgress]:
        """Waits until all has arrived."""
        members = cluster.members.all
        answers = cluster.scheduler.gather(partial(_complete, cluster, member) for member in members)
        return {member.worker: answer for member, answer in zip(members, answers, strict=True) if answer is not None}


def _complete(cluster: Cluster, member: Member) -> TransferProgress | None:
    """Waits until all has arrived at a worker. If that fails, the rest follows as it would have anyway."""
    owned = cluster.owned
    try:
        return member.client.call(Complete(job=owned.job.job_id, generation=owned.generation))
    except AnabranchError as error:
        logger.warning("not all state has arrived at worker %s: %s", member.worker, error)
        return None
