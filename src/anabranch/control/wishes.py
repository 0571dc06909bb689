"""What is wanted of the workers at the next change: rescales, workers that come and go, and those that are lost.

Anybody may leave a wish at any time. The thread that runs epochs takes all of them together, between two epochs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.control.members import Member, Membership
from anabranch.control.rescale import Rescale, RescaleState, asked_for, parallelism_after
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

    def __init__(self, members: Membership, supply: WorkerSupply, key_groups: int, *, can_leave: bool = True) -> None:
        self._members = members
        #: Whether all that a worker has moves to others, so that it can leave.
        self._can_leave = can_leave
        self._supply = supply
        self._key_groups = key_groups
        self._lock = threading.Lock()
        self.recruits = Recruits(supply, wanted=len(members), on_failure=self._note_failed_start)
        self._lost: set[WorkerId] = set()
        self._leaving: set[WorkerId] = set()
        #: Those that leave with the change that is being made.
        self._going: frozenset[WorkerId] = frozenset()
        self._rescales: list[Rescale] = []
        #: The parallelism of stages that changes have set: those that were made, and the one that is being made.
        self._set_before: dict[int, int] = {}
        self._being_set: dict[int, int] = {}

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
        with self._lock:
            self._add(rescale)

    def scale_out(self, in_force: Mapping[int, int]) -> Rescale:
        """One worker more than was asked for last, and one task more for each of these stages, given how many it has.

        All of it at once: whoever asks at the same time gets one more than that.
        """
        with self._lock:
            newest = {**self._set_before, **self._being_set, **parallelism_after(self._rescales)}
            more = {stage: newest.get(stage, tasks) + 1 for stage, tasks in in_force.items()}
            rescale = asked_for(self.recruits.wanted + 1, more)
            self._add(rescale)
        return rescale

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
            self._check_leaving()
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
            self._being_set = parallelism_after(rescales)
            return Taken(lost, self.recruits.take(), leaving, rescales)

    def give_back(self, taken: Taken) -> None:
        """A change failed. Lost workers and newcomers have been dealt with."""
        with self._lock:
            self._leaving |= taken.leaving
            self._going = frozenset()
            self._being_set = {}
            self._rescales = taken.rescales + self._rescales

    def fulfilled(self) -> None:
        """The change has been made."""
        with self._lock:
            self._going = frozenset()
            self._set_before |= self._being_set
            self._being_set = {}

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

    def _add(self, rescale: Rescale) -> None:
        wanted = rescale.workers
        if wanted is not None:
            self._check_count(wanted)
            if wanted < self.recruits.wanted:
                self._check_leaving()
            if wanted > len(self._members) + len(self.recruits.ready) and not self._supply.can_start:
                raise SettingsError(
                    f"This query starts no workers itself, so it cannot have {wanted}. Start one with "
                    "`anabranch worker --join HOST:PORT`, with the address of the query's url."
                )
            # Only the number of workers is replaced: the parallelism of a stage stays wanted.
            replaced = [each for each in self._rescales if each.workers is not None]
            newest = parallelism_after(self._rescales)
            rescale.take_over({stage: newest[stage] for stage in parallelism_after(replaced)})
            self._end(replaced, RescaleState.REPLACED)
            self.recruits.want(wanted, len(self._members))
        self._rescales.append(rescale)

    def _end(self, rescales: Sequence[Rescale], state: RescaleState, message: str = "") -> None:
        for rescale in rescales:
            rescale.end(state, message or "A newer rescale came before this one took effect.")
            self._rescales.remove(rescale)

    def _check_leaving(self) -> None:
        if not self._can_leave:
            raise SettingsError(
                "No worker can leave while anabranch.drain is false: it would have to keep the state that nobody has "
                "asked for. Start the query again with anabranch.drain=true, or with the workers that it is to have."
            )

    def _check_count(self, workers: int) -> None:
        if not 1 <= workers <= self._key_groups:
            raise SettingsError(
                f"{workers} workers are not possible: there must be at least 1, and at most {self._key_groups}, as "
                "many as the job has key groups."
            )
