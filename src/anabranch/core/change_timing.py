"""When epochs come: if they come at regular times, a change can be made between two of them, and none waits for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

#: What a change takes, plans for the epochs after it included; with some to spare.
CHANGE_S = 0.3
#: How much longer the time between two epochs has to be for a change to be left to it: somebody has to notice it.
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
        """How long the epoch took."""
        assert self._begun_s is not None
        self._durations_s.append(now_s - self._begun_s)
        return self._durations_s[-1]

    def note_change(self) -> None:
        self._postponed = 0

    def has_time(self, now_s: float) -> bool:
        """Whether there is time for a change while no epoch runs: until the next one, or as none seems to come."""
        distance_s = self._distance_s()
        if distance_s is None or self._begun_s is None:
            return True
        left_s = self._begun_s + distance_s - now_s
        return left_s > CHANGE_S or left_s < -min(distance_s / 2, LATE_S)

    def postpones(self) -> bool:
        """As an epoch begins: whether to leave a change to the time after it. Not for ever."""
        distance_s = self._distance_s()
        if distance_s is None or not self._durations_s or self._postponed == POSTPONED_MAX:
            return False
        if distance_s - median(self._durations_s) < CHANGE_S + NOTICE_S:
            return False
        self._postponed += 1
        return True

    def _distance_s(self) -> float | None:
        """From one epoch to the next, if that is regular."""
        distances_s = self._distances_s
        if len(distances_s) < _NEEDED or max(distances_s) > REGULAR * min(distances_s):
            return None
        return median(distances_s)
