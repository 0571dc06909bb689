"""A map state variable over the local copy of a task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from pyspark.sql.streaming.stateful_processor import MapState

from anabranch.core.schemas import Op, VariableSpec
from anabranch.operators.process.columns import row_class
from anabranch.operators.process.tuples import Tuple, TupleCodec
from anabranch.operators.process.variable import Changes, Cursor, Entries, OutOfTurn


class LocalMapState(MapState):
    """Spark's MapState: tuples by tuples, for each key of the stage. An empty map does not exist."""

    def __init__(self, variable: VariableSpec, cursor: Cursor) -> None:
        self.variable = variable
        self._stateName = variable.name
        self._cursor = cursor
        self._keys = TupleCodec(variable.map_key, variable.name, role="map key")
        self._values = TupleCodec(variable.value, variable.name)
        self._row = row_class(self._values.names)
        #: By position of the key: its map, once used. Map keys are frozen.
        self._maps: Any = OutOfTurn(variable.name)
        #: By position of the key: the map keys set or removed, each with whether the state holds it
        #: (after a clear, it holds none).
        self._touched: dict[int, dict[Tuple, bool]] = {}
        #: Positions of the keys whose map was cleared.
        self._cleared: set[int] = set()
        self._entries: Entries | None = None
        self._stored: tuple[list[Tuple], list[Tuple]] | None = None
        self._bounds: list[int] = []

    def exists(self) -> bool:
        return bool(self._current(self._cursor.key))

    def getValue(self, key: Tuple) -> Tuple | None:
        value = self._current(self._cursor.key).get(self._freeze(key))
        return None if value is None else tuple.__new__(self._row, self._copied(value))

    def containsKey(self, key: Tuple) -> bool:
        return self._freeze(key) in self._current(self._cursor.key)

    def updateValue(self, key: Tuple, value: Tuple) -> None:
        frozen = self._freeze(key)
        admitted = self._values.admit(value)
        entries = self._current(self._cursor.key)
        self._touch(frozen, entries)
        entries[frozen] = admitted

    def removeKey(self, key: Tuple) -> None:
        frozen = self._freeze(key)
        entries = self._current(self._cursor.key)
        if frozen in entries:
            self._touch(frozen, entries)
            del entries[frozen]

    def clear(self) -> None:
        key = self._cursor.key
        self._maps[key] = {}
        self._touched.pop(key, None)
        self._cleared.add(key)

    # Spark's iterators, too, look at the state when they are first asked for an element, and not again.

    def iterator(self) -> Iterator[tuple[Tuple, Tuple]]:
        for key, value in list(self._current(self._cursor.key).items()):
            yield self._thawed(key), self._copied(value)

    def keys(self) -> Iterator[Tuple]:
        yield from map(self._thawed, list(self._current(self._cursor.key)))

    def values(self) -> Iterator[Tuple]:
        yield from map(self._copied, list(self._current(self._cursor.key).values()))

    def _freeze(self, key: Tuple) -> Tuple:
        admitted = self._keys.admit(key)
        return admitted if self._keys.freeze is None else self._keys.freeze(admitted)

    def _thawed(self, key: Tuple) -> Tuple:
        return key if self._keys.thaw is None else self._keys.thaw(key)

    def _copied(self, value: Tuple) -> Tuple:
        return value if self._values.copy is None else self._values.copy(value)

    def _touch(self, frozen: Tuple, entries: dict[Tuple, Tuple]) -> None:
        key = self._cursor.key
        touched = self._touched.setdefault(key, {})
        if frozen not in touched:
            touched[frozen] = key not in self._cleared and frozen in entries

    def _current(self, key: int) -> dict[Tuple, Tuple]:
        entries: dict[Tuple, Tuple] | None = self._maps.get(key)
        if entries is None:
            if self._stored is None:
                self._load()
            assert self._stored is not None
            stored = slice(self._bounds[key], self._bounds[key + 1])
            entries = dict(zip(self._stored[0][stored], self._stored[1][stored], strict=True))
            self._maps[key] = entries
            assert self._entries is not None
            if (expired := self._entries.expired) is not None:
                # Removed, unless user code sets them again.
                for position in (np.flatnonzero(expired[stored]) + stored.start).tolist():
                    frozen = self._stored[0][position]
                    self._touched.setdefault(key, {})[frozen] = True
                    del entries[frozen]
        return entries

    def _load(self) -> None:
        """Turns the stored columns into tuples, when user code first asks for one."""
        assert self._entries is not None
        columns, length = self._entries.columns, len(self._entries.owners)
        split = len(self._keys.names)
        keys = self._keys.load(columns[:split], length)
        if self._keys.freeze is not None:
            keys = list(map(self._keys.freeze, keys))
        self._stored = keys, self._values.load(columns[split:], length)
        self._bounds = self._entries.bounds()

    def begin(self, entries: Entries) -> None:
        self._entries = entries
        self._maps, self._touched, self._cleared, self._stored = {}, {}, set(), None

    def end(self) -> Changes | None:
        assert self._entries is not None
        if self._entries.expired is not None:
            for owner in np.unique(self._entries.owners[self._entries.expired]).tolist():
                self._current(owner)
        stored, maps = set(self._entries.owners.tolist()) if self._cleared else set(), self._maps
        self._entries, self._maps, self._stored = None, OutOfTurn(self.variable.name), None
        owners: list[int] = []
        ops: list[int] = []
        keys: list[Tuple | None] = []
        values: list[Tuple | None] = []

        def change(owner: int, op: int, key: Tuple | None, value: Tuple | None) -> None:
            owners.append(owner)
            ops.append(op)
            keys.append(key)
            values.append(value)

        for owner in sorted(self._cleared & stored):
            change(owner, Op.CLEAR, None, None)
        for owner, touched in self._touched.items():
            entries = maps[owner]
            for frozen, held in touched.items():
                if frozen in entries:
                    change(owner, Op.PUT, self._thawed(frozen), entries[frozen])
                elif held:
                    change(owner, Op.DELETE, self._thawed(frozen), None)
        if not owners:
            return None
        columns = [*self._keys.dump(keys), *self._values.dump(values)]
        return Changes(np.array(owners, np.int64), np.array(ops, np.int8), columns)
