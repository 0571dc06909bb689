"""Merges of layers into the stores of a job, one after the other in the background."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.runtime.scheduler import Future, Scheduler

#: Layers that may wait for the background fold before a new epoch has to wait for it.
_MAX_UNFOLDED = 3


class Folds:
    """What is being merged. An error comes to light when the next epoch begins."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._line = scheduler.line("fold")
        self._under_way: list[Future[None]] = []

    def add(self, fold: Callable[[], None]) -> None:
        self._under_way.append(self._line.submit(fold))

    def settle(self) -> None:
        """Waits until few are left; raises the error of one that has failed."""
        waiting = self._under_way[:-_MAX_UNFOLDED]
        for fold in [each for each in self._under_way if each.done() or each in waiting]:
            fold.result()
        self._under_way = [fold for fold in self._under_way if not fold.done()]

    def forget(self) -> None:
        """Those under way are of state that is gone."""
        self._under_way = []

    def close(self) -> None:
        """Waits for all of them; there are no more."""
        self._line.close()
