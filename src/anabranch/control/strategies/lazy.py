"""The lazy strategy: new owners serve key groups at once, and fetch state when it is needed and in the background."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from anabranch.control.membership.rescale import Rescale
from anabranch.core.answers import TransferProgress
from anabranch.core.ids import StageNumber, WorkerId

if TYPE_CHECKING:
    from anabranch.control.membership.cluster import Cluster
    from anabranch.control.strategies.strategy import RescalableQuery


class LazyMigration:
    """See MigrationStrategy. The query goes on while it is rescaled."""

    name = "lazy"
    has_drain = True
    hands_over = False

    def rescale(self, query: RescalableQuery, rescale: Rescale) -> None:
        query.coordinator.rescale(rescale)

    def scale_out(self, query: RescalableQuery, stages: Collection[StageNumber]) -> Rescale:
        coordinator = query.coordinator
        return coordinator.cluster.scale_out({int(number): coordinator.parallelism[number] for number in stages})

    def check_join(self) -> None:
        """Refuses none."""

    def follow(self, cluster: Cluster) -> Mapping[WorkerId, TransferProgress]:
        """Waits for nothing."""
        del cluster
        return {}
