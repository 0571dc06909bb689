"""What tasks are given to reach the state of each stage, under the route that is in force."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from anabranch.control.membership.cluster import Cluster
from anabranch.control.owned_checkpoint import OwnedCheckpoint
from anabranch.core.ids import StageNumber
from anabranch.core.routes import assign_partitions
from anabranch.core.settings import Settings
from anabranch.wire.credentials import Credentials
from anabranch.wire.routed import StageAccess


def make_accesses(
    owned: OwnedCheckpoint, cluster: Cluster, parallelism: Mapping[StageNumber, int], settings: Settings
) -> Mapping[int, StageAccess]:
    """By stage."""
    accesses: dict[int, StageAccess] = {}
    for spec in owned.job.stages:
        partitions = min(parallelism[spec.number], owned.job.key_groups)
        accesses[spec.number] = StageAccess(
            job=owned.job.job_id,
            generation=owned.generation,
            key_groups=owned.job.key_groups,
            stage=spec,
            routing=cluster.routing,
            parallelism=partitions,
            partitions=np.array(assign_partitions(cluster.route, partitions, cluster.load), dtype=np.int32),
            cache_route=settings.routing_cache,
            timeout_s=settings.request_timeout_s,
            credentials=Credentials.of(settings),
        )
    return accesses
