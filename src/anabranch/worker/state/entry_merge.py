"""What is left of the entries of a list or map variable after many changes, in columns.

A store finds the entries of any key at any time, and keeps a dict for each key to do so. Whoever only wants to know
what is left in the end, as compaction does, need not pay for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa

from anabranch.core.schemas import Layout, Op
from anabranch.worker.state.layer import newest
from anabranch.worker.state.rows import Changes, Entries, Rows, Shape, VariableCodec
from anabranch.worker.state.table import RowTable

#: Changes that may wait to be merged; more, if what has been merged is much more than that.
_WAITING_ROWS_MAX = 1 << 18
_BATCH_ROWS = 1 << 16


class EntryMerge:
    """Takes changes in the order in which they were made, and gives out the entries that are left."""

    def __init__(self, layout: Layout, key_groups: int) -> None:
        self._layout = layout
        self._codec = VariableCodec(layout)
        self._shape = self._codec.shape(key_groups)
        #: Entries as changes that put them.
        self._merged = self._codec.encode_changes(layout.changes.empty_table())
        self._waiting: list[Changes] = []

    def load(self, changes: pa.Table) -> None:
        """Changes, ``layout.changes``, of an epoch after those before."""
        self._waiting.append(self._codec.encode_changes(changes))
        if sum(map(len, self._waiting)) > max(_WAITING_ROWS_MAX, len(self._merged) // 2):
            self._merge()

    def rows_at_most(self) -> int:
        return len(self._merged) + sum(map(len, self._waiting))

    def rows(self) -> int:
        self._merge()
        return len(self._merged)

    def drop_groups(self, groups: Collection[int]) -> None:
        self._merge()
        kept = ~self._shape.chosen(groups)
        self._merged = self._merged.take(kept[self._shape.groups_of(self._merged.hashes)])

    def scan(self) -> Iterator[pa.RecordBatch]:
        """What is left, ``layout.rows``, in bounded batches and no order."""
        self._merge()
        for start in range(0, len(self._merged), _BATCH_ROWS):
            part = self._merged.take(np.arange(start, min(start + _BATCH_ROWS, len(self._merged))))
            yield self._codec.decode_rows(Rows(part.hashes, part.keys, part.subkeys, part.values))

    def _merge(self) -> None:
        if self._waiting:
            self._merged, self._waiting = _left([self._merged, *self._waiting], self._shape), []


def _left(parts: Sequence[Changes], shape: Shape) -> Changes:
    """The entries that are left after changes, one part after the other, as changes that put them."""
    changes = Changes.concat(parts)
    sizes = [len(part) for part in parts]
    table = RowTable(shape.key_width, 0)
    table.reserve(len(changes))
    rows = table.put(changes.hashes, changes.keys)
    # Within a part, a CLEAR comes before all others of its key: it hides what is in earlier parts.
    starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    cleared = changes.ops == Op.CLEAR
    hidden_before = np.zeros(int(rows.max(initial=-1)) + 1, dtype=np.intp)
    np.maximum.at(hidden_before, rows[cleared], starts[cleared])
    puts = (changes.ops == Op.PUT) & (np.arange(len(changes)) >= hidden_before[rows])
    others = np.flatnonzero(~cleared)
    entries = Entries(rows[others].astype(np.intp), changes.subkeys[others], changes.values[others])
    left = newest(entries, puts[others], shape)
    of = left.index.astype(rows.dtype)
    ops = np.full(len(left), Op.PUT, dtype=np.int8)
    return Changes(table.hashes(of), ops, table.keys(of), left.subkeys, left.values)
