"""A layer: what one epoch changed in a state variable, found by key, and reads through layers to the store below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from anabranch.core.schemas import Op, VariableKind
from anabranch.worker.state.codec import hashes_of, take
from anabranch.worker.state.hash_index import RowNumbers
from anabranch.worker.state.rows import Changes, Entries, Keys, Shape
from anabranch.worker.state.table import RowTable

if TYPE_CHECKING:
    from anabranch.worker.state.due_index import LayerTimes

_ODD = np.int64(0x2545F4914F6CDD1D)


class Readable(Protocol):
    """What lies below the layers."""

    def read(self, keys: Keys) -> Entries: ...


class Layer(ABC):
    """The changes of one epoch. They never change, so any number of threads may read them."""

    def __init__(self, epoch: int, changes: Changes, shape: Shape) -> None:
        self.epoch = epoch
        self.changes = changes
        #: How many entries more there are because of it: an estimate, until the layer is folded.
        self.growth = int(np.sum(changes.ops == Op.PUT)) - int(np.sum(changes.ops == Op.DELETE))
        #: When the rows that it puts are due, if anybody wants to know.
        self.times: LayerTimes | None = None
        self._table = RowTable(shape.key_width, 0)
        rows = self._table.add(changes.hashes, changes.keys)
        clears = changes.ops == Op.CLEAR
        self._order(rows, np.flatnonzero(clears), np.flatnonzero(~clears))

    @property
    def size_bytes(self) -> int:
        return self._table.nbytes + self.changes.nbytes

    def keys(self) -> Keys:
        """The keys that the layer knows something about."""
        return keys_in(self._table)

    def find(self, keys: Keys) -> RowNumbers:
        """The layer's row of each key, or -1."""
        return self._table.find(keys.hashes, keys.keys)

    def without(self, groups: npt.NDArray[np.bool_], shape: Shape) -> Layer:
        """The same layer without some key groups."""
        return type(self)(self.epoch, self.changes.take(~groups[shape.groups_of(self.changes.hashes)]), shape)

    @abstractmethod
    def _order(self, rows: RowNumbers, clears: npt.NDArray[np.intp], others: npt.NDArray[np.intp]) -> None:
        """Arrange the changes by the rows of their keys."""


class ValueLayer(Layer):
    """A layer of a variable with one value per key: each key has one change that counts."""

    def _order(self, rows: RowNumbers, clears: npt.NDArray[np.intp], others: npt.NDArray[np.intp]) -> None:
        self._change_of = np.empty(len(rows), dtype=np.intp)
        # What follows a CLEAR of the same key replaces it.
        self._change_of[rows[clears]] = clears
        self._change_of[rows[others]] = others

    def values_of(self, rows: RowNumbers) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.generic]]:
        """Of these rows, which have a value, and the values of those."""
        changes = self._change_of[rows]
        puts = self.changes.ops[changes] == Op.PUT
        return puts, take(self.changes.values, changes[puts])


class EntryLayer(Layer):
    """A layer of a list or map variable: entries of a key that changed, perhaps after a CLEAR."""

    def _order(self, rows: RowNumbers, clears: npt.NDArray[np.intp], others: npt.NDArray[np.intp]) -> None:
        self._cleared = np.zeros(len(rows), dtype=np.bool_)
        self._cleared[rows[clears]] = True
        self._by_row = others[np.argsort(rows[others], kind="stable")]
        #: The changes of row r, by row, are those from starts[r] to starts[r + 1].
        self._starts = np.searchsorted(rows[self._by_row], np.arange(len(rows) + 1))

    def cleared(self, rows: RowNumbers) -> npt.NDArray[np.bool_]:
        """Which of these rows hide everything below."""
        return self._cleared[rows]

    def changes_of(self, rows: RowNumbers) -> tuple[npt.NDArray[np.intp], Changes]:
        """The changes of entries of these rows, and the position among the rows of each."""
        counts = self._starts[rows + 1] - self._starts[rows]
        owner = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        return owner, self.changes.take(self._by_row[self._starts[rows][owner] + within])


def keys_in(table: RowTable) -> Keys:
    """The keys of a table."""
    rows = table.rows()
    return Keys(table.hashes(rows), table.keys(rows))


def make_layer(epoch: int, changes: Changes, shape: Shape) -> Layer:
    of_values = shape.kind is VariableKind.VALUE
    return ValueLayer(epoch, changes, shape) if of_values else EntryLayer(epoch, changes, shape)


def read_through(keys: Keys, layers: Sequence[Layer], below: Readable, shape: Shape) -> Entries:
    """The entries of these keys under the layers, oldest first, and what is below; ordered by the keys' positions."""
    if not layers:
        return below.read(keys)
    if shape.kind is VariableKind.VALUE:
        return _read_values(keys, [layer for layer in layers if isinstance(layer, ValueLayer)], below)
    return _read_entries(keys, [layer for layer in layers if isinstance(layer, EntryLayer)], below, shape)


def _read_values(keys: Keys, layers: Sequence[ValueLayer], below: Readable) -> Entries:
    """The newest layer that knows a key decides."""
    parts: list[Entries] = []
    pending = np.arange(len(keys))
    wanted = keys
    for layer in reversed(layers):
        rows = layer.find(wanted)
        known = rows >= 0
        if not known.any():
            continue
        puts, values = layer.values_of(rows[known])
        index = pending[known][puts]
        parts.append(Entries(index, np.empty((len(index), 0), dtype=np.uint8), values))
        pending = pending[~known]
        wanted = keys.take(pending)
    rest = below.read(wanted)
    parts.append(Entries(pending[rest.index], rest.subkeys, rest.values))
    return Entries.concat(parts).in_order()


def _read_entries(keys: Keys, layers: Sequence[EntryLayer], below: Readable, shape: Shape) -> Entries:
    """Entry by entry, the newest layer decides; a CLEAR hides all that is older."""
    touched = np.zeros(len(keys), dtype=np.bool_)
    #: The number of the layer that cleared the key last.
    cleared_by = np.full(len(keys), -1)
    known: list[tuple[npt.NDArray[np.intp], RowNumbers]] = []
    for number, layer in enumerate(layers):
        rows = layer.find(keys)
        at = np.flatnonzero(rows >= 0)
        known.append((at, rows[at]))
        touched[at] = True
        cleared_by[at[layer.cleared(rows[at])]] = number
    visible = np.flatnonzero(cleared_by < 0)
    base = below.read(keys.take(visible))
    base = Entries(visible[base.index], base.subkeys, base.values)
    under = touched[base.index]
    parts, puts = [base.take(under)], [np.ones(np.count_nonzero(under), dtype=np.bool_)]
    for number, (layer, (at, rows)) in enumerate(zip(layers, known, strict=True)):
        shown = cleared_by[at] <= number
        owner, changes = layer.changes_of(rows[shown])
        parts.append(Entries(at[shown][owner], changes.subkeys, changes.values))
        puts.append(changes.ops == Op.PUT)
    merged = newest(Entries.concat(parts), np.concatenate(puts), shape)
    return Entries.concat([base.take(~under), merged]).in_order()


def newest(entries: Entries, puts: npt.NDArray[np.bool_], shape: Shape) -> Entries:
    """Of entries from oldest to newest, the last one of each sub-key of each key, unless that is no put."""
    table = RowTable(shape.subkey_width, 0)
    # An odd factor gives every key a number of its own, so that hash and sub-key together tell entries apart.
    hashes = hashes_of(entries.subkeys) ^ (entries.index.astype(np.int64) * _ODD)
    rows = table.add(hashes, entries.subkeys)
    last = np.empty(len(entries), dtype=np.intp)
    last[rows] = np.arange(len(entries))
    newest = np.sort(last[table.rows()])
    return entries.take(newest[puts[newest]])
