"""Ownership: the key groups of a job that a worker holds, awaits, and keeps for others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.answers import TransferProgress
from anabranch.core.errors import WorkerError
from anabranch.core.eventtime import EventTime
from anabranch.core.keygroups import key_groups_of
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS
from anabranch.worker.state.rows import Hashes
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.transfer.drain import Drain
from anabranch.worker.transfer.group_transfer import Brought, GroupTransfer
from anabranch.worker.transfer.sources import StateSource

logger = logging.getLogger(__name__)

Variable = tuple[int, str]

#: What counts of the load of earlier epochs, when an epoch begins.
_LOAD_DECAY = 0.8
#: Room is made for this multiple of the rows that seem to come: key groups differ.
_ROOM = 1.1


@dataclass(frozen=True)
class GroupSources:
    """Where the key groups that a worker gains come from."""

    #: Makes the source of a variable's state in the checkpoint, for some key groups.
    checkpoint: Callable[[Variable, Collection[int]], StateSource]
    #: By old owner: makes the source of a variable's state there, and the key groups that come from it.
    peers: Mapping[str, tuple[Callable[[Variable], StateSource], frozenset[int]]] = field(default_factory=dict)
    #: Key groups that need not come: they are in a store that their old owner shares with this worker.
    shared: frozenset[int] = frozenset()


class GroupOwnership:
    """The key groups of one job on one worker. Any thread may call any method."""

    def __init__(
        self, states: Mapping[Variable, VariableState], key_groups: int, scheduler: Scheduler = THREADS
    ) -> None:
        self._states = states
        self._scheduler = scheduler
        self._key_groups = key_groups
        self._lock = scheduler.lock()
        #: Held while groups that are not needed any more are removed, which takes a while.
        self._dropping = scheduler.lock()
        self._groups: frozenset[int] = frozenset()
        #: The same, by key group.
        self._held = np.zeros(key_groups, dtype=np.bool_)
        #: Key groups that others own now and may still read here, each with the epoch as of which it was frozen.
        self._frozen: dict[int, int] = {}
        #: Key groups that could not be removed: something of them is still in the stores, and must not be read.
        self._left_over: frozenset[int] = frozenset()
        self._arriving: dict[Variable, list[GroupTransfer]] = {}
        #: Transfers whose old owner may not have frozen anything yet.
        self._not_yet: list[GroupTransfer] = []
        #: Whether state that its former owner keeps is also brought in the background.
        self.drains_migrations = True
        #: What transfers that are over have brought.
        self._brought = Brought()
        #: By key group: keys asked for lately, and rows that tasks had beyond one for each of them.
        self._load: npt.NDArray[np.float64] = np.zeros(key_groups)
        self._drain = Drain(self._prepare, self._choose, lambda: self._total().drained_rows, scheduler)

    @property
    def groups(self) -> frozenset[int]:
        return self._groups

    @property
    def frozen(self) -> dict[int, int]:
        """Key groups that are kept for others, each with the epoch as of which it was frozen."""
        return dict(self._frozen)

    def assign(
        self, groups: Collection[int], sources: GroupSources, *, freeze_as_of: int | None = None
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Hold exactly these key groups, and begin to bring those that are not here. Returns the gained and the left.

        Those that are left are kept for their new owners if ``freeze_as_of`` is an epoch; else they are forgotten, and
        so are those that were kept before.
        """
        with self._dropping, self._lock:
            wanted = frozenset(groups)
            left, gained = self._groups - wanted, wanted - self._groups
            self._forget(gained & self._left_over)
            self._left_over -= gained
            if freeze_as_of is None:
                self._forget(left | self._frozen.keys())
            else:
                # What comes back within the same epoch is what was frozen; else its owner has changed it since.
                returning = {group for group in gained if group in self._frozen}
                unchanged = {group for group in returning if self._frozen[group] == freeze_as_of}
                self._forget(returning - unchanged)
                gained -= unchanged
                self._frozen = {group: as_of for group, as_of in self._frozen.items() if group not in unchanged}
                self._frozen |= dict.fromkeys(left, freeze_as_of)
            for variable, arriving in self._arriving.items():
                # Their files may be cleaned up from now on; those that the driver names are kept for us.
                for each in arriving:
                    each.redirect(partial(sources.checkpoint, variable))
            self._begin_transfers(gained - sources.shared, sources)
            self._hold(wanted)
        return gained, left

    def give_up(self, groups: Collection[int]) -> None:
        """Forget these key groups. What is on its way for others goes on: their files are used until an assignment."""
        with self._dropping, self._lock:
            given_up = self._groups.intersection(groups)
            self._hold(self._groups - given_up)
            self._forget(given_up)

    def start_drain(self) -> None:
        """Bring what is missing in the background, from now on: all former owners know that they are."""
        self._not_yet = []
        if any(each.pending and self._may_drain(each) for each in self._all()):
            self._drain.start()

    def fetch(self, variable: Variable, hashes: Hashes, keys: Any) -> None:
        """Make sure that the state of these keys is here. Keys of others are refused: they would seem not to exist."""
        groups = key_groups_of(hashes, self._key_groups)
        if not self._held[groups].all():
            strange = int(groups[~self._held[groups]][0])
            raise WorkerError(
                f"Key group {strange} is not held by this worker. The task has an old route: run it again."
            )
        self._load += np.bincount(groups, minlength=self._key_groups)
        for each in self._arriving.get(variable, ()):
            each.fetch(hashes, keys)

    def add_load(self, groups: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        """Note rows of these key groups that tasks have had, besides the keys that they ask for."""
        if len(groups) and (groups.min() < 0 or groups.max() >= self._key_groups):
            raise WorkerError(f"There are only {self._key_groups} key groups. Run the same version everywhere.")
        self._load += np.bincount(groups, weights=rows, minlength=self._key_groups)

    def fetch_frozen(self, variable: Variable, hashes: Hashes, keys: Any, as_of: int) -> None:
        """The same, for a new owner of the keys' groups."""
        self.check_frozen(np.unique(key_groups_of(hashes, self._key_groups)).tolist(), as_of)
        for each in self._arriving.get(variable, ()):
            each.fetch(hashes, keys)

    def fetch_due(self, variable: Variable, groups: Collection[int], event_time: EventTime, up_to: int) -> None:
        """Make sure that all keys of these key groups which have a row that is due are here."""
        self._check_held(groups)
        for each in self._arriving.get(variable, ()):
            each.fetch_due(groups, event_time, up_to)

    def fetch_due_frozen(
        self, variable: Variable, groups: Collection[int], event_time: EventTime, up_to: int, as_of: int
    ) -> None:
        """The same, for a new owner of these groups."""
        self.check_frozen(groups, as_of)
        for each in self._arriving.get(variable, ()):
            each.fetch_due(groups, event_time, up_to)

    def complete(self, variable: Variable, groups: Collection[int] | None = None) -> None:
        """Make sure that these key groups (None: all) are here as a whole."""
        if groups is not None:
            self._check_held(groups)
        for each in self._arriving.get(variable, ()):
            each.drain(each.pending if groups is None else groups)

    def complete_frozen(self, variable: Variable, groups: Collection[int], as_of: int) -> None:
        """The same, for a new owner of these groups."""
        self.check_frozen(groups, as_of)
        for each in self._arriving.get(variable, ()):
            each.drain(groups)

    def complete_all(self) -> None:
        """Bring everything that is missing, now."""
        for variable in self._states:
            self.complete(variable)

    def release(self, kept: Mapping[int, int]) -> None:
        """Forget what was kept for others: key groups, each with the epoch as of which it was frozen. Takes a while."""
        with self._dropping:
            with self._lock:
                released = frozenset(group for group, as_of in kept.items() if self._frozen.get(group) == as_of)
                self._frozen = {group: as_of for group, as_of in self._frozen.items() if group not in released}
                for each in self._all():
                    each.forget(released)
            self._left_over |= released
            self._drop(released)
            self._left_over -= released

    def wait_for_time(self) -> bool:
        """Wait until an epoch has just ended, or none runs; False: nothing more is to be done."""
        return self._drain.wait_for_end_of_epoch()

    def pending(self, variable: Variable) -> frozenset[int]:
        """The key groups of which some state may not have arrived."""
        return frozenset(group for each in self._arriving.get(variable, ()) for group in each.pending)

    def progress(self, assignment: int) -> TransferProgress:
        """How far the transfers of an assignment are, and what they have brought: on demand, and by the drain."""
        with self._lock:
            pending = {group for each in self._all() for group in each.pending}
            total = self._total()
        return TransferProgress(
            assignment=assignment, pending_groups=len(pending), frozen_groups=len(self._frozen), **asdict(total)
        )

    def load(self) -> dict[int, float]:
        """The key groups that were asked for lately, each with how many of its keys, and further rows."""
        return {group: float(self._load[group]) for group in sorted(self._groups) if self._load[group] > 0.5}

    def begin_epoch(self, drain_rows: int) -> None:
        self._load *= _LOAD_DECAY
        self._drain.begin_epoch(drain_rows)
        self.start_drain()

    def end_epoch(self) -> None:
        self._drain.end_epoch()

    def stop(self) -> None:
        """Nothing more is to be done in the background."""
        self._drain.stop()

    def close(self) -> None:
        """End the drain, and keep nothing for others: what they ask for after this is not here."""
        self._frozen = {}
        self._drain.close()

    def _hold(self, groups: frozenset[int]) -> None:
        self._groups = groups
        held = np.zeros(self._key_groups, dtype=np.bool_)
        held[list(groups)] = True
        self._held = held

    def _begin_transfers(self, groups: frozenset[int], sources: GroupSources) -> None:
        rest = groups
        for make_source, offered in sources.peers.values():
            for variable in self._states if rest & offered else ():
                transfer = self._begin_transfer(variable, rest & offered, sources, make_source(variable))
                self._not_yet.append(transfer)
            rest -= offered
        for variable in self._states if rest else ():
            self._begin_transfer(variable, rest, sources)

    def _begin_transfer(
        self, variable: Variable, groups: frozenset[int], sources: GroupSources, peer: StateSource | None = None
    ) -> GroupTransfer:
        checkpoint = partial(sources.checkpoint, variable)
        transfer = GroupTransfer(
            self._states[variable], groups, self._key_groups, checkpoint, peer=peer, scheduler=self._scheduler
        )
        self._arriving.setdefault(variable, []).append(transfer)
        return transfer

    def _forget(self, groups: Collection[int]) -> None:
        if not groups:
            return
        # First of all: what is missing must not be taken for something that does not exist.
        self._frozen = {group: as_of for group, as_of in self._frozen.items() if group not in groups}
        for each in self._all():
            each.forget(groups)
        self._drop(groups)

    def _drop(self, groups: Collection[int]) -> None:
        for state in self._states.values() if groups else ():
            state.drop_groups(groups)

    def check_frozen(self, groups: Collection[int], as_of: int) -> None:
        """Refuse, unless these key groups are kept here as of that epoch."""
        for group in groups:
            if self._frozen.get(group) != as_of:
                raise WorkerError(f"Key group {group} as of epoch {as_of} is not here. Take it from the checkpoint.")

    def _check_held(self, groups: Collection[int]) -> None:
        if not self._held[list(groups)].all():
            raise WorkerError("Some key groups are not held by this worker. The task has an old route: run it again.")

    def _all(self) -> list[GroupTransfer]:
        return [each for of_variable in self._arriving.values() for each in of_variable]

    def _total(self) -> Brought:
        total = Brought(**asdict(self._brought))
        for each in self._all():
            total.add(each.brought)
        return total

    def _prepare(self) -> None:
        """Bring what will be needed next, and make room for all that comes: rows are not copied on the way."""
        for variable, arriving in list(self._arriving.items()):
            begun = [each for each in arriving if self._may_drain(each)]
            for each in begun:
                each.prefetch()
            rows_per_group = max((each.rows_per_group for each in begun), default=0.0)
            if rows_per_group and not all(each.has_room for each in begun):
                groups = sum(len(each.pending) for each in begun)
                for each in begun:
                    each.has_room = True
                self._make_room(variable, int(_ROOM * rows_per_group * groups))

    def _make_room(self, variable: Variable, rows: int) -> None:
        try:
            self._scheduler.in_background(partial(self._states[variable].make_room, rows))
        except (MemoryError, WorkerError) as error:
            # It was an estimate. If it is right, loading a row that has no place will fail and say so.
            logger.warning("no room for %d rows of %s at once: %s", rows, variable[1], error or "not enough memory")

    def _choose(self, count: int) -> tuple[GroupTransfer, list[int]] | None:
        """What the drain brings next: the key groups that are asked for most."""
        with self._lock:
            self._let_go()
            unfinished = [each for each in self._all() if self._may_drain(each)]
            if not unfinished:
                return None
            pending = unfinished[0].pending
        return unfinished[0], sorted(pending, key=lambda group: -self._load[group])[:count]

    def _may_drain(self, arriving: GroupTransfer) -> bool:
        if arriving.is_from_peer and not self.drains_migrations:
            return False
        return arriving not in self._not_yet

    def _let_go(self) -> None:
        """Let go of transfers that are over, and of what they keep of their source."""
        over = [each for each in self._all() if not each.pending]
        for each in over:
            self._brought.add(each.brought)
        for variable, arriving in self._arriving.items():
            self._arriving[variable] = [each for each in arriving if each not in over]
