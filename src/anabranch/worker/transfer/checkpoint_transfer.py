"""Adoption: key groups that are served at once, while their state is still on its way.

Keys are divided into slots by their hash. Before a key is read or written, its slot is fetched from the origin: every
key in it, so that a key which the origin does not know is known not to exist. A drain brings the rest, group by group.
Nothing local can be older than what a fetch brings, because no key is written before its slot has been fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.eventtime import EventTime
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS
from anabranch.worker.state.key_set import KeySet
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.transfer.sources import Flags, Hashes, Origin, Selection, slots_of

_SLOTS_MIN, _SLOTS_MAX = 1 << 12, 1 << 22

#: Makes the origin of a variable's state in the checkpoint, for some key groups.
MakeOrigin = Callable[[Collection[int]], Origin]


@dataclass
class Brought:
    """What adoptions have brought, on demand and by the drain."""

    fetched_rows: int = 0
    fetched_bytes: int = 0
    drained_rows: int = 0
    drained_bytes: int = 0

    def note_fetched(self, parts: Iterable[pa.Table]) -> None:
        for part in parts:
            self.fetched_rows += len(part)
            self.fetched_bytes += part.nbytes

    def note_drained(self, parts: Iterable[pa.Table]) -> None:
        for part in parts:
            self.drained_rows += len(part)
            self.drained_bytes += part.nbytes

    def add(self, other: Brought) -> None:
        self.fetched_rows += other.fetched_rows
        self.fetched_bytes += other.fetched_bytes
        self.drained_rows += other.drained_rows
        self.drained_bytes += other.drained_bytes


class CheckpointTransfer:
    """The key groups of one variable that came from one origin. Any thread may call any method."""

    def __init__(
        self,
        state: VariableState,
        origin: Origin,
        groups: Collection[int],
        key_groups: int,
        known: KeySet | None = None,
        scheduler: Scheduler = THREADS,
    ) -> None:
        self._state = state
        self._origin = origin
        #: Keys that are here already, and may be newer than what the origin has.
        self._known = known
        #: By key group: whether some of its state may not have arrived yet.
        self._pending: Flags = np.zeros(key_groups, dtype=np.bool_)
        self._pending[list(groups)] = True
        #: By slot: whether all of its keys have arrived.
        self._fetched: Flags = np.zeros(_slots_for(origin.rows), dtype=np.bool_)
        #: Held while state is brought: who needs a slot that another thread is bringing waits for it.
        self._bringing = scheduler.lock()
        self.brought = Brought()
        #: Keys in what the drain brought last; and whether room has been made for all that is to come.
        self.rows_per_group = 0.0
        self.has_room = False

    @property
    def pending(self) -> list[int]:
        """The key groups that have not arrived completely."""
        return [int(group) for group in np.flatnonzero(self._pending)]

    def fetch(self, hashes: Hashes, _keys: Any = None) -> None:
        """Bring the state of these keys, as far as it is of these key groups and not there yet."""
        slots = self._missing(hashes)
        if not len(slots):
            return
        with self._bringing:
            slots = self._missing(hashes)  # another thread may have brought some meanwhile
            if len(slots):
                wanted = np.zeros(len(self._fetched), dtype=np.bool_)
                wanted[slots] = True
                self.brought.note_fetched(self._bring(Selection(self._pending, wanted)))
                self._fetched[slots] = True

    def fetch_due(self, groups: Collection[int], event_time: EventTime, up_to: int) -> None:
        """Bring the state of all keys of these key groups that have a row which is due, as far as it is not there."""
        chosen = self._chosen(groups)
        if chosen.any():
            with self._bringing:
                due = self._origin.due(chosen, event_time, up_to)
            self.fetch(due)

    def prefetch(self) -> None:
        """Files do not tell which keys will be needed next."""

    def drain(self, groups: Collection[int], *, can_wait: bool = False) -> None:  # noqa: ARG002
        """Bring all that is missing of these key groups."""
        if not self._pending[list(groups)].any():
            return
        with self._bringing:
            chosen = self._chosen(groups)
            if chosen.any():
                parts = self._bring(Selection(chosen, ~self._fetched))
                self.brought.note_drained(parts)
                self.rows_per_group = _keys_in(parts) / np.count_nonzero(chosen)
                self._pending &= ~chosen

    def redirect(self, make_origin: MakeOrigin) -> None:
        """Take what is missing from elsewhere: the same state, as nobody has changed it since."""
        with self._bringing:
            self._origin = make_origin(self.pending)

    def forget(self, groups: Collection[int]) -> None:
        """These key groups belong to somebody else now."""
        with self._bringing:
            self._pending[list(groups)] = False

    def _chosen(self, groups: Collection[int]) -> Flags:
        """Those of the key groups that have not arrived completely."""
        chosen: Flags = np.zeros(len(self._pending), dtype=np.bool_)
        chosen[list(groups)] = True
        return chosen & self._pending

    def _missing(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        if not self._pending.any():
            return np.empty(0, dtype=np.int64)
        mine = hashes[self._pending[key_groups_of(hashes, len(self._pending))]]
        slots = slots_of(mine, len(self._fetched))
        return np.unique(slots[~self._fetched[slots]])

    def _bring(self, selection: Selection) -> list[pa.Table]:
        # All or nothing: a row whose removal could not be read would stay, if the next origin knows neither.
        parts = list(self._origin.select(selection))
        if self._known is not None:
            parts = [self._known.without(changes) for changes in parts]
        for changes in parts:
            self._state.load(changes)
        return parts


def _keys_in(parts: Collection[pa.Table]) -> int:
    """How many keys there are in changes, in which a key may occur many times."""
    return len(np.unique(np.concatenate([part.column(HASH).to_numpy() for part in parts]))) if parts else 0


def _slots_for(rows: int) -> int:
    """Twice as many as rows, so that fetching a key brings hardly any other with it."""
    slots = 1 << max(0, 2 * rows - 1).bit_length()
    return min(max(slots, _SLOTS_MIN), _SLOTS_MAX)
