"""The StatefulProcessor that both sides run: a counter and a sum in one ValueState, on rows and on pandas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

STATE = "count LONG, total LONG"
OUTPUT = "key LONG, count LONG, total LONG"


class RowTotals(StatefulProcessor):
    """Counts and sums the rows of each key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("totals", STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002
        count, total = self._state.get() or (0, 0)
        for row in rows:
            count += 1
            total += row.amount
        self._state.update((count, total))
        yield Row(key=key[0], count=count, total=total)

    def close(self) -> None:
        pass


class PandasTotals(StatefulProcessor):
    """The same on pandas DataFrames."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("totals", STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002
        count, total = self._state.get() or (0, 0)
        for frame in rows:
            count += len(frame)
            total += int(frame["amount"].sum())
        self._state.update((count, total))
        yield pd.DataFrame({"key": [key[0]], "count": [count], "total": [total]})

    def close(self) -> None:
        pass
