"""Origins: where the state of key groups that a worker has been given comes from, as of one epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.checkpoint.datafiles import read_changes, read_snapshot_rows
from anabranch.checkpoint.storage import Storage
from anabranch.core.eventtime import EventTime
from anabranch.core.gather import gathered
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, Layout
from anabranch.core.state_files import ChangeFile, SnapshotFile
from anabranch.worker.transfer.peers import as_puts

Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.int64]

#: Decoded files are kept for the next look up to so many bytes; larger state is read again each time.
_KEPT_BYTES_MAX = 1 << 30


def slots_of(hashes: Hashes, slots: int) -> npt.NDArray[np.int64]:
    """Which slot each key falls into, of a power of two; by the high bits, as the low ones make the key group."""
    return (hashes >> np.int64(40)) & np.int64(slots - 1)


@dataclass(frozen=True)
class Selection:
    """Some keys of a variable: those of some key groups whose hashes fall into some slots."""

    #: By key group.
    groups: Flags
    #: By slot; how many slots there are is up to who asks.
    slots: Flags

    def rows(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        """The positions of the keys that are meant."""
        chosen = self.slots[slots_of(hashes, len(self.slots))]
        chosen &= self.groups[key_groups_of(hashes, len(self.groups))]
        return np.flatnonzero(chosen)


class Origin(Protocol):
    """Immutable state of one variable."""

    @property
    def rows(self) -> int:
        """About how many rows there are to bring, for all key groups together."""

    def select(self, selection: Selection) -> Iterator[pa.Table]:
        """The state of some keys as changes, ``layout.changes``, to be applied one after the other."""

    def due(self, groups: Flags, event_time: EventTime, up_to: int) -> Hashes:
        """The hashes of all keys of some key groups that have a row which is due, and perhaps of others."""


class CheckpointOrigin:
    """A snapshot and the change files after it."""

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        groups: Collection[int],
        snapshot: Sequence[SnapshotFile],
        changes: Sequence[ChangeFile],
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._groups = frozenset(groups)
        self._files: list[SnapshotFile | ChangeFile] = [*(f for f in snapshot if self._overlaps(f)), *changes]
        self._kept: dict[str, tuple[pa.Table, Hashes]] = {}
        self._kept_bytes = 0

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self._files)

    def select(self, selection: Selection) -> Iterator[pa.Table]:
        for file in self._files:
            table, hashes = self._load(file)
            rows = selection.rows(hashes)
            if len(rows):
                yield table if len(rows) == len(table) else gathered(table, rows)

    def due(self, groups: Flags, event_time: EventTime, up_to: int) -> Hashes:
        # Rows may have changed in a later file; finding that out would cost more than bringing them.
        found = []
        for file in self._files:
            table, hashes = self._load(file)
            over = event_time.is_over(table, up_to).to_numpy(zero_copy_only=False)
            over &= groups[key_groups_of(hashes, len(groups))]
            found.append(hashes[over])
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def _load(self, file: SnapshotFile | ChangeFile) -> tuple[pa.Table, Hashes]:
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
