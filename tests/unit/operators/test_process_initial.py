"""Initial state in a task: given to each key once, before its rows, and before timers."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from anabranch.core.errors import EpochError
from anabranch.operators.process.program import FrameSettings, TimeMode
from support.process_model import fields, run_epochs

KEY = pa.schema([("id", pa.string())])
OUTPUT = fields(id="string", total="long")


class Adding(StatefulProcessor):
    def __init__(self, *, pandas: bool) -> None:
        self.pandas = pandas

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", fields(n="long"))

    def add(self, n: int) -> int:
        total = (self.total.get() or (0,))[0] + n
        self.total.update((total,))
        return total

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        assert set(initialState.id if self.pandas else [initialState.id]) == {key[0]}
        self.add(int(initialState.start.sum()) if self.pandas else initialState.start)
        if key[0] == "z":
            self.handle.registerTimer(5)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        n = sum(int(part.n.sum()) if self.pandas else part.n for part in rows)
        yield self.row(key, self.add(n))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        yield self.row(key, -self.total.get()[0])  # type: ignore[index]

    def row(self, key: Any, total: int) -> Any:
        return pd.DataFrame({"id": [key[0]], "total": [total]}) if self.pandas else Row(id=key[0], total=total)


@pytest.mark.parametrize("pandas", [False, True], ids=["rows", "pandas"])
def test_each_key_starts_with_its_initial_state(pandas: bool) -> None:
    state, outputs = run_epochs(
        Adding(pandas=pandas),
        [[{"id": "a", "n": 1}, {"id": "b", "n": 2}, {"id": "a", "n": 3}], [{"id": "c", "n": 1}, {"id": "a", "n": 1}]],
        key=KEY,
        output=OUTPUT,
        frames=FrameSettings(rows_max=2) if pandas else None,
        time_mode=TimeMode.PROCESSING_TIME,
        times=[10, 20],
        initial=[
            {"id": "z", "start": 7},
            {"id": "a", "start": 10},
            {"id": "c", "start": 30},
            {"id": "a", "start": 10},
            {"id": "a", "start": 10},
        ],
    )
    first, second = ({row["id"]: row["total"] for row in output} for output in outputs)
    assert first == {"a": 34, "b": 2, "z": -7}
    assert second == {"c": 31, "a": 35}
    assert state.value("total", "z") == (7,)
    assert sorted(state.reads[0].column("id").to_pylist()) == ["a", "b", "c", "z"]


@pytest.mark.parametrize("pandas", [False, True], ids=["rows", "pandas"])
def test_failures_name_the_key(pandas: bool) -> None:
    class Failing(Adding):
        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            raise ValueError("odd")

    with pytest.raises(EpochError, match=r"Failing failed in handleInitialState for key \('a',\): ValueError: odd"):
        run_epochs(
            Failing(pandas=pandas),
            [[]],
            key=KEY,
            output=OUTPUT,
            frames=FrameSettings() if pandas else None,
            initial=[{"id": "a", "start": 1}],
        )
