"""Scenarios of Spark's own suites of stateful operators, in small: what goes in, and what Spark says comes out.

All that have the same output mode share one query, and so one watermark, which the same row moves for all of them.
Times are in seconds. What comes out is written as text, the columns with spaces between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

# Tasks do not have this module on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "scenario string, t bigint, k string, v bigint"
_DELAY = "10 seconds"


@dataclass(frozen=True)
class Scenario:
    """A query on rows of (t, k, v), and for each epoch what goes in and what comes out of it, in any order."""

    build: Callable[[Any], Any]
    epochs: Sequence[tuple[Sequence[tuple[int, str, int]], Sequence[str]]]


def together(scenarios: dict[str, Scenario], rows: Any) -> Any:
    """All of them in one result: the name of the scenario, and the row as text."""
    marked = rows.withColumn("at", F.timestamp_seconds("t")).withWatermark("at", _DELAY)
    united = None
    for name, scenario in scenarios.items():
        # As the time is in it, Spark does not filter before the watermark, which would then be one for each scenario.
        its_own = F.when(F.col("at").isNotNull(), F.col("scenario")) == name
        result = scenario.build(marked.where(its_own).drop("scenario"))
        values = [F.coalesce(F.col(column).cast("string"), F.lit("-")) for column in result.columns]
        shown = result.select(F.lit(name).alias("scenario"), F.concat_ws(" ", *values).alias("row"))
        united = shown if united is None else united.union(shown)
    return united


def _start(column: str = "window") -> Any:
    return F.unix_seconds(f"{column}.start").alias("start")


# ---------------------------------------------------------------------------------------- aggregation, windows


def windows(rows: Any) -> Any:
    return rows.groupBy(F.window("at", "5 seconds")).count().select(_start(), "count")


def windows_of_windows(rows: Any) -> Any:
    small = rows.groupBy(F.window("at", "5 seconds")).count()
    large = small.groupBy(F.window(F.window_time("window"), "10 seconds").alias("large"))
    return large.agg(F.sum("count").alias("n")).select(_start("large"), "n")


def sessions(rows: Any) -> Any:
    found = rows.groupBy(F.session_window("at", "5 seconds").alias("s"), "k").count()
    return found.select("k", _start("s"), F.unix_seconds("s.end").alias("end"), "count")


# ---------------------------------------------------------------------------------------------- de-duplication


def first_of_key(rows: Any) -> Any:
    # With the time among what is wanted: Spark takes no row for late if its optimizer has left out the time.
    return rows.dropDuplicates(["k"]).select("k", F.unix_seconds("at").alias("t"))


def first_of_key_and_time(rows: Any) -> Any:
    return rows.dropDuplicates(["k", "at"]).select("k", "t")


def first_for_a_while(rows: Any) -> Any:
    return rows.dropDuplicatesWithinWatermark(["k"]).select("k", "t")


def distinct_in_windows(rows: Any) -> Any:
    return windows(rows.dropDuplicates(["k", "at"]))


# ------------------------------------------------------------------------------------------------------- joins


def _sides(rows: Any) -> tuple[Any, Any]:
    """Rows with a 0 are of the left, others of the right."""
    left = rows.where("v = 0").select(F.col("k").alias("l"), F.col("at").alias("l_at"), F.col("t").alias("l_t"))
    return left, rows.where("v = 1").select(F.col("k").alias("r"), F.col("at").alias("r_at"), F.col("t").alias("r_t"))


def joined(how: str) -> Callable[[Any], Any]:
    """Rows of the right that come up to five seconds after one of the left."""

    def build(rows: Any) -> Any:
        left, right = _sides(rows)
        condition = F.expr("l = r and r_at >= l_at and r_at <= l_at + interval 5 seconds")
        pairs = left.join(right, condition, how)
        return pairs.select("l", "l_t") if how == "left_semi" else pairs.select("l", "l_t", "r_t")

    return build


def joined_in_windows(rows: Any) -> Any:
    left, right = _sides(rows)
    pairs = left.join(right, F.expr("l = r and r_at >= l_at and r_at <= l_at + interval 5 seconds"))
    return pairs.groupBy(F.window("l_at", "5 seconds")).count().select(_start(), "count")


# -------------------------------------------------------------------------------------------------- processors


class RunningCount(StatefulProcessor):
    """Counts up to three; with the third row the key is forgotten, and nothing is said."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        count = (self._count.get() or (0,))[0] + len(list(rows))
        if count == 3:
            self._count.clear()
        else:
            self._count.update((count,))
            yield Row(k=key[0], n=count)

    def close(self) -> None:
        pass


class Latest(StatefulProcessor):
    """The latest time of a key, and -1 when nothing has come for five seconds after it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._latest = handle.getValueState("latest", "t bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        before = (self._latest.get() or (0,))[0]
        latest = max(before, *(row.t for row in rows), 0)
        self._handle.deleteTimer((before + 5) * 1000)
        self._handle.registerTimer((latest + 5) * 1000)
        self._latest.update((latest,))
        yield Row(k=key[0], n=latest)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        del timerValues, expiredTimerInfo
        self._latest.clear()
        yield Row(k=key[0], n=-1)

    def close(self) -> None:
        pass


class Expiring(StatefulProcessor):
    """Values that live for a minute, in a value, a list and a map; how many of each are still there."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._value = handle.getValueState("value", "v bigint", 60_000)
        self._list = handle.getListState("list", "v bigint", 60_000)
        self._map = handle.getMapState("map", "m bigint", "v bigint", 60_000)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        seen = [int(self._value.exists()), len(list(self._list.get())), len(list(self._map.keys()))]
        for row in rows:
            if row.v >= 0:
                self._value.update((row.v,))
                self._list.appendValue((row.v,))
                self._map.updateValue((row.v,), (row.v,))
        yield Row(k=key[0], n="/".join(map(str, seen)))

    def close(self) -> None:
        pass


class Alarm(StatefulProcessor):
    """-1 five seconds after the first row, by the clock."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        if not list(self._handle.listTimers()):
            self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 5_000)
        yield Row(k=key[0], n=len(list(rows)))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        del timerValues, expiredTimerInfo
        yield Row(k=key[0], n=-1)

    def close(self) -> None:
        pass


def processed(processor: StatefulProcessor, time_mode: str, kind: str = "bigint") -> Callable[[Any], Any]:
    """By one of the processors."""

    def build(rows: Any) -> Any:
        return rows.groupBy("k").transformWithState(processor, f"k string, n {kind}", "update", time_mode)

    return build


# ------------------------------------------------------------------------------------------------- group states


def _counted(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Counts; by the clock, a key is away ten seconds after its last row."""
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "n": [-1]})
        return
    count = (state.get[0] if state.exists else 0) + sum(map(len, frames))
    state.update((count,))
    state.setTimeoutDuration(10_000)
    yield pd.DataFrame({"k": [key[0]], "n": [count]})


def _latest(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """As `Latest`, but a key times out only after its time, not at it."""
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "n": [-1]})
        return
    latest = max(state.get[0] if state.exists else 0, *(int(frame.t.max()) for frame in frames), 0)
    state.update((latest,))
    state.setTimeoutTimestamp((latest + 5) * 1000)
    yield pd.DataFrame({"k": [key[0]], "n": [latest]})


def group_states(function: Any, mode: str, timeout: str) -> Callable[[Any], Any]:
    """By one of the functions."""

    def build(rows: Any) -> Any:
        return rows.groupBy("k").applyInPandasWithState(function, "k string, n bigint", "n bigint", mode, timeout)

    return build


counted_states = group_states(_counted, "update", "ProcessingTimeTimeout")
latest_states = group_states(_latest, "append", "EventTimeTimeout")
