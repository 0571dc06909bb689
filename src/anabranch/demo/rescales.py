"""The rescales of a run, whoever asked for them: when they were asked for, how far they are, and what has moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_UNDER_WAY = ("waiting", "migrating")


class Handle(Protocol):
    """As much of a rescale's handle as is looked at."""

    @property
    def number(self) -> int: ...

    def progress(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RescaleFigures:
    """A rescale at one moment."""

    number: int
    what: str
    state: str
    #: Why it failed, or what came in its place.
    message: str
    #: In milliseconds since 1970.
    asked_ms: int
    #: None while it goes on.
    ended_ms: int | None
    #: The first epoch with the new route; None before it, and where everything was started again.
    first_epoch: int | None
    groups_moving: int
    groups_pending: int
    rows_fetched: int
    rows_drained: int
    bytes_fetched: int
    bytes_drained: int
    #: How long the change of the route held up its first epoch.
    change_ms: int

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    def seconds(self, now_ms: int) -> float:
        """How long it took, or has taken so far."""
        return ((now_ms if self.ended_ms is None else self.ended_ms) - self.asked_ms) / 1000


class RescaleWatch:
    """Follows each rescale that it is shown to its end, also when others are asked for meanwhile."""

    def __init__(self, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._handles: dict[int, Handle] = {}
        self._figures: dict[int, RescaleFigures] = {}

    def look(self, handle: Handle | None) -> tuple[RescaleFigures, ...]:
        """All that were seen so far, the oldest first; `handle` is the one that was asked for last."""
        if handle is not None:
            self._handles.setdefault(handle.number, handle)
        for number, each in self._handles.items():
            known = self._figures.get(number)
            if known is None or known.ended_ms is None:
                self._figures[number] = _figures(each.progress(), self._clock_s(), known)
        return tuple(self._figures[number] for number in sorted(self._figures))


def _figures(progress: Mapping[str, Any], now_s: float, known: RescaleFigures | None) -> RescaleFigures:
    taken_ms = round(progress["seconds"] * 1000)
    # The seconds of a rescale that has ended stand still, so they tell when it began only while it goes on; of one that
    # begins and ends between two looks, this is the latest that it can have been.
    asked_ms = round(now_s * 1000) - taken_ms if known is None else known.asked_ms
    ended_ms = None if progress["state"] in _UNDER_WAY else asked_ms + taken_ms
    return RescaleFigures(
        number=progress["number"],
        what=progress["what"],
        state=progress["state"],
        message=progress["message"],
        asked_ms=asked_ms,
        ended_ms=ended_ms,
        first_epoch=progress["startedEpoch"],
        groups_moving=progress["groupsMoving"],
        groups_pending=progress["groupsPending"],
        rows_fetched=progress["rowsFetched"],
        rows_drained=progress["rowsDrained"],
        bytes_fetched=progress["bytesFetched"],
        bytes_drained=progress["bytesDrained"],
        change_ms=progress["changeMs"],
    )
