"""State sources: a new owner reads a moved key group from the old owner, frozen, or from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.checkpoint.datafiles import read_changes, read_snapshot_rows
from anabranch.checkpoint.storage import Storage
from anabranch.core.eventtime import EventTime
from anabranch.core.gather import gathered
from anabranch.core.ids import Epoch, Generation, JobId, StageNumber
from anabranch.core.keygroups import key_groups_of
from anabranch.core.requests import FetchDue, FetchGroups, FetchKeys
from anabranch.core.schemas import HASH, INDEX, Layout, Op
from anabranch.core.state_files import ChangeFile, SnapshotFile
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS
from anabranch.wire import frames
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials
from anabranch.wire.messages import ENTRIES, KEYS
from anabranch.worker.parts import PRODUCTION, Connect
from anabranch.worker.state.rows import Hashes

#: Decoded files are kept for the next request up to this size; larger state is read again each time.
_KEPT_BYTES_MAX = 1 << 30
_SLOTS_MIN, _SLOTS_MAX = 1 << 12, 1 << 22

Flags = npt.NDArray[np.bool_]


class StateSource(Protocol):
    """The state of one variable in moved key groups, as of one epoch: it never changes.

    All methods give it as changes (``layout.changes``), in tables that are applied one after the other.
    """

    #: Whether several tables may have changes of the same key, which are right only together. If not, every row comes
    #: once, and the rows of a key follow each other.
    is_history: bool

    def fetch(self, keys: pa.Table) -> Iterable[pa.Table]:
        """Gives all entries of these keys, and perhaps of others. A key without entries does not exist."""

    def due(self, groups: Collection[int], event_time: EventTime, since: int, up_to: int) -> Iterable[pa.Table]:
        """Gives all entries of all keys of some groups that have a row with a time from one to another, or of more."""

    def recent(self, groups: Collection[int]) -> Iterable[pa.Table]:
        """Gives all entries of the keys that are likely to be needed next, or none if the source cannot tell."""

    def scan(self, groups: Collection[int], *, can_wait: bool = False) -> Iterable[pa.Table]:
        """Gives all rows of these key groups. With ``can_wait``, requests of tasks go first."""


#: Makes the source of a variable's state in the checkpoint, for some key groups.
MakeSource = Callable[[Collection[int]], StateSource]


class CheckpointSource:
    """A snapshot and the change files after it."""

    is_history = True

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        key_groups: int,
        groups: Collection[int],
        snapshot: Sequence[SnapshotFile],
        changes: Sequence[ChangeFile],
        scheduler: Scheduler = THREADS,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._key_groups = key_groups
        self._groups = frozenset(groups)
        self._files: list[SnapshotFile | ChangeFile] = [*(f for f in snapshot if self._overlaps(f)), *changes]
        #: Keys fall into slots by their hash. There are twice as many as rows, so few rows share the slot of a key.
        rows = sum(file.rows for file in self._files)
        self._slots = min(max(1 << max(0, 2 * rows - 1).bit_length(), _SLOTS_MIN), _SLOTS_MAX)
        self._kept: dict[str, tuple[pa.Table, Hashes]] = {}
        self._kept_bytes = 0
        #: Held while a file is read, so that no two threads read the same.
        self._reading = scheduler.lock()

    def fetch(self, keys: pa.Table) -> list[pa.Table]:
        return self._of_hashes(keys.column(HASH).to_numpy())

    def due(self, groups: Collection[int], event_time: EventTime, since: int, up_to: int) -> list[pa.Table]:
        del since  # the new owner knows what it has
        chosen = self._chosen(groups)
        found = [np.empty(0, dtype=np.int64)]
        # Rows may have changed in a later file; finding that out would cost more than bringing them.
        for file in self._files:
            table, hashes = self._load(file)
            over = event_time.is_over(table, up_to).to_numpy(zero_copy_only=False)
            found.append(hashes[over & chosen[key_groups_of(hashes, self._key_groups)]])
        return self._of_hashes(np.concatenate(found))

    def recent(self, groups: Collection[int]) -> list[pa.Table]:
        """Gives nothing: files do not tell which keys will be needed next."""
        del groups
        return []

    def scan(self, groups: Collection[int], *, can_wait: bool = False) -> list[pa.Table]:
        del can_wait
        chosen = self._chosen(groups)
        return self._select(lambda hashes: np.flatnonzero(chosen[key_groups_of(hashes, self._key_groups)]))

    def _of_hashes(self, wanted: Hashes) -> list[pa.Table]:
        """All rows whose hash is wanted. Most of the others are ruled out by their slots, which is faster."""
        if not len(wanted):
            return []
        wanted = np.unique(wanted)  # once, and not for each file
        slots = np.zeros(self._slots, dtype=np.bool_)
        slots[self._slots_of(wanted)] = True

        def rows(hashes: Hashes) -> npt.NDArray[np.intp]:
            near = np.flatnonzero(slots[self._slots_of(hashes)])
            of_near = hashes[near]
            at = np.minimum(np.searchsorted(wanted, of_near), len(wanted) - 1)
            chosen: npt.NDArray[np.intp] = near[wanted[at] == of_near]
            return chosen

        return self._select(rows)

    def _select(self, choose: Callable[[Hashes], npt.NDArray[np.intp]]) -> list[pa.Table]:
        # All or nothing: a row whose removal could not be read would stay, if the next source knows neither.
        parts = []
        for file in self._files:
            table, hashes = self._load(file)
            rows = choose(hashes)
            if len(rows):
                parts.append(table if len(rows) == len(table) else gathered(table, rows))
        return parts

    def _chosen(self, groups: Collection[int]) -> Flags:
        chosen: Flags = np.zeros(self._key_groups, dtype=np.bool_)
        chosen[list(groups)] = True
        return chosen

    def _slots_of(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        # By the high bits, as the low ones make the key group.
        return (hashes >> np.int64(40)) & np.int64(self._slots - 1)

    def _load(self, file: SnapshotFile | ChangeFile) -> tuple[pa.Table, Hashes]:
        with self._reading:
            kept = self._kept.get(file.path)
            if kept is not None:
                return kept
            if isinstance(file, SnapshotFile):
                table = as_puts(read_snapshot_rows(self._storage, file, self._layout, self._groups), self._layout)
            else:
                table = read_changes(self._storage, file, self._layout, self._groups)
            loaded = table, table.column(HASH).to_numpy()
            if self._kept_bytes + table.nbytes <= _KEPT_BYTES_MAX:
                self._kept[file.path] = loaded
                self._kept_bytes += table.nbytes
            return loaded

    def _overlaps(self, file: SnapshotFile) -> bool:
        return any(file.first_group <= group <= file.last_group for group in self._groups)


@dataclass(frozen=True)
class Peer:
    """The old owner of key groups: a worker, and the epoch as of which it froze them."""

    address: str
    as_of: Epoch
    #: After so long without an answer, the checkpoint takes the peer's place.
    timeout_s: float
    credentials: Credentials
    job: JobId
    generation: Generation


class PeerSource:
    """The frozen copy of one variable on a peer. It never changes, so reading it races with nothing."""

    is_history = False

    def __init__(self, peer: Peer, stage: StageNumber, layout: Layout, connect: Connect = PRODUCTION.connect) -> None:
        self._connect = connect
        self._peer = peer
        self._layout = layout
        self._numbers: dict[str, Any] = {
            "job": peer.job,
            "generation": peer.generation,
            "as_of": peer.as_of,
            "stage": stage,
            "variable": layout.variable.name,
        }

    def fetch(self, keys: pa.Table) -> Iterator[pa.Table]:
        """Gives the entries of exactly these keys."""
        wanted = keys.select(self._layout.keys.names)
        for _, chunk in frames.slices(wanted) if len(wanted) else ():
            tables = self._client().exchange(FetchKeys(**self._numbers), {KEYS: chunk})
            for rows in entries_of(chunk, tables[ENTRIES]):
                yield as_puts(rows, self._layout)

    def due(self, groups: Collection[int], event_time: EventTime, since: int, up_to: int) -> Iterator[pa.Table]:
        column, field = event_time.column, event_time.field
        yield from self._rows(
            FetchDue(
                **self._numbers, groups=tuple(sorted(groups)), column=column, field=field, since=since, up_to=up_to
            )
        )

    def recent(self, groups: Collection[int]) -> Iterator[pa.Table]:
        yield from self._rows(FetchGroups(**self._numbers, groups=tuple(sorted(groups)), recent=True))

    def scan(self, groups: Collection[int], *, can_wait: bool = False) -> Iterator[pa.Table]:
        yield from self._rows(FetchGroups(**self._numbers, groups=tuple(sorted(groups)), can_wait=can_wait))

    def _rows(self, request: FetchGroups | FetchDue) -> Iterator[pa.Table]:
        for batch in self._client().stream(request):
            yield as_puts(pa.Table.from_batches([batch]), self._layout)

    def _client(self) -> WorkerClient:
        peer = self._peer
        return self._connect(peer.address, timeout_s=peer.timeout_s, credentials=peer.credentials)


def entries_of(keys: pa.Table, answers: pa.Table) -> Iterator[pa.Table]:
    """Whole rows (``layout.rows``) from keys and the answers to a read of them, in pieces of bounded size.

    A key is repeated for each of its entries: of a long list, that is many times what came in a message.
    """
    waiting = [answers]
    while waiting:
        part = waiting.pop()
        index = part.column(INDEX).to_numpy()
        first, last = (int(index[0]), int(index[-1])) if len(part) else (0, -1)
        own = keys.slice(first, last + 1 - first)
        if len(part) > 1 and own.nbytes * np.bincount(index - first).max() > frames.MESSAGE_BYTES:
            half = len(part) // 2
            waiting += [part.slice(half), part.slice(0, half)]
            continue
        of_keys, rows = own.take(pa.array(index - first)), part.drop_columns([INDEX])
        yield pa.table([*of_keys.columns, *rows.columns], names=[*of_keys.schema.names, *rows.schema.names])


def as_puts(rows: pa.Table, layout: Layout) -> pa.Table:
    """Whole rows as the changes that make them."""
    ops = pa.array(np.full(len(rows), Op.PUT, dtype=np.int8))
    return pa.table([rows.column(0), ops, *rows.columns[1:]], schema=layout.changes)
