"""A list state variable over the local copy of a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.streaming.stateful_processor import ListState

from anabranch.core.schemas import Op, VariableSpec
from anabranch.operators.process.tuples import Tuple, TupleCodec
from anabranch.operators.process.variable import Changes, Cursor, Entries, OutOfTurn

#: In place of a count of kept elements: the whole list was replaced.
_REPLACED = -1


class LocalListState(ListState):
    """Spark's ListState: the tuples of each key, in order. An empty list does not exist."""

    def __init__(self, variable: VariableSpec, cursor: Cursor) -> None:
        self.variable = variable
        self._stateName = variable.name
        self._cursor = cursor
        self._codec = TupleCodec(variable.value, variable.name)
        #: By position of the key: its list, once used.
        self._lists: Any = OutOfTurn(variable.name)
        #: By position of the key, if its list changed: how many elements in front are as stored, or _REPLACED.
        self._kept: dict[int, int] = {}
        self._entries: Entries | None = None
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
            assert self._entries is not None
            first, end = self._bounds[key], self._bounds[key + 1]
            elements = self._stored[first:end]
            if (expired := self._entries.expired) is not None:
                elements = [item for item, gone in zip(elements, expired[first:end].tolist(), strict=True) if not gone]
            self._lists[key] = elements
        return elements

    def _load(self) -> None:
        """Turns the stored columns into tuples, when user code first asks for one."""
        assert self._entries is not None
        self._stored = self._codec.load(self._entries.columns[1:], len(self._entries.owners))
        self._bounds = self._entries.bounds()

    def begin(self, entries: Entries) -> None:
        self._entries = entries
        self._lists, self._kept, self._stored = {}, {}, None

    def end(self) -> Changes | None:
        assert self._entries is not None
        entries, lists, kept = self._entries, self._lists, self._kept
        self._entries, self._lists, self._stored = None, OutOfTurn(self.variable.name), None
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
        return Changes(np.array(owners, np.int64), np.array(ops, np.int8), columns)
