"""The migrations of a job: which changes of the route have been made, and how far state has followed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from anabranch.control.membership.rescale import Migration, Rescale
from anabranch.core.answers import TransferProgress
from anabranch.core.ids import WorkerId
from anabranch.core.membership_events import RescaleState
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS

#: Of those that are over, so many are remembered.
_REMEMBERED = 100


class Migrations:
    """Any thread may call any method."""

    def __init__(self, scheduler: Scheduler = THREADS) -> None:
        self._lock = scheduler.lock()
        self._all: deque[Migration] = deque(maxlen=_REMEMBERED)
        #: Rescales whose state is on its way, each with the number of its migration.
        self._handles: list[tuple[int, Rescale]] = []

    @property
    def is_under_way(self) -> bool:
        with self._lock:
            return any(migration.seconds is None for migration in self._all)

    def begin(self, migration: Migration, handles: Collection[Rescale]) -> None:
        """The route has changed. Migrations that were under way go on, towards the new owners."""
        with self._lock:
            self._all.append(migration)
            self._handles += [(migration.number, handle) for handle in handles]
            for each in self._all:
                if each.seconds is None:
                    each.latest.clear()
        for handle in handles:
            handle.begin(migration)

    def note(self, worker: WorkerId, progress: TransferProgress) -> None:
        """What a worker says. What it said before the last change is no news."""
        with self._lock:
            if not self._all or progress.assignment != self._all[-1].number:
                return
            for migration in self._all:
                if migration.seconds is None:
                    migration.latest[worker] = progress

    def finish(self, number: int) -> None:
        """All state has arrived that was on its way since the migration with this number, or before it."""
        with self._lock:
            for migration in self._all:
                if migration.number <= number:
                    migration.finish()
            done = [handle for of, handle in self._handles if of <= number]
            self._handles = [(of, handle) for of, handle in self._handles if of > number]
        for handle in done:
            handle.end(RescaleState.DONE)

    def fail(self, message: str) -> None:
        """The query ends before all state has arrived."""
        with self._lock:
            handles, self._handles = self._handles, []
        for _, handle in handles:
            handle.end(RescaleState.FAILED, message)

    def to_json(self) -> list[dict[str, Any]]:
        with self._lock:
            return [migration.to_json() for migration in self._all]
