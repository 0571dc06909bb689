"""What can happen to a stream under test, as data: a list of steps is a whole story, and can be generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True)
class Rows:
    """Rows arrive, as one epoch; by the name of their input, if there are several."""

    rows: Sequence[Any] | Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Clock:
    """Processing time passes: that of epochs is this much later from now on, and an epoch without rows runs."""

    seconds: float


@dataclass(frozen=True)
class Watermark:
    """Event time passes: the watermark is at least here from now on, and an epoch without rows runs."""

    to: datetime | int


@dataclass(frozen=True)
class Rescale:
    """The query gets another number of workers, or another parallelism. Waits until all state has moved."""

    workers: int | None = None
    parallelism: int | None = None


@dataclass(frozen=True)
class KillWorker:
    """A state worker is killed, as by ``kill -9``; which one, counted in the order of their ids."""

    number: int = 0


@dataclass(frozen=True)
class Restart:
    """The query stops, and starts again from its checkpoint, with other settings if there are any.

    With ``crash``, all of its workers are killed before, so that nothing but the checkpoint is left of the state.
    """

    crash: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


Step = Rows | Clock | Watermark | Rescale | KillWorker | Restart


def milliseconds(moment: datetime | int) -> int:
    """Turn a moment of event time into milliseconds since 1970. A datetime without a time zone is in UTC."""
    if isinstance(moment, int):
        return moment
    return round(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)
