"""Rows in growing NumPy columns, found by key: the memory store and the layers above a store are made of it.

Whatever has a fixed width is packed into one record per row (hash, key, value), so that a lookup touches one or two
lines of memory; keys and values of varying width are ``bytes`` objects in columns beside the records. Rows keep
their numbers; those of removed rows are used again. Only one thread may change a table, and no other may search it
meanwhile, except that ``reserve`` may run beside searches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import WorkerError
from anabranch.worker.state.codec import Encoded, size_bytes
from anabranch.worker.state.hash_index import Hashes, HashIndex, Positions, RowNumbers, Same

_WORD = 8
_MAX_ROWS = np.iinfo(np.int32).max
_MIN_ROWS = 1024
#: Rows moved at a time, so that what a step works on stays in the processor's cache.
_MOVED_ROWS = 1 << 16


@dataclass(frozen=True)
class IndexDraft:
    """An index of the rows that a table had at one moment, and where these rows are."""

    live: npt.NDArray[np.bool_]
    records: npt.NDArray[np.uint64]
    index: HashIndex
    #: By row: the hash that the index knows it by.
    hashes: Hashes

    def build(self) -> None:
        """Takes a while. The table may change meanwhile: it notes which rows do."""
        rows = np.flatnonzero(self.live).astype(np.int32)
        for start in range(0, len(rows), _MOVED_ROWS):
            part = rows[start : start + _MOVED_ROWS]
            self.hashes[part] = hashes = self.records[part, 0].view(np.int64)
            self.index.insert_new(hashes, part)

    def forget(self, rows: RowNumbers) -> None:
        _, slots = self.index.find(self.hashes[rows], lambda held, which: held == rows[which])
        self.index.remove(slots)


class RowTable:
    """Rows by key; ``None`` as a width means values of varying width, and any objects as values."""

    def __init__(self, key_width: int | None, value_width: int | None, *, room_bytes: int = 0) -> None:
        """Up to ``room_bytes``, records are never copied: while they are not used, they take addresses only."""
        self._key_width, self._value_width = key_width, value_width
        packed = {"hash": _WORD, "key": key_width or 0, "value": value_width or 0}
        offsets = dict(zip(packed, np.cumsum([0, *packed.values()]).tolist(), strict=False))
        self._words = -(-sum(packed.values()) // _WORD)
        self._record = np.dtype(
            {
                "names": [name for name, width in packed.items() if width],
                "formats": [f"V{width}" for width in packed.values() if width],
                "offsets": [offsets[name] for name, width in packed.items() if width],
                "itemsize": self._words * _WORD,
            }
        )
        self._records = self._room_for(room_bytes // (self._words * _WORD))
        self._keys = np.empty(0, dtype=object) if key_width is None else None
        self._values = np.empty(0, dtype=object) if value_width is None else None
        self._index = HashIndex()
        #: Rows from here on have never been used.
        self._end = 0
        self._free = np.empty(0, dtype=np.int32)
        self._live = np.zeros(0, dtype=np.bool_)
        #: Rows that came or went while the draft of an index is being built; None if none is.
        self._touched: list[RowNumbers] | None = None
        self._grow(_MIN_ROWS)

    def _room_for(self, rows: int) -> npt.NDArray[np.uint64]:
        """Makes records for these rows, or for few if addresses are as scarce as memory."""
        try:
            return np.empty((max(_MIN_ROWS, rows), self._words), dtype=np.uint64)
        except MemoryError:
            return np.empty((_MIN_ROWS, self._words), dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity(self) -> int:
        """The rows that all columns have room for."""
        return len(self._live)

    @property
    def nbytes(self) -> int:
        """The memory held; of objects, as estimated from some of them. Records that were never used have none yet."""
        objects = [column[: self._end] for column in (self._keys, self._values) if column is not None]
        unused = (self.capacity - self._end) * len(objects) * _WORD
        columns: list[Encoded] = [self._records[: self._end], self._free, self._live, *objects]
        return self._index.nbytes + unused + sum(size_bytes(column) for column in columns)

    def find(self, hashes: Hashes, keys: Encoded) -> RowNumbers:
        """The row of each key, or ABSENT."""
        return self._index.find(hashes, self._same(hashes, keys))[0]

    def put(self, hashes: Hashes, keys: Encoded, values: Encoded | None = None) -> RowNumbers:
        """Add the keys that are absent, and set the values; of equal keys, the last value stays.

        ``reserve`` must have made room. Returns the row of each key.
        """
        same = self._same(hashes, keys)
        records = self._pack(hashes, keys, values)
        rows, _ = self._index.find(hashes, same)
        absent = np.flatnonzero(rows < 0)
        if not len(absent):
            self._write(rows, records, values)
            return rows
        rows[absent] = fresh = self._allocate(len(absent))
        self._write(rows, records, values)
        if self._keys is not None:
            self._keys[fresh] = keys[absent]
        rows[absent] = self._index.insert(hashes[absent], fresh, lambda held, which: same(held, absent[which]))
        twins = fresh[rows[absent] != fresh]
        if len(twins):
            self._release(twins)
            self._write(rows, records, values)
        return rows

    def add(self, hashes: Hashes, keys: Encoded) -> RowNumbers:
        """Add the keys that are absent, and make room for them. Returns the row of each key."""
        self.reserve(len(hashes))
        return self.put(hashes, keys)

    def remove(self, hashes: Hashes, keys: Encoded) -> int:
        """Remove the keys, as far as they are there, and say how many were."""
        rows, slots = self._index.find(hashes, self._same(hashes, keys))
        found = rows >= 0
        gone, first = np.unique(rows[found], return_index=True)
        self._index.remove(slots[found][first])
        self._release(gone)
        return len(gone)

    def reserve(self, more: int) -> None:
        """Make room for more rows, without disturbing searches that run at the same time."""
        self._index.reserve(more, self.hashes)
        missing = more - len(self._free) - (self.capacity - self._end)
        if missing > 0:
            # Twice as much: what is not used yet costs addresses only, and rows are seldom copied.
            self._grow(max(missing, min(self.capacity, _MAX_ROWS - self.capacity)))

    def without(self, dropped: RowNumbers) -> RowTable:
        """A table of its own with all rows but these, which takes no more memory than they need."""
        kept = self._live[: self._end].copy()
        kept[dropped] = False
        rows = np.flatnonzero(kept).astype(np.int32)
        table = RowTable(self._key_width, self._value_width, room_bytes=self._records.nbytes)
        table.reserve(len(rows))
        for start in range(0, len(rows), _MOVED_ROWS):
            part = rows[start : start + _MOVED_ROWS]
            to = table._allocate(len(part))
            objects = None if self._values is None else self._values.take(part)
            table._write(to, self._opaque(self._records).take(part), objects)
            if self._keys is not None and table._keys is not None:
                table._keys[to] = self._keys.take(part)
            table._index.insert_new(self.hashes(part), to)
        return table

    def draft_index(self, more: int) -> IndexDraft | None:
        """Begin an index with room for more rows, to be built while the table goes on changing; None if there is room.

        Nothing may change during the call.
        """
        if self._index.has_room(more):
            return None
        index, hashes = HashIndex(len(self) + more), np.empty(self._end, dtype=np.int64)
        draft = IndexDraft(self._live[: self._end].copy(), self._records, index, hashes)
        self._touched = []
        return draft

    def drop_draft(self) -> None:
        """The index that was begun is of no use."""
        self._touched = None

    def use_index(self, draft: IndexDraft) -> None:
        """Use an index that has been built meanwhile, after what has changed since. Searches may go on."""
        touched = np.unique(np.concatenate([*(self._touched or ()), np.empty(0, dtype=np.int32)]))
        self._touched = None
        known = touched[touched < len(draft.live)]
        draft.forget(known[draft.live[known]])
        came = touched[self._live[touched]]
        draft.index.reserve(len(came), self.hashes)
        draft.index.insert_new(self.hashes(came), came)
        self._index = draft.index

    def rows(self) -> RowNumbers:
        """All rows, in the order of their numbers."""
        return np.flatnonzero(self._live[: self._end]).astype(np.int32)

    def all_hashes(self) -> Hashes:
        """Of all rows, in the order of their numbers."""
        hashes = self._records[: self._end, 0].view(np.int64)
        return hashes if len(self) == self._end else hashes[self._live[: self._end]]

    def hashes(self, rows: RowNumbers) -> Hashes:
        return self._records.ravel().take(rows.astype(np.intp) * self._words).view(np.int64)

    def keys(self, rows: RowNumbers) -> Encoded:
        return self._column("key", self._key_width, self._keys, rows)

    def values(self, rows: RowNumbers) -> Encoded:
        return self._column("value", self._value_width, self._values, rows)

    def set_objects(self, rows: RowNumbers, values: npt.NDArray[np.object_]) -> None:
        """Set values of varying width, of rows that are there."""
        assert self._values is not None
        self._values[rows] = values

    def _column(
        self, name: str, width: int | None, objects: npt.NDArray[np.object_] | None, rows: RowNumbers
    ) -> Encoded:
        if objects is not None:
            return objects.take(rows)
        if not width:
            return np.empty((len(rows), 0), dtype=np.uint8)
        taken = self._opaque(self._records).take(rows).view(self._record)[name]
        return np.ascontiguousarray(taken).view(np.uint8).reshape(-1, width)

    def _opaque(self, records: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """One value per record, because NumPy moves these several times as fast as rows of words."""
        return records.view(f"V{self._words * _WORD}").ravel()

    def _same(self, hashes: Hashes, keys: Encoded) -> Same:
        """Compares rows with these keys: hash and key, word by word, or the key as an object."""
        records, objects, words = self._records.ravel(), self._keys, self._words
        wanted = self._key_words(keys)

        def same(rows: RowNumbers, which: Positions | slice) -> npt.NDArray[np.bool_]:
            at = rows.astype(np.intp)
            at *= words
            match: npt.NDArray[np.bool_] = records.take(at) == hashes.view(np.uint64)[which]
            for word, mask in wanted:
                at += 1
                differ = records.take(at)
                differ ^= word[which]
                if mask is not None:
                    differ &= mask
                match &= differ == 0
            if objects is not None:
                close = np.flatnonzero(match)
                match[close] = objects.take(rows[close]) == keys[which][close]
            return match

        return same

    def _key_words(self, keys: Encoded) -> list[tuple[npt.NDArray[np.uint64], np.uint64 | None]]:
        """The words of keys of fixed width, each with the bits that belong to the key, if not all do."""
        width = self._key_width
        if not width:
            return []
        words = -(-width // _WORD)
        padded = np.zeros(
            len(keys), dtype=np.dtype({"names": ["key"], "formats": [f"V{width}"], "itemsize": words * _WORD})
        )
        padded["key"] = np.ascontiguousarray(keys).view(f"V{width}").ravel()
        columns = np.ascontiguousarray(padded.view(np.uint64).reshape(-1, words).T)
        last = np.uint64((1 << 8 * (width % _WORD)) - 1) if width % _WORD else None
        return [(column, last if i == words - 1 else None) for i, column in enumerate(columns)]

    def _pack(self, hashes: Hashes, keys: Encoded, values: Encoded | None) -> npt.NDArray[np.void]:
        records = np.zeros((len(hashes), self._words), dtype=np.uint64)
        fields = records.view(self._record).ravel()
        fields["hash"] = hashes.view("V8")
        for name, width, column in (("key", self._key_width, keys), ("value", self._value_width, values)):
            if width and column is not None:
                fields[name] = np.ascontiguousarray(column).view(f"V{width}").ravel()
        return self._opaque(records)

    def _write(self, rows: RowNumbers, records: npt.NDArray[np.void], values: Encoded | None) -> None:
        self._opaque(self._records)[rows] = records
        self._live[rows] = True
        if self._values is not None and values is not None:
            self._values[rows] = values

    def _allocate(self, count: int) -> RowNumbers:
        again = self._free[len(self._free) - min(count, len(self._free)) :]
        self._free = self._free[: len(self._free) - len(again)]
        fresh = np.arange(self._end, self._end + count - len(again), dtype=np.int32)
        self._end += len(fresh)
        rows = np.concatenate((again, fresh))
        self._note_touched(rows)
        return rows

    def _note_touched(self, rows: RowNumbers) -> None:
        if self._touched is not None:
            self._touched.append(rows)

    def _release(self, rows: RowNumbers) -> None:
        self._note_touched(rows)
        self._free = np.concatenate((self._free, rows))
        self._live[rows] = False
        for column in (self._keys, self._values):
            if column is not None:
                column[rows] = None

    def _grow(self, more: int) -> None:
        capacity = self.capacity + more
        if capacity > _MAX_ROWS:
            raise WorkerError(
                f"A state variable cannot hold more than {_MAX_ROWS} keys in the memory of one worker; "
                "add workers, or use the RocksDB store."
            )
        if capacity > len(self._records):
            records = np.empty((capacity, self._words), dtype=np.uint64)
            records[: self._end] = self._records[: self._end]
            self._records = records
        self._live = np.concatenate((self._live, np.zeros(more, dtype=np.bool_)))
        self._keys = _grown(self._keys, capacity, self._end)
        self._values = _grown(self._values, capacity, self._end)


def _grown(column: npt.NDArray[np.object_] | None, capacity: int, end: int) -> npt.NDArray[np.object_] | None:
    if column is None:
        return None
    grown = np.empty(capacity, dtype=object)
    grown[:end] = column[:end]
    return grown
