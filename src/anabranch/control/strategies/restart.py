"""The restart strategy, which others are measured against: stop the query, and start it again."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from anabranch.control.membership.rescale import Rescale, asked_for, parallelism_after
from anabranch.core.answers import TransferProgress
from anabranch.core.errors import UnsupportedError
from anabranch.core.ids import StageNumber, WorkerId
from anabranch.core.membership_events import RescaleState
from anabranch.core.settings import Settings

if TYPE_CHECKING:
    from anabranch.control.membership.cluster import Cluster
    from anabranch.control.strategies.strategy import RescalableQuery


class RestartMigration:
    """See MigrationStrategy."""

    name = "restart"
    has_drain = False
    hands_over = False

    def __init__(self) -> None:
        #: Held by whoever asks for a rescale.
        self._asking = threading.Lock()
        #: Rescales that wait for their restart, in order, or are being made by one.
        self._waiting: list[Rescale] = []

    def rescale(self, query: RescalableQuery, rescale: Rescale) -> None:
        with self._asking:
            self._ask(query, rescale)

    def scale_out(self, query: RescalableQuery, stages: Collection[StageNumber]) -> Rescale:
        with self._asking:
            workers = next((each.workers for each in self._waiting[::-1] if each.workers), query.settings.workers)
            newest = parallelism_after(self._waiting)
            in_force = {int(number): query.coordinator.parallelism[number] for number in stages}
            rescale = asked_for(workers + 1, {each: newest.get(each, of) + 1 for each, of in in_force.items()})
            self._ask(query, rescale)
        return rescale

    def check_join(self) -> None:
        raise UnsupportedError("A job that is rescaled by restarts takes no workers that join. Use lazy or eager.")

    def follow(self, cluster: Cluster) -> Mapping[WorkerId, TransferProgress]:
        """Waits for nothing: only lost workers change the route while a run goes on."""
        del cluster
        return {}

    def _ask(self, query: RescalableQuery, rescale: Rescale) -> None:
        if rescale.workers is not None and query.settings.worker_addresses:
            raise UnsupportedError(
                "This query starts no workers itself, so a restart cannot change their number. Set "
                "anabranch.migration to lazy or eager, and start workers with `anabranch worker --join`."
            )
        _settings_after(query, rescale)  # checks the number
        self._waiting.append(rescale)
        threading.Thread(target=self._restart, args=(query,), name="anabranch-restart", daemon=True).start()

    def _restart(self, query: RescalableQuery) -> None:
        with query.restarting():
            # Several may wait here, in any order: each makes the rescale that was asked for first.
            rescale = self._waiting[0]
            _make(query, rescale)
            with self._asking:
                self._waiting.remove(rescale)


def _make(query: RescalableQuery, rescale: Rescale) -> None:
    if query.is_released:
        rescale.end(RescaleState.FAILED, "The query has ended.")
        return
    rescale.begin(None)
    parallelism = {StageNumber(stage): number for stage, number in rescale.parallelism.items()}
    try:
        query.relaunch(_settings_after(query, rescale), {**query.coordinator.parallelism, **parallelism})
    except Exception as error:
        rescale.end(RescaleState.FAILED, str(error))
    else:
        rescale.end(RescaleState.DONE)


def _settings_after(query: RescalableQuery, rescale: Rescale) -> Settings:
    return replace(query.settings, workers=rescale.workers or query.settings.workers)
