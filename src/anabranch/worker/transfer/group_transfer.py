"""Group transfer: key groups that are served at once, while their state is still on its way from a source.

Before a key is read or written, all of its state is fetched; a drain brings the rest, group by group. A key that was
fetched is *known*: what is here of it may be newer than what the source has, so a drain leaves it alone. A source never
changes, so reading it races with nothing. If an old owner fails, the checkpoint, which has the same state, takes its
place. Starting a job, replacing a lost worker and rescaling are all this, from different sources.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

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
from anabranch.worker.state.rows import Hashes
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.transfer.sources import Flags, MakeSource, StateSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Rows that are loaded at a time: a fetch waits for no longer than this takes.
_ROWS_PER_LOAD = 1 << 13


@dataclass
class Brought:
    """What transfers have brought, on demand and by the drain."""

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


class GroupTransfer:
    """The key groups of one variable that come from one source. Any thread may call any method."""

    def __init__(
        self,
        state: VariableState,
        groups: Collection[int],
        key_groups: int,
        checkpoint: MakeSource,
        *,
        peer: StateSource | None = None,
        scheduler: Scheduler = THREADS,
    ) -> None:
        """The state comes from the peer if there is one, with the checkpoint in reserve."""
        self._scheduler = scheduler
        self._state = state
        #: By key group: whether some of its state may not have arrived yet.
        self._pending: Flags = np.zeros(key_groups, dtype=np.bool_)
        self._pending[list(groups)] = True
        self.is_from_peer = peer is not None
        self._make_checkpoint = checkpoint
        self._reads_checkpoint = peer is None
        self._source = checkpoint(groups) if peer is None else peer
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
        self.brought = Brought()
        #: In what the drain brought last; and whether room has been made for all that is to come.
        self.rows_per_group = 0.0
        self.has_room = False

    @property
    def pending(self) -> list[int]:
        """The key groups that have not arrived completely."""
        return [int(group) for group in np.flatnonzero(self._pending)]

    def fetch(self, hashes: Hashes, keys: pa.Table) -> None:
        """Bring the state of these keys, as far as it is of these key groups and not there yet."""
        groups = key_groups_of(hashes, len(self._pending))
        if not self._pending[groups].any():
            return
        with self._fetching:
            mine = np.flatnonzero(self._pending[groups])  # some may have arrived meanwhile
            missing = self._known.missing(gathered(keys.select(self._state.layout.keys.names), mine))
            if len(missing):
                self._load_fetched(missing, self._read(lambda source: (source.is_history, list(source.fetch(missing)))))

    def fetch_due(self, groups: Collection[int], event_time: EventTime, up_to: int) -> None:
        """Bring the state of all keys of these key groups that have a row which is due, as far as it is not there."""
        if not self._pending[list(groups)].any():
            return
        with self._fetching:
            if self._due_by != event_time:
                self._due_by, self._due_since[:] = event_time, FIRST_TIME
            chosen = [group for group in groups if self._pending[group] and self._due_since[group] <= up_to]
            if not chosen:
                return
            since = int(self._due_since[chosen].min())
            is_history, parts = self._read(
                lambda source: (source.is_history, _whole_keys(source, source.due(chosen, event_time, since, up_to)))
            )
            self._load_whole(parts, self.brought.note_fetched)
            with self._loading:
                if is_history == self._source.is_history:  # else: see _fall_back
                    self._due_since[chosen] = min(up_to + 1, LAST_TIME)

    def prefetch(self) -> None:
        """Bring, once, the keys that the last epoch changed, if these are likely to be needed in the next one."""
        pending = self.pending
        if self._is_prefetched or not pending:
            return
        self._is_prefetched = True
        parts = self._read(lambda source: _whole_keys(source, source.recent(pending)))
        self._load_whole(parts, self.brought.note_drained)

    def drain(self, groups: Collection[int], *, can_wait: bool = False) -> None:
        """Bring all that is missing of these key groups; with ``can_wait``, no task is waiting for it."""
        chosen = [group for group in groups if self._pending[group]]
        if chosen:
            rows = self._read(lambda source: self._drain_from(source, chosen, can_wait=can_wait))
            with self._loading:
                self.rows_per_group = rows / len(chosen)
                self._pending[chosen] = False

    def redirect(self, checkpoint: MakeSource) -> None:
        """Take notice of where the checkpoint's files are now. They have the same state: it has not changed."""
        with self._loading:
            self._make_checkpoint = checkpoint
            if self._reads_checkpoint:
                self._source = checkpoint(self.pending)

    def forget(self, groups: Collection[int]) -> None:
        """Bring nothing more of these key groups: they have another owner now."""
        with self._loading:
            self._pending[list(groups)] = False

    def _read(self, read: Callable[[StateSource], T]) -> T:
        """What the source gives; if it fails, what the one gives that has taken its place."""
        while True:
            source = self._source
            try:
                return read(source)
            except AnabranchError as error:
                if not self._is_replaced(source, error):
                    raise

    def _is_replaced(self, failed: StateSource, error: AnabranchError) -> bool:
        """Whether there is another source by now. The checkpoint takes the place of a peer, and nothing its own."""
        with self._loading:
            if self._source is failed:
                if self._reads_checkpoint:
                    return False
                self._fall_back(error)
            return True

    def _fall_back(self, error: AnabranchError) -> None:
        logger.warning("state comes from the checkpoint instead of its former owner: %s", error)
        self._source = self._make_checkpoint(self.pending)
        self._reads_checkpoint = True
        # While a history is loaded, rows are there for a moment that a later change removes or moves: their keys have
        # to be known before due rows are looked up, and a peer did not name them.
        self._due_since[:] = FIRST_TIME

    def _drain_from(self, source: StateSource, groups: Collection[int], *, can_wait: bool) -> int:
        """Brings all rows of these key groups, and says how many there are."""
        if source.is_history:
            parts = list(source.scan(groups))
            self._load_drained(parts)
            return _keys_in(parts)
        bring = partial(self._stream_from, source, groups, can_wait=can_wait)
        # Not from files: Arrow keeps the threads that read them, which would stay in the background.
        return self._scheduler.in_background(bring) if can_wait else bring()

    def _stream_from(self, source: StateSource, groups: Collection[int], *, can_wait: bool) -> int:
        rows = 0
        for part in source.scan(groups, can_wait=can_wait):
            for start in range(0, len(part), _ROWS_PER_LOAD):
                self._load_drained([part.slice(start, _ROWS_PER_LOAD)])
            rows += len(part)
        return rows

    def _load_fetched(self, keys: pa.Table, fetched: tuple[bool, list[pa.Table]]) -> None:
        """Load all entries of keys that were asked for by name."""
        may_have_others, parts = fetched
        with self._loading:
            rows = [self._still_pending(part) for part in parts]
            if may_have_others:  # which are known, and have been changed since
                rows = [self._known.without(part) for part in rows]
            self._load(rows, self.brought.note_fetched)
            self._known.add(keys)

    def _load_whole(self, pieces: Iterable[list[pa.Table]], note: Callable[[list[pa.Table]], None]) -> None:
        """Load all entries of keys that were not asked for by name; from now on they are known."""
        for piece in pieces:
            with self._loading:
                rows = self._load_missing(piece, note)
                for part in rows:
                    self._known.add(part)

    def _load_drained(self, parts: list[pa.Table]) -> None:
        with self._loading:
            self._load_missing(parts, self.brought.note_drained)

    def _load_missing(self, parts: list[pa.Table], note: Callable[[list[pa.Table]], None]) -> list[pa.Table]:
        rows = [self._known.without(self._still_pending(part)) for part in parts]
        self._load(rows, note)
        return rows

    def _load(self, parts: list[pa.Table], note: Callable[[list[pa.Table]], None]) -> None:
        for part in parts:
            self._state.load(part)
        note(parts)

    def _still_pending(self, changes: pa.Table) -> pa.Table:
        pending = self._pending[key_groups_of(changes.column(HASH).to_numpy(), len(self._pending))]
        return changes if pending.all() else gathered(changes, np.flatnonzero(pending))


def _whole_keys(source: StateSource, parts: Iterable[pa.Table]) -> list[list[pa.Table]]:
    """The same rows in pieces that can be loaded one after the other: each has all that there is of its keys."""
    read = list(parts)
    return [read] if source.is_history else list(_between_keys(read))


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


def _keys_in(parts: Collection[pa.Table]) -> int:
    """How many keys there are in changes, in which a key may occur many times."""
    return len(np.unique(np.concatenate([part.column(HASH).to_numpy() for part in parts]))) if parts else 0
