"""The timers of a stage: a map state variable of our own, whose keys are the times at which they are due."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.errors import PySparkTypeError

from anabranch.core.schemas import Op, VariableKind, VariableSpec
from anabranch.operators.process.variable import NO_ENTRIES, Cursor, OutOfTurn, WindowChanges, WindowEntries

#: The name of the state variable.
TIMERS = "_timers"
TIMERS_SPEC = VariableSpec(TIMERS, VariableKind.MAP, pa.schema([]), pa.schema([("expiry_ms", pa.int64())]))
#: What a timer can be set to.
_FIRST, _LAST = -(2**63), 2**63 - 1


class LocalTimers:
    """The timers of the current key, and those of a window of keys that are due. A time has at most one."""

    def __init__(self, cursor: Cursor) -> None:
        self.variable = TIMERS_SPEC
        self._cursor = cursor
        #: By position of the key: its timers, once used.
        self._sets: Any = OutOfTurn(TIMERS, timers=True)
        self._changed: set[int] = set()
        self._entries = NO_ENTRIES
        self._stored: npt.NDArray[np.int64] = np.empty(0, np.int64)
        #: The same as a list, and where the timers of each key begin in it, once used.
        self._times: list[int] = []
        self._bounds: list[int] | None = None

    # Spark's name of the argument: user code may give it.
    # These two are called for every key, and one more call would be felt: nothing is shared.

    def register(self, expiryTimestampMs: int) -> None:
        key = self._cursor.key
        timers = self._sets.get(key)
        if timers is None:
            timers = self._load(key)
        expiry = expiryTimestampMs
        if type(expiry) is not int or not _FIRST <= expiry <= _LAST:
            expiry = _moment(expiry)
        if expiry not in timers:
            timers.add(expiry)
            self._changed.add(key)

    def delete(self, expiryTimestampMs: int) -> None:
        key = self._cursor.key
        timers = self._sets.get(key)
        if timers is None:
            timers = self._load(key)
        expiry = expiryTimestampMs
        if type(expiry) is not int or not _FIRST <= expiry <= _LAST:
            expiry = _moment(expiry)
        if expiry in timers:
            timers.remove(expiry)
            self._changed.add(key)

    def all(self) -> list[int]:
        """Returns the timers of the current key, the earliest first."""
        timers = self._sets.get(self._cursor.key)
        return sorted(self._load(self._cursor.key) if timers is None else timers)

    def due(self, up_to_ms: int) -> list[tuple[int, int]]:
        """Returns what is due now in the whole window: times and positions of keys, the earliest first."""
        owners = self._entries.owners
        chosen = self._stored <= up_to_ms
        if self._changed:
            touched = np.zeros(self._entries.keys, np.bool_)
            touched[list(self._changed)] = True
            chosen &= ~touched[owners]
        due = list(zip(self._stored[chosen].tolist(), owners[chosen].tolist(), strict=True))
        due += [(expiry, key) for key in self._changed for expiry in self._sets[key] if expiry <= up_to_ms]
        return sorted(due)

    def _load(self, key: int) -> set[int]:
        """Returns the timers of a key that has not been used yet."""
        if self._bounds is None:
            self._bounds, self._times = self._entries.bounds(), self._stored.tolist()
        timers = self._sets[key] = set(self._times[self._bounds[key] : self._bounds[key + 1]])
        return timers

    def begin(self, entries: WindowEntries) -> None:
        self._entries = entries
        self._stored = entries.columns[0].to_numpy(zero_copy_only=False)
        self._sets, self._changed, self._bounds = {}, set(), None

    def end(self) -> WindowChanges | None:
        entries, stored, sets = self._entries, self._stored, self._sets
        self._entries, self._sets = NO_ENTRIES, OutOfTurn(TIMERS, timers=True)
        changed = sorted(self._changed)
        if not changed:
            return None
        touched = np.zeros(entries.keys, np.bool_)
        touched[changed] = True
        before = touched[entries.owners]
        counts = [len(sets[key]) for key in changed]
        owners = np.concatenate((entries.owners[before], np.repeat(np.array(changed, np.int64), counts)))
        now = np.fromiter(chain.from_iterable(map(sets.__getitem__, changed)), np.int64, sum(counts))
        times = np.concatenate((stored[before], now))
        ops = np.full(len(owners), Op.PUT, np.int8)
        ops[: np.count_nonzero(before)] = Op.DELETE
        # A timer that was there before and is there now has not changed: the two stand side by side then.
        order = np.lexsort((times, owners))
        owners, times, ops = owners[order], times[order], ops[order]
        again = (owners[1:] == owners[:-1]) & (times[1:] == times[:-1])
        kept = np.ones(len(owners), np.bool_)
        kept[1:] &= ~again
        kept[:-1] &= ~again
        if not kept.any():
            return None
        return WindowChanges(owners[kept], ops[kept], [pa.array(times[kept])])


def _moment(expiry_ms: Any) -> int:
    try:
        expiry = operator.index(expiry_ms)
    except TypeError:
        expiry = None
    if expiry is None or not _FIRST <= expiry <= _LAST:
        raise PySparkTypeError(
            f"The time of a timer is {expiry_ms!r}. Pass a whole number of milliseconds since 1970, such as "
            "timerValues.getCurrentProcessingTimeInMs() + 60_000."
        )
    return expiry
