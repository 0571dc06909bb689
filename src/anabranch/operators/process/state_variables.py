"""Spark's value, list and map states over the local copy of a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState

from anabranch.core.schemas import Op, VariableSpec
from anabranch.operators.process.tuples import Tuple, TupleCodec, row_class
from anabranch.operators.process.variable import NO_ENTRIES, Cursor, OutOfTurn, WindowChanges, WindowEntries

#: In place of a count of kept elements: the whole list was replaced.
_REPLACED = -1


class _LocalVariable:
    """What state variables share: the current key, and the stored entries of the window."""

    def __init__(self, variable: VariableSpec, cursor: Cursor) -> None:
        self.variable = variable
        #: Spark's name of the attribute.
        self._stateName = variable.name
        self._cursor = cursor
        self._codec = TupleCodec(variable.value, variable.name)
        self._entries = NO_ENTRIES


class LocalValueState(_LocalVariable, ValueState):
    """Spark's ValueState: at most one tuple for each key."""

    def __init__(self, variable: VariableSpec, cursor: Cursor) -> None:
        super().__init__(variable, cursor)
        self._types = self._codec.types
        #: By position of the key: the tuple, or None.
        self._values: Any = OutOfTurn(variable.name)
        #: By position of the key: 1 if user code has set or cleared the value.
        self._changed = bytearray()

    def exists(self) -> bool:
        return self._values[self._cursor.key] is not None

    def get(self) -> Tuple | None:
        return self._values[self._cursor.key]  # type: ignore[no-any-return]

    def update(self, newValue: Tuple) -> None:
        # Nearly every call: a plain tuple of plain values. The rest is for the codec.
        value = newValue
        if type(value) is not tuple or tuple(map(type, value)) != self._types:
            value = self._codec.admit(value)
        key = self._cursor.key
        self._values[key] = value
        self._changed[key] = 1

    def clear(self) -> None:
        key = self._cursor.key
        self._values[key] = None
        self._changed[key] = 1

    def begin(self, entries: WindowEntries) -> None:
        self._entries = entries
        self._values = _Unloaded(self)
        self._changed = bytearray(entries.keys)
        if entries.expired is not None:
            # What has expired is removed, unless user code sets it again.
            np.frombuffer(self._changed, np.uint8)[entries.owners[entries.expired]] = 1

    def load(self) -> list[Tuple | None]:
        """Turns the stored columns into tuples, when user code first asks for one."""
        owners = self._entries.owners
        stored: list[Tuple | None] = list(self._codec.load(self._entries.columns, len(owners)))
        if self._entries.expired is not None:
            for position in np.flatnonzero(self._entries.expired).tolist():
                stored[position] = None
        if len(stored) == self._entries.keys:
            self._values = stored
        else:
            values: list[Tuple | None] = [None] * self._entries.keys
            for owner, value in zip(owners.tolist(), stored, strict=True):
                values[owner] = value
            self._values = values
        return self._values  # type: ignore[no-any-return]

    def end(self) -> WindowChanges | None:
        if self._entries.expired is not None and isinstance(self._values, _Unloaded):
            self.load()
        entries, values = self._entries, self._values
        owners = np.flatnonzero(np.frombuffer(self._changed, np.uint8))
        self._entries, self._values = NO_ENTRIES, OutOfTurn(self.variable.name)
        if not len(owners):
            return None
        changed: list[Tuple | None] = [values[owner] for owner in owners.tolist()]
        ops = np.full(len(owners), Op.PUT, np.int8)
        if None in changed:
            gone = np.fromiter((value is None for value in changed), bool, len(changed))
            ops[gone] = Op.DELETE
            # What was set and cleared again, and is not stored, has not changed.
            kept = ~gone | np.isin(owners, entries.owners)
            owners, ops = owners[kept], ops[kept]
            changed = [value for value, keep in zip(changed, kept.tolist(), strict=True) if keep]
        return WindowChanges(owners, ops, self._codec.dump(changed)) if changed else None


class LocalMutableValueState(LocalValueState):
    """The same for tuples with lists or dicts in them: what user code does to them must not reach the state."""

    def get(self) -> Tuple | None:
        value = self._values[self._cursor.key]
        return None if value is None else self._codec.copy(value)  # type: ignore[misc]


class _Unloaded:
    """Stands in for the values of a window until the first of them is used."""

    def __init__(self, state: LocalValueState) -> None:
        self._state = state

    def __getitem__(self, key: int) -> Tuple | None:
        return self._state.load()[key]

    def __setitem__(self, key: int, value: Tuple | None) -> None:
        self._state.load()[key] = value


class LocalListState(_LocalVariable, ListState):
    """Spark's ListState: the tuples of each key, in order. An empty list does not exist."""

    def __init__(self, variable: VariableSpec, cursor: Cursor) -> None:
        super().__init__(variable, cursor)
        #: By position of the key: its list, once used.
        self._lists: Any = OutOfTurn(variable.name)
        #: By position of the key, if its list changed: how many elements in front are as stored, or _REPLACED.
        self._kept: dict[int, int] = {}
        self._stored: list[Tuple] | None = None
        self._bounds: list[int] = []

    def exists(self) -> bool:
        return bool(self._current(self._cursor.key))

    def get(self) -> Iterator[Tuple]:
        # Spark's iterator, too, looks at the state when it is first asked for an element, and not again.
        elements = list(self._current(self._cursor.key))
        yield from elements if self._codec.copy is None else map(self._codec.copy, elements)

    def put(self, newState: Iterable[Tuple]) -> None:
        elements = self._admit_all(newState)
        key = self._cursor.key
        self._lists[key] = elements
        self._kept[key] = _REPLACED

    def appendValue(self, newState: Tuple) -> None:
        element = self._codec.admit(newState)
        self._appendable(self._cursor.key).append(element)

    def appendList(self, newState: Iterable[Tuple]) -> None:
        elements = self._admit_all(newState)
        self._appendable(self._cursor.key).extend(elements)

    def clear(self) -> None:
        key = self._cursor.key
        self._lists[key] = []
        self._kept[key] = _REPLACED

    def _admit_all(self, elements: Iterable[Tuple]) -> list[Tuple]:
        try:
            iterator = iter(elements)
        except TypeError:
            raise PySparkTypeError(
                f"State variable {self.variable.name}: expected a list of tuples, not {elements!r}. "
                "Pass a list with a tuple for each element."
            ) from None
        admitted = [self._codec.admit(element) for element in iterator]
        if not admitted:
            raise PySparkRuntimeError(
                f"State variable {self.variable.name}: an empty list cannot be stored. "
                "Use clear() to remove all elements."
            )
        return admitted

    def _appendable(self, key: int) -> list[Tuple]:
        elements = self._current(key)
        if key not in self._kept:
            self._kept[key] = len(elements)
        return elements

    def _current(self, key: int) -> list[Tuple]:
        elements: list[Tuple] | None = self._lists.get(key)
        if elements is None:
            if self._stored is None:
                self._load()
            assert self._stored is not None
            first, end = self._bounds[key], self._bounds[key + 1]
            elements = self._stored[first:end]
            if (expired := self._entries.expired) is not None:
                elements = [item for item, gone in zip(elements, expired[first:end].tolist(), strict=True) if not gone]
            self._lists[key] = elements
        return elements

    def _load(self) -> None:
        """Turns the stored columns into tuples, when user code first asks for one."""
        self._stored = self._codec.load(self._entries.columns[1:], len(self._entries.owners))
        self._bounds = self._entries.bounds()

    def begin(self, entries: WindowEntries) -> None:
        self._entries = entries
        self._lists, self._kept, self._stored = {}, {}, None

    def end(self) -> WindowChanges | None:
        entries, lists, kept = self._entries, self._lists, self._kept
        self._entries, self._lists, self._stored = NO_ENTRIES, OutOfTurn(self.variable.name), None
        if not kept and entries.expired is None:
            return None
        bounds = entries.bounds()
        stored_positions = entries.columns[0].to_numpy(zero_copy_only=False)
        owners: list[int] = []
        ops: list[int] = []
        positions: list[int | None] = []
        values: list[Tuple | None] = []
        for key, keep in kept.items():
            stored_from, stored_to = bounds[key], bounds[key + 1]
            elements, first = lists[key], 0
            if keep != _REPLACED:
                elements = elements[keep:]
                first = int(stored_positions[stored_to - 1]) + 1 if stored_to > stored_from else 0
            elif stored_to > stored_from:
                owners.append(key)
                ops.append(Op.CLEAR)
                positions.append(None)
                values.append(None)
            owners.extend([key] * len(elements))
            ops.extend([Op.PUT] * len(elements))
            positions.extend(range(first, first + len(elements)))
            values.extend(elements)
        if entries.expired is not None:
            for number in np.flatnonzero(entries.expired).tolist():
                key = int(entries.owners[number])
                if kept.get(key) != _REPLACED:
                    owners.append(key)
                    ops.append(Op.DELETE)
                    positions.append(int(stored_positions[number]))
                    values.append(None)
        if not owners:
            return None
        columns = [pa.array(positions, pa.int64()), *self._codec.dump(values)]
        return WindowChanges(np.array(owners, np.int64), np.array(ops, np.int8), columns)


class LocalMapState(_LocalVariable, MapState):
    """Spark's MapState: tuples by tuples, for each key of the stage. An empty map does not exist."""

    def __init__(self, variable: VariableSpec, cursor: Cursor) -> None:
        super().__init__(variable, cursor)
        self._keys = TupleCodec(variable.map_key, variable.name, role="map key")
        self._row = row_class(self._codec.names)
        #: By position of the key: its map, once used. Map keys are frozen.
        self._maps: Any = OutOfTurn(variable.name)
        #: By position of the key: the map keys set or removed, each with whether the state holds it
        #: (after a clear, it holds none).
        self._touched: dict[int, dict[Tuple, bool]] = {}
        #: Positions of the keys whose map was cleared.
        self._cleared: set[int] = set()
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
        admitted = self._codec.admit(value)
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
        return value if self._codec.copy is None else self._codec.copy(value)

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
            if (expired := self._entries.expired) is not None:
                # Removed, unless user code sets them again.
                for position in (np.flatnonzero(expired[stored]) + stored.start).tolist():
                    frozen = self._stored[0][position]
                    self._touched.setdefault(key, {})[frozen] = True
                    del entries[frozen]
        return entries

    def _load(self) -> None:
        """Turns the stored columns into tuples, when user code first asks for one."""
        columns, length = self._entries.columns, len(self._entries.owners)
        split = len(self._keys.names)
        keys = self._keys.load(columns[:split], length)
        if self._keys.freeze is not None:
            keys = list(map(self._keys.freeze, keys))
        self._stored = keys, self._codec.load(columns[split:], length)
        self._bounds = self._entries.bounds()

    def begin(self, entries: WindowEntries) -> None:
        self._entries = entries
        self._maps, self._touched, self._cleared, self._stored = {}, {}, set(), None

    def end(self) -> WindowChanges | None:
        if self._entries.expired is not None:
            for owner in np.unique(self._entries.owners[self._entries.expired]).tolist():
                self._current(owner)
        stored, maps = set(self._entries.owners.tolist()) if self._cleared else set(), self._maps
        self._entries, self._maps, self._stored = NO_ENTRIES, OutOfTurn(self.variable.name), None
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
        columns = [*self._keys.dump(keys), *self._codec.dump(values)]
        return WindowChanges(np.array(owners, np.int64), np.array(ops, np.int8), columns)
