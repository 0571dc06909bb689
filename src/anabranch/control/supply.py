"""Where new workers come from, and those that have been started and wait to be let in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from anabranch.control.members import Member
from anabranch.core.errors import AnabranchError, EpochError
from anabranch.core.ids import WorkerId

logger = logging.getLogger(__name__)


class WorkerSupply(Protocol):
    """Starts and ends workers."""

    @property
    def can_start(self) -> bool:
        """Whether this job starts workers itself."""

    def start(self) -> Member | None:
        """A new worker, ready to take part; None if this job does not start workers itself."""

    def kill(self, worker: WorkerId) -> None:
        """Make sure that a worker which is taken for lost is gone, if that is in our power."""

    def retire(self, worker: WorkerId) -> None:
        """Let a worker go that is not needed any more, if it was started here."""

    def exited(self) -> frozenset[WorkerId]:
        """The workers that are known to have ended."""


class Recruits:
    """Workers on their way into the job. Any thread may call any method."""

    def __init__(self, supply: WorkerSupply, wanted: int, on_failure: Callable[[str], None]) -> None:
        self._supply = supply
        #: Called when a worker could not be started, before that is no longer expected.
        self._on_failure = on_failure
        self._lock = threading.Lock()
        #: How many workers the job should have.
        self.wanted = wanted
        self._ready: list[Member] = []
        self._starting = 0

    @property
    def starting(self) -> int:
        """How many are being started."""
        with self._lock:
            return self._starting

    @property
    def ready(self) -> list[Member]:
        """Those that can be let in."""
        with self._lock:
            return list(self._ready)

    def want(self, wanted: int, present: int) -> None:
        """Have so many workers; those that are missing are started in the background."""
        with self._lock:
            self.wanted = wanted
            missing = wanted - present - self._starting - len(self._ready) if self._supply.can_start else 0
            self._starting += max(0, missing)
        if missing > 0:
            threading.Thread(target=self._start, args=(missing,), name="anabranch-recruit", daemon=True).start()

    def add(self, member: Member) -> None:
        """A worker that came by itself."""
        with self._lock:
            self.wanted += 1
            self._ready.append(member)

    def take(self) -> list[Member]:
        """Let in all that are ready."""
        with self._lock:
            ready, self._ready = self._ready, []
            return ready

    def start_now(self) -> Member:
        """One worker at once, because there is none left."""
        member = self._supply.start()
        if member is None:
            raise EpochError(
                "All workers of anabranch.workerAddresses are lost. Start them again, then the query: it resumes from "
                "its checkpoint."
            )
        return member

    def _start(self, count: int) -> None:
        for _ in range(count):
            self._start_one()

    def _start_one(self) -> None:
        member = None
        try:
            member = self._supply.start()
        except AnabranchError as error:
            logger.warning("a worker could not be started: %s", error)
            self._on_failure(str(error))
        with self._lock:
            self._starting -= 1
            if member is not None:
                self._ready.append(member)
