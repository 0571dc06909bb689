"""What a job's worker does out of the way of epochs: it merges layers into stores, and drops what others have now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from anabranch.runtime.scheduler import Future, Scheduler
from anabranch.worker.transfer.group_ownership import GroupOwnership

logger = logging.getLogger(__name__)

#: Layers that may wait to be merged before a new epoch has to wait for it.
_MAX_UNFOLDED = 3


class BackgroundWork:
    """The work of one job. The error of a merge comes to light when the next epoch begins."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._folds = scheduler.line("fold")
        self._releases = scheduler.line("release", stands_back=True)
        self._unfinished_folds: list[Future[None]] = []

    def fold(self, fold: Callable[[], None]) -> None:
        """Merges a layer, after those before it."""
        self._unfinished_folds.append(self._folds.submit(fold))

    def settle_folds(self) -> None:
        """Waits until few merges are left; raises the error of one that has failed."""
        waiting = self._unfinished_folds[:-_MAX_UNFOLDED]
        for fold in [each for each in self._unfinished_folds if each.done() or each in waiting]:
            fold.result()
        self._unfinished_folds = [fold for fold in self._unfinished_folds if not fold.done()]

    def forget_folds(self) -> None:
        """Forgets the merges that are under way: they are of state that is gone."""
        self._unfinished_folds = []

    def release(self, ownership: GroupOwnership) -> None:
        """Drops the key groups that are kept for others now. Of all requests, only the next assignment waits for it."""
        kept = ownership.frozen
        self._releases.submit(lambda: _release(ownership, kept))

    def close(self) -> None:
        """Waits for all of it; there is no more."""
        self._folds.close()
        self._releases.close()


def _release(ownership: GroupOwnership, kept: Mapping[int, int]) -> None:
    try:
        if ownership.wait_for_time():
            ownership.release(kept)
    except Exception:
        logger.exception("key groups that others have now still take memory here, until they come back or the job ends")
