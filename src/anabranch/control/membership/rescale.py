"""Rescales: what was asked for, and how far it is."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.core.answers import TransferProgress
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.membership_events import RescaleState

_ON_DEMAND_ONLY = "anabranch.drain is false: only keys that are asked for move, so this does not complete by itself"
_ENDED = (RescaleState.DONE, RescaleState.FAILED, RescaleState.REPLACED)


@dataclass
class Migration:
    """One change of the route, from its first epoch until all state has arrived."""

    number: int
    strategy: str
    route_version: int
    first_epoch: Epoch
    groups_moving: int
    joined: tuple[WorkerId, ...]
    left: tuple[WorkerId, ...]
    #: What each worker had brought before.
    baseline: Mapping[WorkerId, TransferProgress] = field(default_factory=dict)
    #: What each worker says last.
    latest: dict[WorkerId, TransferProgress] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    seconds: float | None = None
    #: How long the change itself held up the epoch that it came before.
    change_ms: int = 0
    #: Whether state moves in the background as well; else only what is asked for does, and this never ends.
    drains: bool = True

    @property
    def pending(self) -> int:
        """Key groups that have not arrived; as many as move, while nobody has told."""
        if self.seconds is not None:
            return 0
        if not self.latest:
            return self.groups_moving
        return sum(progress.pending_groups for progress in self.latest.values())

    def finish(self) -> None:
        if self.seconds is None:
            self.seconds = time.monotonic() - self.started_s

    def moved(self, figure: Callable[[TransferProgress], int]) -> int:
        """Rows or bytes that were brought since the migration began."""
        before = {worker: figure(progress) for worker, progress in self.baseline.items()}
        return sum(max(0, figure(progress) - before.get(worker, 0)) for worker, progress in self.latest.items())

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "strategy": self.strategy,
            "routeVersion": self.route_version,
            "firstEpoch": int(self.first_epoch),
            "startedAt": self.started_at,
            "joined": list(self.joined),
            "left": list(self.left),
            "groupsMoving": self.groups_moving,
            "groupsPending": self.pending,
            "rowsFetched": self.moved(lambda told: told.fetched_rows),
            "rowsDrained": self.moved(lambda told: told.drained_rows),
            "bytesFetched": self.moved(lambda told: told.fetched_bytes),
            "bytesDrained": self.moved(lambda told: told.drained_bytes),
            "changeMs": self.change_ms,
            "seconds": round(time.monotonic() - self.started_s if self.seconds is None else self.seconds, 3),
            "done": self.seconds is not None,
        }


@dataclass(frozen=True)
class Change:
    """What was done between two epochs about workers that came, left or were lost, for progress reports."""

    lost: tuple[WorkerId, ...]
    started: tuple[WorkerId, ...]
    left: tuple[WorkerId, ...]
    key_groups: int
    route_version: int
    duration_ms: int
    #: The rescales that took effect.
    rescales: tuple[Rescale, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "lost": list(self.lost),
            "started": list(self.started),
            "left": list(self.left),
            "keyGroups": self.key_groups,
            "routeVersion": self.route_version,
            "durationMs": self.duration_ms,
        }


def asked_for(workers: int | None, parallelism: Mapping[int, int]) -> Rescale:
    """A rescale to so many workers, and to the parallelism of these stages; with neither, to share the load anew."""
    parts = [f"{workers} workers"] if workers is not None else []
    parts += _in_words(parallelism)
    return Rescale(", ".join(parts) or "share the load anew", workers=workers, parallelism=parallelism)


def _in_words(parallelism: Mapping[int, int]) -> list[str]:
    return [f"parallelism {number} of stage {stage}" for stage, number in parallelism.items()]


def parallelism_after(rescales: Iterable[Rescale]) -> dict[int, int]:
    """Of the stages that these rescales name, one after the other."""
    return {stage: number for rescale in rescales for stage, number in rescale.parallelism.items()}


class Rescale:
    """The handle of a rescale. Any thread may call any method."""

    _numbers = itertools.count(1)

    def __init__(self, what: str, *, workers: int | None = None, parallelism: Mapping[int, int] | None = None) -> None:
        self.number = next(Rescale._numbers)
        self.what = what
        self.workers = workers
        self.parallelism = dict(parallelism or {})
        self._changed = threading.Condition()
        self._state = RescaleState.WAITING
        self._message = ""
        self._migration: Migration | None = None
        self._asked_s = time.monotonic()
        self._seconds: float | None = None

    @property
    def state(self) -> RescaleState:
        with self._changed:
            return self._state

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the rescale has ended, for so many seconds at most; whether it is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._state in _ENDED, timeout)
            return self._state is RescaleState.DONE

    def progress(self) -> dict[str, Any]:
        """How far it is: its state, what moves, and what has been moved, on demand and in the background."""
        with self._changed:
            migration = self._migration.to_json() if self._migration is not None else {}
            seconds = time.monotonic() - self._asked_s if self._seconds is None else self._seconds
            return {
                "number": self.number,
                "what": self.what,
                "state": str(self._state),
                "message": self._message or self._warning(),
                "workers": self.workers,
                "parallelism": {str(stage): number for stage, number in self.parallelism.items()},
                "startedEpoch": migration.get("firstEpoch"),
                "groupsMoving": migration.get("groupsMoving", 0),
                "groupsPending": migration.get("groupsPending", 0),
                "rowsFetched": migration.get("rowsFetched", 0),
                "rowsDrained": migration.get("rowsDrained", 0),
                "bytesFetched": migration.get("bytesFetched", 0),
                "bytesDrained": migration.get("bytesDrained", 0),
                "changeMs": migration.get("changeMs", 0),
                "seconds": round(seconds, 3),
            }

    def _warning(self) -> str:
        """Why it will not be done, if that is so."""
        migration = self._migration
        is_endless = migration is not None and not migration.drains and migration.pending > 0
        return _ON_DEMAND_ONLY if is_endless and self._state is RescaleState.MIGRATING else ""

    def take_over(self, parallelism: Mapping[int, int]) -> None:
        """Do also what rescales that this one replaces were to do, unless it says otherwise itself."""
        with self._changed:
            added = {stage: number for stage, number in parallelism.items() if stage not in self.parallelism}
            self.parallelism |= added
            self.what = ", ".join([self.what, *_in_words(added)])

    def begin(self, migration: Migration | None) -> None:
        """It has taken effect; None: nothing has to move."""
        with self._changed:
            if self._state is RescaleState.WAITING:
                self._migration = migration
                self._set(RescaleState.MIGRATING)

    def end(self, state: RescaleState, message: str = "") -> None:
        with self._changed:
            if self._state not in _ENDED:
                self._message = message
                self._seconds = time.monotonic() - self._asked_s
                self._set(state)

    def _set(self, state: RescaleState) -> None:
        self._state = state
        self._changed.notify_all()
