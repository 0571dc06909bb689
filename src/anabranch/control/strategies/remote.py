"""The remote strategy: state is in a store that workers share, so that key groups change hands and nothing moves.

It stands around the strategy that the user has chosen, which goes on deciding how the query is rescaled. Only key
groups that are not whole in the shared store come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from anabranch.control.membership.rescale import Rescale
from anabranch.core.answers import TransferProgress
from anabranch.core.ids import StageNumber, WorkerId

if TYPE_CHECKING:
    from anabranch.control.membership.cluster import Cluster
    from anabranch.control.strategies.strategy import MigrationStrategy, RescalableQuery


class RemoteMigration:
    """See MigrationStrategy."""

    has_drain = False
    hands_over = True

    def __init__(self, chosen: MigrationStrategy) -> None:
        self._chosen = chosen
        self.name = chosen.name

    def rescale(self, query: RescalableQuery, rescale: Rescale) -> None:
        self._chosen.rescale(query, rescale)

    def scale_out(self, query: RescalableQuery, stages: Collection[StageNumber]) -> Rescale:
        return self._chosen.scale_out(query, stages)

    def check_join(self) -> None:
        self._chosen.check_join()

    def follow(self, cluster: Cluster) -> Mapping[WorkerId, TransferProgress]:
        return self._chosen.follow(cluster)
