"""What a migration strategy decides, and what it may use of a query."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from anabranch.control.membership.rescale import Rescale
from anabranch.core.answers import TransferProgress
from anabranch.core.ids import StageNumber, WorkerId
from anabranch.core.settings import Settings

if TYPE_CHECKING:
    from anabranch.control.coordinator import Coordinator
    from anabranch.control.membership.cluster import Cluster


class MigrationStrategy(Protocol):
    """How one query is rescaled, and how state follows key groups to their new owners."""

    @property
    def name(self) -> str:
        """As users write it, and reports tell it."""

    @property
    def has_drain(self) -> bool:
        """Whether state moves in the background, which users can turn off."""

    @property
    def hands_over(self) -> bool:
        """Whether workers leave key groups in a store that they share before others take them from there."""

    def rescale(self, query: RescalableQuery, rescale: Rescale) -> None:
        """Begins a rescale. Its handle tells how it goes on."""

    def scale_out(self, query: RescalableQuery, stages: Collection[StageNumber]) -> Rescale:
        """Asks for one worker more than was asked for last, and for one task more in each of these stages."""

    def check_join(self) -> None:
        """Refuses a worker that was started elsewhere, if none can join."""

    def follow(self, cluster: Cluster) -> Mapping[WorkerId, TransferProgress]:
        """Does what comes between a change that moved key groups and the next epoch.

        Gives what workers say about the key groups that are on their way to them, if they were asked.
        """


class RescalableQuery(Protocol):
    """What a strategy may use of the query that it rescales."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the present run."""

    @property
    def settings(self) -> Settings:
        """The settings of the present run."""

    def restarting(self) -> AbstractContextManager[Any]:
        """Keeps everyone else from ending or restarting the query."""

    @property
    def is_released(self) -> bool:
        """Whether the query has ended for good."""

    def relaunch(self, settings: Settings, parallelism: Mapping[StageNumber, int]) -> None:
        """Stops the present run, and starts another one. The caller keeps everyone else from that."""
