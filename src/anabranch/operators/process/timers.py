"""The timers of a stage: a map state variable of our own, whose keys are the times at which they are due."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.errors import PySparkTypeError

from anabranch.core.schemas import Op, VariableKind, VariableSpec
from anabranch.operators.process.variable import Changes, Cursor, Entries, OutOfTurn

#: The name of the state variable.
TIMERS = "_timers"
TIMERS_SPEC = VariableSpec(TIMERS, VariableKind.MAP, pa.schema([]), pa.schema([("expiry_ms", pa.int64())]))


class LocalTimers:
    """The timers of the current key, and those of a window of keys that are due. A time has at most one."""

    def __init__(self, cursor: Cursor) -> None:
        self.variable = TIMERS_SPEC
        self._cursor = cursor
        #: By position of the key: its timers, once used.
        self._sets: Any = OutOfTurn(TIMERS, timers=True)
        self._changed: set[int] = set()
        self._entries: Entries | None = None
        self._stored: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._bounds: list[int] | None = None

    def register(self, expiry_ms: int) -> None:
        expiry = _moment(expiry_ms)
        timers = self._current(self._cursor.key)
        if expiry not in timers:
            timers.add(expiry)
            self._changed.add(self._cursor.key)

    def delete(self, expiry_ms: int) -> None:
        expiry = _moment(expiry_ms)
        timers = self._current(self._cursor.key)
        if expiry in timers:
            timers.remove(expiry)
            self._changed.add(self._cursor.key)

    def all(self) -> list[int]:
        """The timers of the current key, the earliest first."""
        return sorted(self._current(self._cursor.key))

    def due(self, up_to_ms: int) -> list[tuple[int, int]]:
        """What is due now in the whole window: times and positions of keys, the earliest first."""
        assert self._entries is not None
        owners = self._entries.owners
        chosen = self._stored <= up_to_ms
        if self._changed:
            chosen &= ~np.isin(owners, list(self._changed))
        due = list(zip(self._stored[chosen].tolist(), owners[chosen].tolist(), strict=True))
        due += [(expiry, key) for key in self._changed for expiry in self._sets[key] if expiry <= up_to_ms]
        return sorted(due)

    def _current(self, key: int) -> set[int]:
        timers: set[int] | None = self._sets.get(key)
        if timers is None:
            timers = self._sets[key] = self._stored_of(key)
        return timers

    def _stored_of(self, key: int) -> set[int]:
        assert self._entries is not None
        if self._bounds is None:
            self._bounds = self._entries.bounds()
        return set(self._stored[self._bounds[key] : self._bounds[key + 1]].tolist())

    def begin(self, entries: Entries) -> None:
        self._entries = entries
        self._stored = entries.columns[0].to_numpy(zero_copy_only=False)
        self._sets, self._changed, self._bounds = {}, set(), None

    def end(self) -> Changes | None:
        owners: list[int] = []
        ops: list[int] = []
        times: list[int] = []
        for key in sorted(self._changed):
            before, now = self._stored_of(key), self._sets[key]
            for op, expiries in ((Op.PUT, now - before), (Op.DELETE, before - now)):
                owners += [key] * len(expiries)
                ops += [op] * len(expiries)
                times += sorted(expiries)
        self._entries, self._sets = None, OutOfTurn(TIMERS, timers=True)
        if not owners:
            return None
        return Changes(np.array(owners, np.int64), np.array(ops, np.int8), [pa.array(times, pa.int64())])


def _moment(expiry_ms: Any) -> int:
    try:
        expiry = operator.index(expiry_ms)
    except TypeError:
        expiry = None
    if expiry is None or not -(2**63) <= expiry < 2**63:
        raise PySparkTypeError(
            f"The time of a timer is {expiry_ms!r}. Pass a whole number of milliseconds since 1970, such as "
            "timerValues.getCurrentProcessingTimeInMs() + 60_000."
        )
    return expiry
