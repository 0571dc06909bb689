"""State in memory for simulated workers: small twins of the tables and of the variable's state that workers have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from epoch_history import Row, State

from anabranch.core.errors import EpochError
from anabranch.core.ids import NO_EPOCH, Epoch

#: Counts, each with what tells apart the attempts that may have written it: a mixture of two runs does not go unseen.
Value = tuple[int, tuple[int, ...]]
#: None: the key is deleted.
Change = tuple[Row, Value | None]
Changes = dict[Row, Value | None]


class Rows:
    """Changes, or keys, as a table: as much of one as adoptions and migrations use."""

    __slots__ = ("changes", "hashes")

    def __init__(self, changes: Sequence[Change], hashes: npt.NDArray[np.int64]) -> None:
        self.changes = changes
        self.hashes = hashes

    @staticmethod
    def of(changes: Iterable[Change], hash_of: Mapping[Row, int]) -> Rows:
        listed = list(changes)
        return Rows(listed, np.array([hash_of[row] for row, _ in listed], dtype=np.int64))

    @staticmethod
    def of_keys(keys: Iterable[Row], hash_of: Mapping[Row, int]) -> Rows:
        return Rows.of([(row, None) for row in keys], hash_of)

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    @property
    def keys(self) -> list[Row]:
        return [row for row, _ in self.changes]

    @property
    def nbytes(self) -> int:
        return len(self.changes)

    def column(self, _hash: str) -> Hashes:
        return Hashes(self.hashes)

    def take(self, positions: Any) -> Rows:
        indexes = positions.to_pylist() if hasattr(positions, "to_pylist") else list(positions)
        return Rows([self.changes[index] for index in indexes], self.hashes[indexes])

    def slice(self, start: int, length: int) -> Rows:
        chosen = slice(start, start + length)
        return Rows(self.changes[chosen], self.hashes[chosen])


class Hashes:
    """The one column that anybody looks into."""

    def __init__(self, hashes: npt.NDArray[np.int64]) -> None:
        self._hashes = hashes

    def to_numpy(self) -> npt.NDArray[np.int64]:
        return self._hashes


class DictKnown:
    """A growing set of whole keys."""

    def __init__(self) -> None:
        self.keys: set[Row] = set()

    def missing(self, keys: Rows) -> Rows:
        return self.without(keys)

    def add(self, keys: Rows) -> None:
        self.keys.update(keys.keys)

    def without(self, changes: Rows) -> Rows:
        unknown = [index for index, (row, _) in enumerate(changes) if row not in self.keys]
        return changes if len(unknown) == len(changes) else changes.take(unknown)


class DictState:
    """The state of one variable: a base, and one layer for each of the latest epochs."""

    def __init__(self, group_of: dict[Row, int]) -> None:
        self._group_of = group_of
        self.base: dict[Row, Value] = {}
        self.layers: list[tuple[Epoch, Changes]] = []
        #: The oldest epoch that can be read.
        self.oldest = NO_EPOCH
        #: The keys that the newest epoch has changed.
        self.recent: Collection[Row] = ()

    def known_keys(self) -> DictKnown:
        return DictKnown()

    def load(self, changes: Iterable[Change]) -> None:
        for row, value in changes:
            if value is None:
                self.base.pop(row, None)
            else:
                self.base[row] = value

    def make_room(self, entries: int) -> None:
        """A dictionary grows by itself."""

    def rows(self, as_of: Epoch | None = None) -> dict[Row, Value]:
        """All that is here, as of an epoch (None: of the newest layer)."""
        if as_of is not None and as_of < self.oldest:
            raise EpochError(f"epoch {as_of} has been folded")
        layers = [layer for epoch, layer in self.layers if as_of is None or epoch <= as_of]
        if not layers:
            return self.base
        return applied([*self.base.items(), *(change for layer in layers for change in layer.items())])

    def scan(self, groups: Collection[int]) -> list[tuple[Row, Value]]:
        group_of = self._group_of
        return [(row, value) for row, value in self.rows().items() if group_of[row] in groups]

    def scan_recent(self, groups: Collection[int]) -> list[tuple[Row, Value]]:
        return [(row, value) for row, value in self.scan(groups) if row in self.recent]

    def add_layer(self, epoch: Epoch, changes: Changes) -> None:
        if epoch <= (self.layers[-1][0] if self.layers else self.oldest):
            raise EpochError(f"epoch {epoch} is here already")
        self.recent = changes
        self.layers.append((epoch, changes))

    def drop_layers_after(self, epoch: Epoch) -> None:
        self.layers = [layer for layer in self.layers if layer[0] <= epoch]

    def fold(self, up_to: Epoch) -> None:
        for epoch, changes in self.layers:
            if epoch <= up_to:
                self.load(changes.items())
                self.oldest = epoch
        self.layers = [layer for layer in self.layers if layer[0] > up_to]

    def drop_groups(self, groups: Collection[int]) -> None:
        group_of = self._group_of
        self.base = {row: value for row, value in self.base.items() if group_of[row] not in groups}
        self.layers = [
            (epoch, {row: value for row, value in changes.items() if group_of[row] not in groups})
            for epoch, changes in self.layers
        ]

    def close(self) -> None:
        self.base, self.layers = {}, []


def applied(changes: Iterable[Change]) -> dict[Row, Value]:
    state: dict[Row, Value] = {}
    for row, value in changes:
        if value is None:
            state.pop(row, None)
        else:
            state[row] = value
    return state


def counts_of(state: Mapping[Row, Value]) -> State:
    return {row: count for row, (count, _) in state.items()}
