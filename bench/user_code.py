"""What users would write, and what both sides run: a counter and a sum of each key, on rows, on pandas, on columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

STATE = "count LONG, total LONG"
OUTPUT = f"key LONG, {STATE}"
_TIMED_STATE = f"{STATE}, timer LONG"
#: Longer than any benchmark: with less, the slower side would have the more state to remove.
_TTL_MS = 24 * 3600 * 1000
#: How long after its last row a key ends.
TIMER_MS = 55_000


class RowTotals(StatefulProcessor):
    """Counts and sums the rows of each key."""

    ttl_ms: int | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("totals", STATE, self.ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002
        count, total = self._state.get() or (0, 0)
        for row in rows:
            count += 1
            total += row.amount
        self._state.update((count, total))
        yield Row(key=key[0], count=count, total=total)

    def close(self) -> None:
        pass


class PandasTotals(RowTotals):
    """The same on pandas DataFrames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002
        count, total = self._state.get() or (0, 0)
        for frame in rows:
            count += len(frame)
            total += int(frame["amount"].sum())
        self._state.update((count, total))
        yield pd.DataFrame({"key": [key[0]], "count": [count], "total": [total]})


class FadingRowTotals(RowTotals):
    """The same with a time to live."""

    ttl_ms = _TTL_MS


class FadingPandasTotals(PandasTotals):
    """The same on pandas DataFrames."""

    ttl_ms = _TTL_MS


class RowSessions(StatefulProcessor):
    """Counts and sums the rows of each key, and tells when none has come for a while: the last row sets the timer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._state = handle.getValueState("totals", _TIMED_STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002
        count, total, last_ms = 0, 0, 0
        for row in rows:
            count += 1
            total += row.amount
            last_ms = max(last_ms, row.time_ms)
        self._extend(count, total, last_ms)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: ARG002
        yield Row(**self._ended(key))

    def close(self) -> None:
        pass

    def _extend(self, count: int, total: int, last_ms: int) -> None:
        before = self._state.get()
        if before is not None:
            count, total = count + before[0], total + before[1]
            self._handle.deleteTimer(before[2])
        self._handle.registerTimer(last_ms + TIMER_MS)
        self._state.update((count, total, last_ms + TIMER_MS))

    def _ended(self, key: Any) -> dict[str, int]:
        count, total, _ = self._state.get() or (0, 0, 0)
        self._state.clear()
        return {"key": key[0], "count": count, "total": total}


class PandasSessions(RowSessions):
    """The same on pandas DataFrames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002
        count, total, last_ms = 0, 0, 0
        for frame in rows:
            count += len(frame)
            total += int(frame["amount"].sum())
            last_ms = max(last_ms, int(frame["time_ms"].max()))
        self._extend(count, total, last_ms)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: ARG002
        yield pd.DataFrame([self._ended(key)])


def arrow_totals(keys: pa.Table, rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Count and sum the rows of all keys of a partition at once, for processInArrow."""
    of_key = rows.column("_key").to_numpy()
    counts = np.bincount(of_key, minlength=len(keys))
    totals = np.bincount(of_key, rows.column("amount").to_numpy(), len(keys)).astype(np.int64)
    after = {
        "count": counts + state.column("count").fill_null(0).to_numpy(),
        "total": totals + state.column("total").fill_null(0).to_numpy(),
    }
    return pa.table({"key": keys.column("key"), **after}), pa.table(after)
