"""Migration: adoption of key groups from their former owner, key by key when they are needed, and in the background.

The former owner's copy is frozen, so reading it races with nobody. A key that was fetched is *known*: what is here of
it may be newer than what the former owner has, so a drain leaves it alone. If the former owner fails, the checkpoint,
which has the same state, takes its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.errors import AnabranchError
from anabranch.core.eventtime import FIRST_TIME, LAST_TIME, EventTime
from anabranch.core.gather import gathered
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.transfer.checkpoint_transfer import Brought, CheckpointTransfer, MakeOrigin
from anabranch.worker.transfer.sources import Flags, Hashes

logger = logging.getLogger(__name__)

#: Rows that are loaded at a time: a fetch waits for no longer than this takes.
_ROWS_PER_LOAD = 1 << 13


class FrozenSource(Protocol):
    """The frozen state of one variable, elsewhere."""

    def fetch(self, keys: Any) -> Iterator[pa.Table]:
        """All entries of these keys, as changes. A key without any does not exist."""

    def due(self, groups: Collection[int], event_time: EventTime, since: int, up_to: int) -> Iterator[pa.Table]:
        """The same of all keys of these key groups that have a row with a time from one to another."""

    def recent(self, groups: Collection[int]) -> Iterator[pa.Table]:
        """The same of those keys that are likely to be needed next, or nothing if that is not known."""

    def scan(self, groups: Collection[int], *, can_wait: bool = False) -> Iterator[pa.Table]:
        """All rows of these key groups, as changes, in bounded pieces."""


class PeerTransfer:
    """The key groups of one variable that come from one former owner. Any thread may call any method."""

    def __init__(
        self,
        state: VariableState,
        source: FrozenSource,
        make_origin: MakeOrigin,
        groups: Collection[int],
        key_groups: int,
        scheduler: Scheduler = THREADS,
    ) -> None:
        self._scheduler = scheduler
        self._state = state
        self._source = source
        self._make_origin = make_origin
        #: By key group: whether some of its state may not have arrived yet.
        self._pending: Flags = np.zeros(key_groups, dtype=np.bool_)
        self._pending[list(groups)] = True
        self._known = state.known_keys()
        self._is_prefetched = False
        #: By key group: the first time of which due rows have not been asked for; and where rows have that time.
        self._due_since: npt.NDArray[np.int64] = np.full(key_groups, FIRST_TIME, dtype=np.int64)
        self._due_by: EventTime | None = None
        #: Held while keys are fetched, so that no two threads fetch the same.
        self._fetching = scheduler.lock()
        #: Held while rows are loaded. Whether their group is still pending is asked anew: if it is not, they are here,
        #: and may have been changed since.
        self._loading = scheduler.lock()
        #: What goes on in this one's place, once the source has failed.
        self._from_checkpoint: CheckpointTransfer | None = None
        self.brought = Brought()
        #: In what the drain brought last; and whether room has been made for all that is to come.
        self.rows_per_group = 0.0
        self.has_room = False

    @property
    def pending(self) -> list[int]:
        """The key groups that have not arrived completely."""
        if self._from_checkpoint is not None:
            return self._from_checkpoint.pending
        return [int(group) for group in np.flatnonzero(self._pending)]

    def fetch(self, hashes: Hashes, keys: Any) -> None:
        """Bring the state of these keys, as far as it is of these key groups and not there yet."""
        mine = np.flatnonzero(self._pending[key_groups_of(hashes, len(self._pending))])
        if not len(mine):
            return
        with self._fetching:
            if self._from_checkpoint is None:
                missing = self._known.missing(gathered(keys, mine))
                if not len(missing):
                    return
                try:
                    parts = list(self._source.fetch(missing))
                except AnabranchError as error:
                    self._fall_back(error)
                else:
                    self._load_fetched(missing, parts)
        if self._from_checkpoint is not None:
            self._from_checkpoint.fetch(hashes)

    def fetch_due(self, groups: Collection[int], event_time: EventTime, up_to: int) -> None:
        """Bring the state of all keys of these key groups that have a row which is due, as far as it is not there."""
        with self._fetching:
            if self._due_by != event_time:
                self._due_by, self._due_since[:] = event_time, FIRST_TIME
            chosen = [group for group in groups if self._pending[group] and self._due_since[group] <= up_to]
            if chosen and self._from_checkpoint is None:
                since = int(self._due_since[chosen].min())
                try:
                    parts = list(self._source.due(chosen, event_time, since, up_to))
                except AnabranchError as error:
                    self._fall_back(error)
                else:
                    self._load_whole(parts, self.brought.note_fetched)
                    self._due_since[chosen] = min(up_to + 1, LAST_TIME)
        if self._from_checkpoint is not None:
            self._from_checkpoint.fetch_due(groups, event_time, up_to)

    def prefetch(self) -> None:
        """Bring, once, the keys that the last epoch changed, if these are likely to be needed in the next one."""
        pending = self.pending
        if self._is_prefetched or not pending:
            return
        self._is_prefetched = True
        try:
            parts = list(self._source.recent(pending))
        except AnabranchError as error:
            self._fall_back(error)
            return
        for pieces in _between_keys(parts):
            self._load_whole(pieces, self.brought.note_drained)

    def drain(self, groups: Collection[int], *, can_wait: bool = False) -> None:
        """Bring all that is missing of these key groups; nobody may be waiting for it."""
        chosen = [group for group in groups if self._pending[group]]
        if chosen and self._from_checkpoint is None:
            bring = partial(self._bring, chosen, can_wait=can_wait)
            try:
                self.rows_per_group = (self._scheduler.in_background(bring) if can_wait else bring()) / len(chosen)
            except AnabranchError as error:
                self._fall_back(error)
            with self._loading:
                if self._from_checkpoint is None:
                    self._pending[chosen] = False
        if self._from_checkpoint is not None:
            self._from_checkpoint.drain(chosen)

    def _bring(self, groups: Collection[int], *, can_wait: bool) -> int:
        """How many rows there are in these key groups, all of which have been brought."""
        rows = 0
        for part in self._source.scan(groups, can_wait=can_wait):
            self._load_drained(part)
            rows += len(part)
        return rows

    def redirect(self, make_origin: MakeOrigin) -> None:
        """Where the checkpoint's files are now, in case they are needed."""
        with self._loading:
            self._make_origin = make_origin
            if self._from_checkpoint is not None:
                self._from_checkpoint.redirect(make_origin)

    def forget(self, groups: Collection[int]) -> None:
        """These key groups belong to somebody else now."""
        with self._loading:
            self._pending[list(groups)] = False
            if self._from_checkpoint is not None:
                self._from_checkpoint.forget(groups)

    def _load_fetched(self, keys: Any, parts: list[pa.Table]) -> None:
        with self._loading:
            if self._from_checkpoint is not None:
                return  # as below
            loaded = [self._still_pending(part) for part in parts]
            for part in loaded:
                self._state.load(part)
            self._known.add(keys)
            self.brought.note_fetched(loaded)

    def _load_whole(self, parts: list[pa.Table], note: Callable[[list[pa.Table]], None]) -> None:
        """Load all entries of keys that nobody asked for by name; from now on they are known."""
        with self._loading:
            if self._from_checkpoint is not None:
                return  # as below
            rows = [self._known.without(self._still_pending(part)) for part in parts]
            for part in rows:
                self._state.load(part)
            for part in rows:
                self._known.add(part)
            note(rows)

    def _load_drained(self, part: pa.Table) -> None:
        for start in range(0, len(part), _ROWS_PER_LOAD):
            with self._loading:
                if self._from_checkpoint is not None:
                    return  # keys that came from there are not known here, and may have been changed since
                rows = self._known.without(self._still_pending(part.slice(start, _ROWS_PER_LOAD)))
                self._state.load(rows)
                self.brought.note_drained([rows])

    def _still_pending(self, changes: pa.Table) -> pa.Table:
        pending = self._pending[key_groups_of(changes.column(HASH).to_numpy(), len(self._pending))]
        return changes if pending.all() else gathered(changes, np.flatnonzero(pending))

    def _fall_back(self, error: AnabranchError) -> None:
        with self._loading:
            if self._from_checkpoint is not None:
                return
            logger.warning("state comes from the checkpoint instead of its former owner: %s", error)
            pending = [int(group) for group in np.flatnonzero(self._pending)]
            self._from_checkpoint = CheckpointTransfer(
                self._state, self._make_origin(pending), pending, len(self._pending), self._known, self._scheduler
            )
            self._from_checkpoint.brought = self.brought


def _between_keys(parts: list[pa.Table]) -> Iterator[list[pa.Table]]:
    """The same rows in pieces of bounded size, none of which ends within a key. The rows of a key follow each other."""
    held: list[pa.Table] = []
    last_hash = 0
    for part in parts:
        hashes = part.column(HASH).to_numpy()
        if not len(hashes):
            continue
        if held and hashes[0] != last_hash:
            yield held
            held = []
        last_hash = hashes[-1]
        ends = np.append(np.flatnonzero(hashes[1:] != hashes[:-1]) + 1, len(hashes))
        start = 0
        while start < len(hashes):
            end = int(ends[np.searchsorted(ends, min(start + _ROWS_PER_LOAD, len(hashes)))])
            held.append(part.slice(start, end - start))
            start = end
            if end < len(hashes):
                yield held
                held = []
    if held:
        yield held
