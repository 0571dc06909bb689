"""Where new workers come from."""

from __future__ import annotations

from typing import Protocol

from anabranch.control.membership.members import Member
from anabranch.core.ids import WorkerId


class WorkerPool(Protocol):
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
