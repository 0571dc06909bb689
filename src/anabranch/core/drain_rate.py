"""How fast state may be brought in the background: as fast as epochs stay about as short as they were before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

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
_REMEMBERED = 15


@dataclass
class DrainRate:
    """Follows the durations of epochs; ``rows`` is what a worker may bring during the next one."""

    rows: int = ROWS_AT_FIRST
    _usual_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def usual_ms(self) -> float | None:
        """How long an epoch takes while nothing is brought; None if that is not known."""
        return median(self._usual_ms) if self._usual_ms else None

    def note_usual(self, duration_ms: float) -> None:
        """An epoch during which nothing was brought."""
        self._usual_ms.append(duration_ms)
        self.rows = ROWS_AT_FIRST

    def note_busy(self, duration_ms: float) -> None:
        """An epoch during which state was brought."""
        usual = self.usual_ms
        if usual is None:
            return
        if duration_ms > TOO_LONG * usual:
            self.rows = max(ROWS_MIN, int(self.rows * SLOWER))
        elif duration_ms < NOT_LONG * usual:
            self.rows = min(ROWS_MAX, int(self.rows * FASTER))
