"""Rescales and the migrations that come of them: what was asked for, and how far state has followed."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from anabranch.core.answers import TransferProgress
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.membership_events import RescaleState
from anabranch.core.reports import MigrationReport, Moves, RescaleReport, as_json
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS

_ON_DEMAND_ONLY = "anabranch.drain is false: only keys that are asked for move, so this does not complete by itself"
#: Migrations that are over are remembered up to this number.
_REMEMBERED = 100
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

    def moves(self) -> Moves:
        return Moves(
            groups_moving=self.groups_moving,
            groups_pending=self.pending,
            rows_fetched=self._moved(lambda told: told.fetched_rows),
            rows_drained=self._moved(lambda told: told.drained_rows),
            bytes_fetched=self._moved(lambda told: told.fetched_bytes),
            bytes_drained=self._moved(lambda told: told.drained_bytes),
            change_ms=self.change_ms,
            seconds=round(time.monotonic() - self.started_s if self.seconds is None else self.seconds, 3),
        )

    def _moved(self, figure: Callable[[TransferProgress], int]) -> int:
        """Rows or bytes that were brought since the migration began."""
        before = {worker: figure(progress) for worker, progress in self.baseline.items()}
        return sum(max(0, figure(progress) - before.get(worker, 0)) for worker, progress in self.latest.items())

    def report(self) -> MigrationReport:
        return MigrationReport(
            **asdict(self.moves()),
            number=self.number,
            strategy=self.strategy,
            route_version=self.route_version,
            first_epoch=self.first_epoch,
            started_at=self.started_at,
            joined=list(self.joined),
            left=list(self.left),
            done=self.seconds is not None,
        )


_NO_MOVES = Moves(
    groups_moving=0,
    groups_pending=0,
    rows_fetched=0,
    rows_drained=0,
    bytes_fetched=0,
    bytes_drained=0,
    change_ms=0,
    seconds=0.0,
)


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
        progress: dict[str, Any] = as_json(self.report())
        return progress

    def report(self) -> RescaleReport:
        with self._changed:
            moves = _NO_MOVES if self._migration is None else self._migration.moves()
            seconds = time.monotonic() - self._asked_s if self._seconds is None else self._seconds
            return RescaleReport(
                **asdict(moves) | {"seconds": round(seconds, 3)},
                number=self.number,
                what=self.what,
                state=self._state,
                message=self._message or self._warning(),
                workers=self.workers,
                parallelism=dict(self.parallelism),
                started_epoch=None if self._migration is None else self._migration.first_epoch,
            )

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


class Migrations:
    """The migrations of a job. Any thread may call any method."""

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

    def reports(self) -> list[MigrationReport]:
        """The migrations, oldest first."""
        with self._lock:
            return [migration.report() for migration in self._all]
