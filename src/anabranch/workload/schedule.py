"""When each event arrives, and how far a reader may go: pure functions of positions and the time of day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from anabranch.core.errors import CheckpointError
from anabranch.workload.draws import Integers

_MICROS = 1_000_000


@dataclass(frozen=True)
class Schedule:
    """The arrival times of events: event origin_row comes at origin_us, and the others at an even pace."""

    origin_row: int
    #: Microseconds since 1970 in UTC.
    origin_us: int
    #: 0 means that all events come at once, at origin_us.
    rows_per_second: float

    def times_us(self, first: int, count: int) -> Integers:
        """Return the arrival times of events first .. first + count - 1."""
        if self.rows_per_second == 0:
            return np.full(count, self.origin_us, dtype=np.int64)
        passed = np.arange(first - self.origin_row, first - self.origin_row + count, dtype=np.float64)
        passed *= _MICROS
        passed /= self.rows_per_second
        return np.floor(passed).astype(np.int64) + self.origin_us

    def due(self, now_us: int) -> int:
        """Return the number of the first event that has not arrived by now. Only for schedules with a pace."""
        if now_us < self.origin_us:
            return self.origin_row
        return self.origin_row + int((now_us - self.origin_us) * self.rows_per_second / _MICROS) + 1


@dataclass(frozen=True)
class Position:
    """The number of the next event to read, and the schedule of the events just before it: a stream's offset.

    The schedule travels in the offsets so that events that are read again, by another process at another time, carry
    the arrival times that they had at first.
    """

    row: int
    schedule: Schedule

    def to_json(self) -> dict[str, int | float]:
        return {"row": self.row, **asdict(self.schedule)}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Position:
        try:
            schedule = Schedule(
                int(document["origin_row"]), int(document["origin_us"]), float(document["rows_per_second"])
            )
            return Position(int(document["row"]), schedule)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{dict(document)} is not an offset of the anabranch.workload source. Start the query with the "
                "checkpoint that belongs to it, or with a new one."
            ) from error


@dataclass(frozen=True)
class StreamPace:
    """How fast a stream is meant to go: by rows a second, or by rows an epoch. One of the two is given."""

    rows_per_second: float | None = None
    rows_per_epoch: int | None = None
    #: The stream ends before this event.
    rows: int | None = None

    def beginning(self, now_us: int) -> Position:
        return Position(0, Schedule(0, now_us, self.rows_per_second or 0.0))

    def next_position(self, start: Position, *, now_us: int, rows_max: int | None = None) -> Position:
        """Return the end of the epoch that begins at start; start itself when there is nothing to read."""
        if self.rows_per_epoch is not None:
            schedule = Schedule(start.row, now_us, 0.0)
            end = start.row + self.rows_per_epoch
        else:
            schedule = self._continued(start, now_us)
            end = schedule.due(now_us)
            if rows_max is not None:
                end = min(end, start.row + rows_max)
        if self.rows is not None:
            end = min(end, self.rows)
        return start if end <= start.row else Position(end, schedule)

    def _continued(self, start: Position, now_us: int) -> Schedule:
        """Return the schedule of the events from start on.

        A new rate does not touch the events before it, nor skip any time.
        """
        rate = self.rows_per_second or 0.0
        former = start.schedule
        if former.rows_per_second == rate:
            return former
        since_us = now_us if former.rows_per_second == 0 else int(former.times_us(start.row, 1)[0])
        return Schedule(start.row, since_us, rate)
