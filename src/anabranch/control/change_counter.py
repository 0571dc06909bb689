"""Looking at all workers while key groups change hands would see some twice, and some not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS


class ChangeCounter:
    """Counts changes, so that whoever looked during one can look again. Nobody who changes anything waits."""

    def __init__(self, scheduler: Scheduler = THREADS) -> None:
        self._changed = scheduler.condition()
        self._under_way = 0
        self._count = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self._changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._count += 1
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> int:
        """Wait until no change is under way, for so long at most; a number that tells whether one came since."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, timeout_s)
            return self._count

    def wait_for_change(self, count: int, timeout_s: float) -> bool:
        """Wait until something has changed since ``wait`` gave this number, for so long at most; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way and self._count != count, timeout_s)

    def held_since(self, count: int) -> bool:
        """Whether nothing has changed since ``wait`` gave this number."""
        with self._changed:
            return not self._under_way and self._count == count
