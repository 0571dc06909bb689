"""Pacing: what the driver does beside epochs, at times and at a rate at which epochs hardly notice it.

ChangeTiming finds the time for a change between two epochs that come regularly; DrainRate says how much state may be
brought in the background while epochs stay about as short as they were before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

#: What a change takes, plans for the epochs after it included; with some to spare.
CHANGE_S = 0.3
#: How much longer the time between two epochs has to be for a change to be left to it: the driver has to notice it.
NOTICE_S = 0.2
#: An epoch that has not come so long after its time is not waited for.
LATE_S = 1.0
#: Epochs are regular if their longest distance is no more than so many times the shortest.
REGULAR = 1.25
#: Distances that tell, and how many of them are needed.
_REMEMBERED, _NEEDED = 5, 3
#: How often a change is left to the time after the epoch, before it is made whatever that costs.
POSTPONED_MAX = 2


@dataclass
class ChangeTiming:
    """Follows the beginnings and ends of epochs, on any clock that only goes forward."""

    _begun_s: float | None = None
    _distances_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _postponed: int = 0

    def begin(self, now_s: float) -> None:
        if self._begun_s is not None:
            self._distances_s.append(now_s - self._begun_s)
        self._begun_s = now_s

    def end(self, now_s: float) -> float:
        """Notes the end of an epoch, and returns how long it took."""
        assert self._begun_s is not None
        self._durations_s.append(now_s - self._begun_s)
        return self._durations_s[-1]

    def note_change(self) -> None:
        self._postponed = 0

    def has_time(self, now_s: float) -> bool:
        """Tells whether there is time for a change while no epoch runs: before the next one, or as none comes."""
        distance_s = self._distance_s()
        if distance_s is None or self._begun_s is None:
            return True
        left_s = self._begun_s + distance_s - now_s
        return left_s > CHANGE_S or left_s < -min(distance_s / 2, LATE_S)

    def postpones(self) -> bool:
        """Tells, as an epoch begins, whether to leave a change to the time after it; at most POSTPONED_MAX times."""
        distance_s = self._distance_s()
        if distance_s is None or not self._durations_s or self._postponed == POSTPONED_MAX:
            return False
        if distance_s - median(self._durations_s) < CHANGE_S + NOTICE_S:
            return False
        self._postponed += 1
        return True

    def _distance_s(self) -> float | None:
        """Returns the time from one epoch to the next; None if it is not regular."""
        distances_s = self._distances_s
        if len(distances_s) < _NEEDED or max(distances_s) > REGULAR * min(distances_s):
            return None
        return median(distances_s)


#: Rows that a worker may bring during one epoch: at first, and at least. As it is never 0, every migration ends.
ROWS_AT_FIRST = 20_000
ROWS_MIN = 2_000
ROWS_MAX = 10_000_000
#: An epoch that took this many times as long as usual was too long; up to this many times, it was not long at all.
TOO_LONG = 1.2
NOT_LONG = 1.08
#: How the rows change after such an epoch.
SLOWER, FASTER = 0.5, 1.5
#: Epochs that tell how long an epoch usually takes.
_USUAL_REMEMBERED = 15


@dataclass
class DrainRate:
    """Follows the durations of epochs; ``rows`` is what a worker may bring during the next one."""

    rows: int = ROWS_AT_FIRST
    _usual_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL_REMEMBERED))

    @property
    def usual_ms(self) -> float | None:
        """The time that an epoch takes while nothing is brought; None if that is not known."""
        return median(self._usual_ms) if self._usual_ms else None

    def note_usual(self, duration_ms: float) -> None:
        """Notes an epoch during which nothing was brought."""
        self._usual_ms.append(duration_ms)
        self.rows = ROWS_AT_FIRST

    def note_busy(self, duration_ms: float) -> None:
        """Notes an epoch during which state was brought."""
        usual = self.usual_ms
        if usual is None:
            return
        if duration_ms > TOO_LONG * usual:
            self.rows = max(ROWS_MIN, int(self.rows * SLOWER))
        elif duration_ms < NOT_LONG * usual:
            self.rows = min(ROWS_MAX, int(self.rows * FASTER))
