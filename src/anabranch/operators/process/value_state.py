"""A value state variable over the local copy of a task."""

from __future__ import annotations

from typing import Any

import numpy as np
from pyspark.sql.streaming.stateful_processor import ValueState

from anabranch.core.schemas import Op, VariableSpec
from anabranch.operators.process.tuples import Tuple, TupleCodec
from anabranch.operators.process.variable import Changes, Cursor, Entries, OutOfTurn


class LocalValueState(ValueState):
    """Spark's ValueState: at most one tuple for each key."""

    def __init__(self, variable: VariableSpec, cursor: Cursor) -> None:
        self.variable = variable
        self._stateName = variable.name
        self._cursor = cursor
        self._codec = TupleCodec(variable.value, variable.name)
        self._types = self._codec.types
        #: By position of the key: the tuple, or None.
        self._values: Any = OutOfTurn(variable.name)
        #: By position of the key: 1 if user code has set or cleared the value.
        self._changed = bytearray()
        self._entries: Entries | None = None

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

    def begin(self, entries: Entries) -> None:
        self._entries = entries
        self._values = _Unloaded(self)
        self._changed = bytearray(entries.keys)
        if entries.expired is not None:
            # What has expired is removed, unless user code sets it again.
            np.frombuffer(self._changed, np.uint8)[entries.owners[entries.expired]] = 1

    def load(self) -> list[Tuple | None]:
        """Turns the stored columns into tuples, when user code first asks for one."""
        assert self._entries is not None
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

    def end(self) -> Changes | None:
        assert self._entries is not None
        if self._entries.expired is not None and isinstance(self._values, _Unloaded):
            self.load()
        entries, values = self._entries, self._values
        owners = np.flatnonzero(np.frombuffer(self._changed, np.uint8))
        self._entries, self._values = None, OutOfTurn(self.variable.name)
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
        return Changes(owners, ops, self._codec.dump(changed)) if changed else None


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
