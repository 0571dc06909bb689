"""An open-addressing hash index in NumPy: from 64-bit hashes to row numbers, a batch of keys at a time.

The index holds row numbers only. Whether a row really holds a key is asked of its table, so that keys with equal
hashes stay apart. Every operation works in rounds: all keys probe one slot, and those not yet settled go on to the
next one. Only one thread may change an index; others may search it as long as it does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Hashes: TypeAlias = npt.NDArray[np.int64]
RowNumbers: TypeAlias = npt.NDArray[np.int32]
Positions: TypeAlias = npt.NDArray[np.intp]
#: ``same(rows, which)``: whether row ``rows[i]`` of the table holds key number ``which[i]`` of the batch.
Same: TypeAlias = Callable[[RowNumbers, "Positions | slice"], npt.NDArray[np.bool_]]

ABSENT = -1
_EMPTY = np.int32(-1)  #: never used: ends a search
_GONE = np.int32(-2)  #: was used: a search goes on

_MAX_LOAD = 0.6
_MIN_CAPACITY = 64
#: 2^64 divided by the golden ratio: spreads the bits of a hash over the upper bits of the product.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
#: Rows placed at a time when an index is rebuilt, so that what a round works on stays in the processor's cache.
_REBUILD_ROWS = 1 << 16


class HashIndex:
    """Row numbers by hash."""

    def __init__(self, rows: int = 0) -> None:
        """An empty index with room for some rows."""
        self._slots = np.full(_capacity_for(rows), _EMPTY, dtype=np.int32)
        self._live = 0
        #: Slots that are not empty; searches are fast as long as these are few.
        self._used = 0

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def rows(self) -> RowNumbers:
        """The rows in the index, in no order."""
        return self._slots[self._slots >= 0]

    def find(self, hashes: Hashes, same: Same) -> tuple[RowNumbers, Positions]:
        """Of each key, its row or ABSENT, and the slot it was found in."""
        slots = self._slots
        found = np.full(len(hashes), ABSENT, dtype=np.int32)
        found_at = np.zeros(len(hashes), dtype=np.intp)
        which: Positions | slice = slice(None)
        at = _home(hashes, len(slots))
        while len(at):
            rows = slots.take(at)
            hit = rows >= 0
            hit &= same(np.maximum(rows, 0), which)
            missed = np.flatnonzero(~hit & (rows != _EMPTY))
            if isinstance(which, slice):
                np.copyto(found, rows, where=hit)
                np.copyto(found_at, at, where=hit)
                which = missed
            else:
                found[which[hit]] = rows[hit]
                found_at[which[hit]] = at[hit]
                which = which[missed]
            at = (at[missed] + 1) & (len(slots) - 1)
        return found, found_at

    def insert(self, hashes: Hashes, rows: RowNumbers, same: Same) -> RowNumbers:
        """Add keys that are absent, as these rows; of equal keys, one is added.

        Returns the row that now holds each key. The table must hold the rows already, and ``reserve`` must have
        made room.
        """
        slots, rows = self._slots, rows.copy()
        which = np.arange(len(hashes))
        at = _home(hashes, len(slots))
        while len(which):
            mine = rows[which]
            # Keys that meet in an empty slot all write to it; one write stays, and the others see that they lost.
            empty = slots.take(at) == _EMPTY
            slots[at[empty]] = mine[empty]
            holder = slots.take(at)
            lost = np.flatnonzero(holder != mine)
            self._live += len(which) - len(lost)
            self._used += len(which) - len(lost)
            which, at, holder = which[lost], at[lost], holder[lost]
            twin = (holder >= 0) & same(np.maximum(holder, 0), which)
            rows[which[twin]] = holder[twin]
            which, at = which[~twin], (at[~twin] + 1) & (len(slots) - 1)
        return rows

    def insert_new(self, hashes: Hashes, rows: RowNumbers) -> None:
        """Add keys that are absent and differ from each other."""
        self.insert(hashes, rows, _all_differ)

    def remove(self, slots: Positions) -> None:
        """Take the rows in these slots, each named once, out of the index."""
        after = self._slots.take((slots + 1) & (len(self._slots) - 1))
        # No search goes on past an empty slot, so none needs to be led past a removed row in front of one.
        ends = after == _EMPTY
        self._slots[slots] = np.where(ends, _EMPTY, _GONE)
        self._live -= len(slots)
        self._used -= int(np.count_nonzero(ends))

    def has_room(self, more: int) -> bool:
        return self._used + more <= _MAX_LOAD * len(self._slots)

    def reserve(self, more: int, hashes_of: Callable[[RowNumbers], Hashes]) -> None:
        """Make room for more rows. A concurrent search goes on in the slots with which it began."""
        if self.has_room(more):
            return
        # Half as much again, lest removed rows alone bring the next rebuild about soon.
        grown = HashIndex(max(self._live + more, self._live * 3 // 2))
        rows = self.rows()
        for start in range(0, len(rows), _REBUILD_ROWS):
            part = rows[start : start + _REBUILD_ROWS]
            grown.insert_new(hashes_of(part), part)
        self._slots, self._used = grown._slots, grown._used


def _all_differ(rows: RowNumbers, _: Positions | slice) -> npt.NDArray[np.bool_]:
    return np.zeros(len(rows), dtype=np.bool_)


def _capacity_for(rows: int) -> int:
    return 1 << max(int(rows / _MAX_LOAD), _MIN_CAPACITY - 1).bit_length()


def _home(hashes: Hashes, capacity: int) -> Positions:
    """The slot where the search for each hash begins.

    The lower bits alone would cluster: all keys of a key group share them.
    """
    bits = hashes.view(np.uint64)
    spread = (bits ^ (bits >> _HALF)) * _SPREAD
    return (spread >> np.uint64(64 - (capacity.bit_length() - 1))).view(np.intp)
