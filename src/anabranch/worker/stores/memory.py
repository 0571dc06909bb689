"""The store in memory: one row per key, with the value itself, or with all entries of a list or map in a dict."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import numpy.typing as npt

from anabranch.core.schemas import Op, StageSpec, VariableKind
from anabranch.worker.state.codec import from_objects, to_objects
from anabranch.worker.state.rows import Changes, Entries, Keys, Rows, Shape
from anabranch.worker.state.table import RowTable
from anabranch.worker.stores import StorePlace

#: Rows changed before readers are let in again: some milliseconds.
_APPLY_ROWS = 1 << 15
_BATCH_ROWS = 1 << 16
#: Addresses, not memory, that a table takes from the beginning: up to there, it grows without being copied.
_ROOM_BYTES = 1 << 30
#: From this share of all rows on, those that stay are moved rather than those that go removed: it takes less time, and
#: the memory is free again.
_DROPPED_DIVISOR = 8

#: The entries of a key: encoded value by encoded sub-key.
_Dict = dict[bytes, bytes]


class ReadWriteLock:
    """Readers share it, a writer has it alone. A waiting writer goes before new readers, or it might never come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._writing and not self._writers_waiting)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._writers_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._writing and not self._readers)
            finally:
                self._writers_waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()


class _RowsByGroup:
    """The rows of each key group, as of when they were sorted: those of groups that changed since are not known."""

    def __init__(self, rows: npt.NDArray[np.int32], groups: npt.NDArray[np.int32], key_groups: int) -> None:
        """Of rows in the order of their numbers, and the group of each."""
        # NumPy sorts numbers of 16 bits several times as fast as others.
        order = np.argsort(groups.astype(np.uint16), kind="stable").astype(np.int32)
        has_holes = len(rows) > 0 and int(rows[-1]) >= len(rows)
        self._rows = rows[order] if has_holes else order
        counts = np.zeros(key_groups, dtype=np.intp)
        for start in range(0, len(groups), _BATCH_ROWS):  # in pieces that stay in the processor's cache
            counts += np.bincount(groups[start : start + _BATCH_ROWS], minlength=key_groups)
        self._ends = np.cumsum(counts)
        self._is_known = np.ones(key_groups, dtype=np.bool_)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._ends.nbytes + self._is_known.nbytes

    @property
    def knows_any(self) -> bool:
        return bool(self._is_known.any())

    def forget(self, groups: npt.NDArray[np.int32]) -> None:
        self._is_known[groups] = False

    def of(self, groups: npt.NDArray[np.intp]) -> npt.NDArray[np.int32] | None:
        """The rows of some groups, or None if they are not known."""
        if not self._is_known[groups].all():
            return None
        starts = np.where(groups > 0, self._ends[groups - 1], 0)
        parts = [self._rows[start:end] for start, end in zip(starts, self._ends[groups], strict=True)]
        return np.concatenate(parts) if parts else self._rows[:0]


class MemoryBackend:
    """See Backend. There is nothing to share, and nothing that outlives a store."""

    def __init__(self, place: StorePlace) -> None:
        del place

    def open(self, shape: Shape, job: str, stage: StageSpec, variable: str) -> MemoryStore:
        del job, stage, variable
        return MemoryStore(shape)

    def close_job(self, job: str) -> None: ...

    def wipe(self, job: str) -> None: ...


class MemoryStore:
    """See Store."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._of_values = shape.kind is VariableKind.VALUE
        self._table = self._empty_table()
        self._entries = 0
        #: Made when the rows of key groups are asked for, and kept while some of these have not changed since: a drain
        #: goes through groups that do not change, a few at a time.
        self._by_group: _RowsByGroup | None = None
        #: Held while the state changes, or must not change for long, while others go on reading.
        self._changing = threading.Lock()
        #: Held for writing while rows change in place.
        self._in_place = ReadWriteLock()

    def read(self, keys: Keys) -> Entries:
        with self._in_place.reading():
            rows = self._table.find(keys.hashes, keys.keys)
            index = np.flatnonzero(rows >= 0)
            values = self._table.values(rows[index])
            if self._of_values:
                return Entries(index, np.empty((len(index), 0), dtype=np.uint8), values)
            return self._flat(index, values)

    def apply(self, changes: Changes) -> None:
        with self._changing:
            self._forget_rows(changes.hashes)
            for start in range(0, len(changes), _APPLY_ROWS):
                # CLEAR goes before everything else, whatever comes between.
                part = slice(start, start + _APPLY_ROWS)
                cleared = np.flatnonzero(changes.ops[part] == Op.CLEAR) + start
                self._remove_keys(changes.keys_of(cleared))
            for start in range(0, len(changes), _APPLY_ROWS):
                part = slice(start, start + _APPLY_ROWS)
                rest = changes.take(np.flatnonzero(changes.ops[part] != Op.CLEAR) + start)
                self._table.reserve(len(rest))
                if self._of_values:
                    self._apply_values(rest)
                else:
                    self._apply_entries(rest)

    def make_room(self, entries: int) -> None:
        with self._changing:
            rows = entries if self._of_values else entries * len(self._table) // max(1, self._entries)
            table, draft = self._table, self._table.draft_index(rows)
        if draft is not None:
            try:
                draft.build()  # while others read and change the table
            except BaseException:
                with self._changing:
                    table.drop_draft()
                raise
        with self._changing:
            if draft is not None and table is self._table:
                table.use_index(draft)
            self._table.reserve(rows)

    def snapshot(self, groups: Collection[int] | None) -> Iterator[Rows]:
        with self._changing:
            rows = self._rows_of(groups)
            keys = Keys(self._table.hashes(rows), self._table.keys(rows))
            values = self._table.values(rows)
            entries = None if self._of_values else self._flat(np.arange(len(rows)), values)
        if entries is not None:
            return (keys.rows_of(part) for part in entries.batches())
        return Rows(keys.hashes, keys.keys, np.empty((len(keys), 0), dtype=np.uint8), values).batches()

    def drop_groups(self, groups: Collection[int]) -> None:
        with self._changing:
            rows = self._rows_of(groups)
            self._by_group = None
            if len(rows) > len(self._table) // _DROPPED_DIVISOR:
                self._move_without(rows)
                return
            keys = Keys(self._table.hashes(rows), self._table.keys(rows))
            for part in keys.batches(_APPLY_ROWS):
                self._remove_keys(part)

    def rows(self, groups: Collection[int] | None = None) -> int:
        if groups is None:
            return len(self._table) if self._of_values else self._entries
        with self._changing:
            rows = self._rows_of(groups)
            return len(rows) if self._of_values else sum(map(len, self._table.values(rows)))

    def size_bytes(self) -> int:
        by_group = self._by_group
        with self._in_place.reading():
            return self._table.nbytes + (by_group.nbytes if by_group is not None else 0)

    def destroy(self) -> None:
        with self._changing, self._in_place.writing():
            self._table, self._by_group = self._empty_table(), None
            self._entries = 0

    def _empty_table(self) -> RowTable:
        value_width = self._shape.value_width if self._of_values else None
        return RowTable(self._shape.key_width, value_width, room_bytes=_ROOM_BYTES)

    def _apply_values(self, changes: Changes) -> None:
        self._remove_keys(changes.keys_of(changes.ops == Op.DELETE))
        puts = changes.take(changes.ops == Op.PUT)
        with self._in_place.writing():
            self._table.put(puts.hashes, puts.keys, puts.values)

    def _apply_entries(self, changes: Changes) -> None:
        subkeys, values = to_objects(changes.subkeys), to_objects(changes.values)
        puts = changes.ops == Op.PUT
        with self._in_place.writing():
            rows = self._table.find(changes.hashes, changes.keys)
            rows[puts] = self._table.put(changes.hashes[puts], changes.keys[puts])
            changed = np.unique(rows[rows >= 0])
            if not len(changed):
                return
            dicts = self._dicts(changed)
            before = sum(map(len, dicts))
            # One dict per key: nothing vectorised finds a sub-key in it. An entry has one change, so any order will do.
            of_changes = dicts[np.searchsorted(changed, rows)]
            for entries, subkey, value in zip(of_changes[puts], subkeys[puts], values[puts], strict=True):
                entries[subkey] = value
            gone = np.flatnonzero(~puts & (rows >= 0))
            for entries, subkey in zip(of_changes[gone], subkeys[gone], strict=True):
                entries.pop(subkey, None)
            counts = np.fromiter(map(len, dicts), dtype=np.intp, count=len(dicts))
            self._entries += int(counts.sum()) - before
            emptied = changed[counts == 0]
            self._table.remove(self._table.hashes(emptied), self._table.keys(emptied))

    def _dicts(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.object_]:
        """The dicts of these rows; new ones for rows that have none yet."""
        dicts = self._table.values(rows)
        for i in np.flatnonzero(dicts == None):  # noqa: E711  (element by element)
            dicts[i] = {}
        self._table.set_objects(rows, dicts)
        return dicts

    def _remove_keys(self, keys: Keys) -> None:
        if not len(keys):
            return
        with self._in_place.writing():
            if not self._of_values:
                rows = self._table.find(keys.hashes, keys.keys)
                self._entries -= sum(map(len, self._table.values(np.unique(rows[rows >= 0]))))
            self._table.remove(keys.hashes, keys.keys)

    def _rows_of(self, groups: Collection[int] | None) -> npt.NDArray[np.int32]:
        if groups is None:
            return self._table.rows()
        chosen = np.flatnonzero(self._shape.chosen(groups))
        found = self._by_group.of(chosen) if self._by_group is not None else None
        if found is None:
            groups_of_rows = self._shape.groups_of(self._table.all_hashes())
            self._by_group = _RowsByGroup(self._table.rows(), groups_of_rows, self._shape.key_groups)
            found = self._by_group.of(chosen)
            assert found is not None
        return found

    def _forget_rows(self, hashes: npt.NDArray[np.int64]) -> None:
        """Rows of these keys may come or go."""
        if self._by_group is not None:
            self._by_group.forget(self._shape.groups_of(hashes))
            if not self._by_group.knows_any:
                self._by_group = None

    def _move_without(self, dropped: npt.NDArray[np.int32]) -> None:
        """Give memory back: move all other rows into a table of their size, while others read."""
        entries = self._entries
        if not self._of_values:
            entries -= sum(map(len, self._table.values(dropped)))
        moved = self._table.without(dropped)
        with self._in_place.writing():
            self._table, self._entries = moved, entries

    def _flat(self, index: npt.NDArray[np.intp], dicts: npt.NDArray[np.object_]) -> Entries:
        """The entries of several keys, one after the other."""
        of_keys: list[_Dict] = dicts.tolist()
        counts = np.fromiter(map(len, of_keys), dtype=np.intp, count=len(of_keys))
        subkeys = list(chain.from_iterable(of_keys))
        if self._shape.value_width == 0:  # as timers are: all has been said
            encoded = np.empty((len(subkeys), 0), dtype=np.uint8)
        else:
            values = list(chain.from_iterable(map(dict.values, of_keys)))
            encoded = from_objects(values, self._shape.value_width)
        return Entries(np.repeat(index, counts), from_objects(subkeys, self._shape.subkey_width), encoded)
