"""Twins of the state of a variable and of what compaction merges, in dictionaries.

The state of production is made for millions of rows; a simulated job has twenty, and nearly all of its time would go
into NumPy and Arrow. Most histories therefore use these, which answer exactly alike (``test_twins``); the family
"real" keeps what runs in production. All that decides who has which key, of which epoch, is production's in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pyarrow as pa

from anabranch.core.errors import EpochError
from anabranch.core.eventtime import FIRST_TIME, EventTime
from anabranch.core.schemas import HASH, OP, Layout, Op, VariableKind

#: The hash, and the fields of the key.
Key = tuple[Any, ...]
#: The values of a key by what tells them apart.
Entries = dict[tuple[Any, ...], tuple[Any, ...]]


def tuples_of(table: pa.Table | pa.RecordBatch, names: Iterable[str]) -> list[tuple[Any, ...]]:
    """Some columns of a table, row by row."""
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def batch_of(rows: Collection[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class Changes:
    """The changes of a table, in their order."""

    def __init__(self, layout: Layout, table: pa.Table) -> None:
        keys, subkeys, values = len(layout.keys), len(layout.subkey), len(layout.value)
        self.rows: list[tuple[Key, int, tuple[Any, ...], tuple[Any, ...]]] = []
        for hash_, op, *rest in zip(*(column.to_pylist() for column in table.columns), strict=True):
            key = (hash_, *rest[: keys - 1])
            self.rows.append((key, op, tuple(rest[keys - 1 : keys - 1 + subkeys]), tuple(rest[len(rest) - values :])))

    def apply_to(self, state: dict[Key, Entries], only: Key | None = None) -> None:
        for key, op, subkey, value in self.rows:
            if only is not None and key != only:
                continue
            if op == Op.PUT:
                state.setdefault(key, {})[subkey] = value
            elif op == Op.CLEAR:
                state.pop(key, None)
            elif key in state:
                state[key].pop(subkey, None)
                if not state[key]:
                    del state[key]


class DictMerge:
    """What is left after changes, as EntryMerge tells it."""

    def __init__(self, layout: Layout, key_groups: int) -> None:
        self.layout = layout
        self._key_groups = key_groups
        self._state: dict[Key, Entries] = {}

    def load(self, changes: pa.Table) -> None:
        Changes(self.layout, changes).apply_to(self._state)

    def rows(self) -> int:
        return sum(map(len, self._state.values()))

    rows_at_most = rows

    def drop_groups(self, groups: Collection[int]) -> None:
        self._state = {key: found for key, found in self._state.items() if key[0] % self._key_groups not in groups}

    def scan(self) -> Iterator[pa.RecordBatch]:
        rows = [(*key, *subkey, *value) for key, found in self._state.items() for subkey, value in found.items()]
        if rows:
            yield batch_of(rows, self.layout.rows)


class DictKnown:
    """A growing set of whole keys, as KnownKeys."""

    def __init__(self, layout: Layout) -> None:
        self._names = layout.keys.names
        self._keys: set[Key] = set()

    def add(self, keys: pa.Table) -> None:
        self._keys.update(tuples_of(keys, self._names))

    def missing(self, keys: pa.Table) -> pa.Table:
        new = [index for index, key in enumerate(tuples_of(keys, self._names)) if key not in self._keys]
        return keys if len(new) == len(keys) else keys.take(pa.array(new, pa.int64()))

    without = missing

    def added(self, keys: pa.Table) -> pa.Table:
        new = []
        for index, key in enumerate(tuples_of(keys, self._names)):
            if key not in self._keys:
                self._keys.add(key)
                new.append(index)
        return keys.take(pa.array(new, pa.int64()))


class DictState:
    """The state of one variable as of each epoch that is still told apart, as VariableState."""

    def __init__(self, layout: Layout, key_groups: int) -> None:
        self.layout = layout
        self._key_groups = key_groups
        self._store: dict[Key, Entries] = {}
        self._layers: list[tuple[int, Changes]] = []
        #: The keys that the newest layer has changed.
        self._latest: list[Key] = []
        self.oldest: int | None = None

    @property
    def newest(self) -> int | None:
        return self._layers[-1][0] if self._layers else self.oldest

    def read(self, keys: pa.Table | pa.RecordBatch, epoch: int) -> pa.RecordBatch:
        self._check_held(epoch)
        rows = []
        for index, key in enumerate(tuples_of(keys, self.layout.keys.names)):
            entries = self._entries(key, epoch)
            listed = self.layout.variable.kind is VariableKind.LIST
            order = sorted(entries) if listed else list(entries)
            rows += [(index, *subkey, *entries[subkey]) for subkey in order]
        return batch_of(rows, self.layout.answers)

    def read_in_batches(self, keys: pa.Table | pa.RecordBatch, epoch: int) -> Iterator[pa.RecordBatch]:
        return iter([self.read(keys, epoch)])

    def add_layer(self, epoch: int, changes: pa.Table) -> None:
        newest = self.newest
        if newest is not None and epoch <= newest:
            raise EpochError(f"The changes of epoch {newest} are here already, and not those of epoch {epoch}.")
        self._layers.append((epoch, Changes(self.layout, changes)))
        self._latest = [row[0] for row in self._layers[-1][1].rows]

    def drop_layers_after(self, epoch: int) -> None:
        self._check_held(epoch)
        self._layers = [layer for layer in self._layers if layer[0] <= epoch]

    def fold(self, up_to: int) -> None:
        while self._layers and self._layers[0][0] <= up_to:
            self.oldest, changes = self._layers.pop(0)
            changes.apply_to(self._store)

    def scan(
        self, epoch: int, groups: Collection[int] | None = None, without: pa.Table | None = None
    ) -> Iterator[pa.RecordBatch]:
        self._check_held(epoch)
        seen = set(tuples_of(without, self.layout.keys.names)) if without is not None else set()
        rows = [
            (*key, *subkey, *value)
            for key in self._keys(epoch)
            if key not in seen and (groups is None or key[0] % self._key_groups in groups)
            for subkey, value in self._entries(key, epoch).items()
        ]
        return iter([batch_of(rows, self.layout.rows)] if rows else [])

    def due(
        self,
        epoch: int,
        groups: Collection[int],
        event_time: EventTime,
        up_to: int,
        *,
        since: int = FIRST_TIME,
        whole_keys: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        rows = pa.Table.from_batches(list(self.scan(epoch, groups)), schema=self.layout.rows)
        if not len(rows):
            return iter(())
        if not whole_keys:
            return iter(rows.filter(event_time.is_over(rows, up_to)).to_batches())
        keys = tuples_of(rows, self.layout.keys.names)
        times = event_time.of(rows).to_pylist()
        due = {key for key, time in zip(keys, times, strict=True) if time is not None and since <= time <= up_to}
        return iter(rows.filter(pa.array([key in due for key in keys])).to_batches())

    def latest(self, epoch: int, groups: Collection[int]) -> Iterator[pa.RecordBatch]:
        rows = [
            (*key, *subkey, *value)
            for key in dict.fromkeys(self._latest)
            if key[0] % self._key_groups in groups
            for subkey, value in self._entries(key, epoch).items()
        ]
        return iter([batch_of(rows, self.layout.rows)] if rows else [])

    def expect_unnoticed(self, groups: Collection[int]) -> None: ...

    def forget_due(self, groups: Collection[int]) -> None: ...

    def known_keys(self) -> DictKnown:
        return DictKnown(self.layout)

    def make_room(self, rows: int) -> None: ...

    def load(self, changes: pa.Table) -> None:
        Changes(self.layout, changes).apply_to(self._store)

    def drop_groups(self, groups: Collection[int]) -> None:
        gone = frozenset(groups)
        self._store = {key: found for key, found in self._store.items() if key[0] % self._key_groups not in gone}
        for _, changes in self._layers:
            changes.rows = [row for row in changes.rows if row[0][0] % self._key_groups not in gone]

    def rows(self, without: Collection[int] = ()) -> int:
        newest = self.newest or 0
        keys = [key for key in self._keys(newest) if key[0] % self._key_groups not in without]
        return sum(len(self._entries(key, newest)) for key in keys)

    def bytes(self) -> int:
        return 100 * len(self._store)

    def close(self) -> None:
        self._layers, self._store = [], {}

    def _check_held(self, epoch: int) -> None:
        if self.oldest is not None and epoch < self.oldest:
            raise EpochError(
                f"The state is no longer held as of epoch {epoch}: it has been merged up to {self.oldest}."
            )

    def _keys(self, epoch: int) -> list[Key]:
        keys = dict.fromkeys(self._store)
        for layer, changes in self._layers:
            if layer <= epoch:
                keys.update(dict.fromkeys(row[0] for row in changes.rows))
        return list(keys)

    def _entries(self, key: Key, epoch: int) -> Entries:
        state = {key: dict(self._store[key])} if key in self._store else {}
        for layer, changes in self._layers:
            if layer <= epoch:
                changes.apply_to(state, key)
        return state.get(key, {})


assert (HASH, OP) == ("_hash", "_op"), "Changes takes the columns of changes in this order"
