"""What is wanted of the workers at the next change: rescales, workers that come and go, and those that are lost.

Anybody may leave a wish at any time. The thread that runs epochs takes all of them together, between two epochs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.control.members import Member, Membership
from anabranch.control.rescale import Rescale, RescaleState
from anabranch.control.supply import Recruits, WorkerSupply
from anabranch.core.errors import SettingsError
from anabranch.core.ids import WorkerId


@dataclass(frozen=True)
class Taken:
    """The wishes that one change fulfils."""

    lost: list[WorkerId] = field(default_factory=list)
    newcomers: list[Member] = field(default_factory=list)
    #: Workers that were named to leave.
    leaving: frozenset[WorkerId] = frozenset()
    rescales: list[Rescale] = field(default_factory=list)


class Wishes:
    """Any thread may call any method."""

    def __init__(self, members: Membership, supply: WorkerSupply, key_groups: int) -> None:
        self._members = members
        self._supply = supply
        self._key_groups = key_groups
        self._lock = threading.Lock()
        self.recruits = Recruits(supply, wanted=len(members), on_failure=self._note_failed_start)
        self._lost: set[WorkerId] = set()
        self._leaving: set[WorkerId] = set()
        #: Those that leave with the change that is being made.
        self._going: frozenset[WorkerId] = frozenset()
        self._rescales: list[Rescale] = []

    @property
    def are_ready(self) -> bool:
        """Whether a worker was lost, or all is ready for what was asked for."""
        with self._lock:
            if self._lost:
                return True
            return not self.recruits.starting and bool(self._rescales or self._leaving or self.recruits.ready)

    @property
    def any_lost(self) -> bool:
        with self._lock:
            return bool(self._lost)

    def rescale(self, rescale: Rescale) -> None:
        """Have so many workers; without a number: share the load out anew."""
        wanted = rescale.workers
        with self._lock:
            if wanted is not None:
                self._check_count(wanted)
                if wanted > len(self._members) + len(self.recruits.ready) and not self._supply.can_start:
                    raise SettingsError(
                        f"This query starts no workers itself, so it cannot have {wanted}. Start one with "
                        "`anabranch worker --join HOST:PORT`, with the address of the query's url."
                    )
                self._end([each for each in self._rescales if each.workers is not None], RescaleState.REPLACED)
                self.recruits.want(wanted, len(self._members))
            self._rescales.append(rescale)

    def join(self, member: Member) -> Rescale:
        """Let a worker that was started elsewhere take part."""
        rescale = Rescale(f"worker {member.worker} joins")
        with self._lock:
            self._check_count(self.recruits.wanted + 1)
            if member.worker in {*self._members.workers, *(ready.worker for ready in self.recruits.ready)}:
                raise SettingsError(
                    f"A worker with the id {member.worker!r} takes part already. Start this one with another --id."
                )
            self.recruits.add(member)
            self._rescales.append(rescale)
        return rescale

    def drain(self, worker: WorkerId) -> Rescale:
        """Let a worker hand over all that it has, and leave."""
        rescale = Rescale(f"worker {worker} leaves")
        with self._lock:
            if worker not in self._members.workers:
                known = ", ".join(self._members.workers)
                raise SettingsError(f"There is no worker {worker!r} that could leave. Workers: {known}.")
            if worker not in self._leaving and worker not in self._going:
                if len(self._members) + len(self.recruits.ready) - len(self._leaving) <= 1:
                    raise SettingsError(f"{worker} is the last worker. Add another one first, or stop the query.")
                self._leaving.add(worker)
                self.recruits.wanted = max(1, self.recruits.wanted - 1)
            self._rescales.append(rescale)
        return rescale

    def is_leaving(self, worker: WorkerId) -> bool:
        with self._lock:
            return worker in self._leaving or worker in self._going

    def note_lost(self, worker: WorkerId) -> bool:
        """Whether this is news."""
        with self._lock:
            if worker in self._lost or worker not in self._members.workers:
                return False
            self._lost.add(worker)
            return True

    def is_lost(self, worker: WorkerId) -> bool:
        with self._lock:
            return worker in self._lost

    def take(self) -> Taken:
        """All wishes, to be fulfilled together; rescales only if no worker is still being started for them."""
        with self._lock:
            lost = [worker for worker in self._members.workers if worker in self._lost]
            leaving = self._going = frozenset(self._leaving - self._lost)
            self._lost.clear()
            self._leaving.clear()
            rescales: list[Rescale] = []
            if not self.recruits.starting:
                rescales, self._rescales = self._rescales, []
            return Taken(lost, self.recruits.take(), leaving, rescales)

    def give_back(self, taken: Taken) -> None:
        """A change failed. Lost workers and newcomers have been dealt with."""
        with self._lock:
            self._leaving |= taken.leaving
            self._going = frozenset()
            self._rescales = taken.rescales + self._rescales

    def fulfilled(self) -> None:
        """The change has been made."""
        with self._lock:
            self._going = frozenset()

    def end(self, message: str) -> None:
        """The query has ended, so that nothing is fulfilled any more."""
        with self._lock:
            self._end(list(self._rescales), RescaleState.FAILED, message)

    def _note_failed_start(self, message: str) -> None:
        """The number of workers that was asked for is not reached; whoever comes or goes still does."""
        with self._lock:
            failed = [each for each in self._rescales if each.workers is not None]
            self._end(failed, RescaleState.FAILED, message)
            if failed:  # if it was to replace a lost one, that is tried again with the next change
                self.recruits.wanted = max(1, len(self._members) + len(self.recruits.ready) - len(self._leaving))

    def _end(self, rescales: Sequence[Rescale], state: RescaleState, message: str = "") -> None:
        for rescale in rescales:
            rescale.end(state, message or "A newer rescale came before this one took effect.")
            self._rescales.remove(rescale)

    def _check_count(self, workers: int) -> None:
        if not 1 <= workers <= self._key_groups:
            raise SettingsError(
                f"{workers} workers are not possible: there must be at least 1, and at most {self._key_groups}, as "
                "many as the job has key groups."
            )
