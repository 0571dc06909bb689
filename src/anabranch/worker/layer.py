"""A layer: what one epoch changed in a state variable, found by key, and reads through layers to the store below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from anabranch.core.schemas import Op, VariableKind
from anabranch.worker.codec import from_objects, take, to_objects
from anabranch.worker.index import RowNumbers
from anabranch.worker.rows import Changes, Entries, Keys, Shape
from anabranch.worker.table import RowTable


class Readable(Protocol):
    """What lies below the layers."""

    def read(self, keys: Keys) -> Entries: ...


class Layer(ABC):
    """The changes of one epoch. It never changes, so any number of threads may read it."""

    def __init__(self, epoch: int, changes: Changes, shape: Shape) -> None:
        self.epoch = epoch
        self.changes = changes
        #: How many entries more there are because of it: an estimate, until the layer is folded.
        self.growth = int(np.sum(changes.ops == Op.PUT)) - int(np.sum(changes.ops == Op.DELETE))
        self._table = RowTable(shape.key_width, 0)
        self._table.reserve(len(changes))
        rows = self._table.put(changes.hashes, changes.keys)
        clears = changes.ops == Op.CLEAR
        self._order(rows, np.flatnonzero(clears), np.flatnonzero(~clears))

    @property
    def size_bytes(self) -> int:
        return self._table.nbytes + self.changes.nbytes

    def keys(self) -> Keys:
        """The keys that the layer knows something about."""
        rows = self._table.rows()
        return Keys(self._table.hashes(rows), self._table.keys(rows))

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
        by_row = others[np.argsort(rows[others], kind="stable")]
        #: The changes of row r are those from starts[r] to starts[r + 1].
        self._starts = np.searchsorted(rows[by_row], np.arange(len(rows) + 1)).tolist()
        # As lists of objects, because the entries of a key are merged one by one.
        self._puts = (self.changes.ops[by_row] == Op.PUT).tolist()
        self._subkeys = to_objects(take(self.changes.subkeys, by_row)).tolist()
        self._values = to_objects(take(self.changes.values, by_row)).tolist()

    def cleared(self, rows: RowNumbers) -> npt.NDArray[np.bool_]:
        """Which of these rows hide everything below; never those that are -1."""
        hides = np.zeros(len(rows), dtype=np.bool_)
        known = rows >= 0
        hides[known] = self._cleared[rows[known]]
        return hides

    def overlay(self, row: int, entries: dict[bytes, bytes]) -> None:
        """Change the entries of a row's key as this epoch did."""
        if self._cleared[row]:
            entries.clear()
        changed = slice(self._starts[row], self._starts[row + 1])
        for put, subkey, value in zip(self._puts[changed], self._subkeys[changed], self._values[changed], strict=True):
            if put:
                entries[subkey] = value
            else:
                entries.pop(subkey, None)


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
    found = [layer.find(keys) for layer in layers]
    touched = np.zeros(len(keys), dtype=np.bool_)
    hidden = np.zeros(len(keys), dtype=np.bool_)
    for layer, rows in zip(layers, found, strict=True):
        touched |= rows >= 0
        hidden |= layer.cleared(rows)
    visible = np.flatnonzero(~hidden)
    base = below.read(keys.take(visible))
    base = Entries(visible[base.index], base.subkeys, base.values)
    changed = touched[base.index]
    # Only the keys that a layer knows are merged, entry by entry: these are few, and no column operation does it.
    merged: dict[int, dict[bytes, bytes]] = {int(i): {} for i in np.flatnonzero(touched)}
    under = base.take(changed)
    for i, subkey, value in zip(under.index.tolist(), to_objects(under.subkeys), to_objects(under.values), strict=True):
        merged[i][subkey] = value
    for layer, rows in zip(layers, found, strict=True):
        known = np.flatnonzero(rows >= 0)
        for i, row in zip(known.tolist(), rows[known].tolist(), strict=True):
            layer.overlay(row, merged[i])
    return Entries.concat([base.take(~changed), _flat(merged, shape)]).in_order()


def _flat(merged: dict[int, dict[bytes, bytes]], shape: Shape) -> Entries:
    counts = [len(entries) for entries in merged.values()]
    subkeys = [subkey for entries in merged.values() for subkey in entries]
    values = [value for entries in merged.values() for value in entries.values()]
    return Entries(
        np.repeat(np.fromiter(merged, dtype=np.intp, count=len(merged)), counts),
        from_objects(subkeys, shape.subkey_width),
        from_objects(values, shape.value_width),
    )
