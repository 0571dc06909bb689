"""The code of a stream on a batch gives what Spark gives on batches, with an ordinary DataFrame as its result."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import anabranch
from anabranch.core.errors import UnsupportedError
from support.oracle import names_and_types

# Tasks run in processes that do not have the tests on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

START = datetime(2026, 1, 1)
ROWS = [(f"k{n % 17}" if n % 41 else None, START + timedelta(seconds=n * 7 % 600), n % 23) for n in range(500)]
TOLD = "k string, what string, n long, total long, at long"


class Watcher(StatefulProcessor):
    """Uses state of all kinds and timers, some of which are due at once, and says what it sees."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "n long, total long")
        self.values = handle.getListState("values", "v long", ttlDurationMs=self.ttl_ms)
        self.seen = handle.getMapState("seen", "v long", "times long")

    def __init__(self, ttl_ms: int | None = None) -> None:
        self.ttl_ms = ttl_ms

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        del key, timerValues
        n, total = self.total.get() or (0, 0)
        start = int(initialState.start if isinstance(initialState, Row) else initialState["start"].iloc[0])
        self.total.update((n + 100, total + start))
        self.handle.registerTimer(2)

    def _count(self, values: list[int]) -> tuple[int, int]:
        n, total = self.total.get() or (0, 0)
        self.total.update((n + len(values), total + sum(values)))
        for value in values:
            times = self.seen.getValue((value,))[0] if self.seen.containsKey((value,)) else 0
            self.seen.updateValue((value,), (times + 1,))
            self.values.appendValue((value,))
        self.handle.registerTimer(1)
        self.handle.registerTimer(2**50)
        return self.total.get()

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, total = self._count([row.v for row in rows])
        yield Row(k=key[0], what="rows", n=n, total=total, at=timerValues.getCurrentWatermarkInMs())
        distinct = len(list(self.seen.keys()))
        yield Row(k=key[0], what="state", n=distinct, total=sum(v for (v,) in self.values.get()), at=0)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n, total = self.total.get()
        self.total.update((n + 1, total))
        del timerValues
        yield Row(k=key[0], what="timer", n=n, total=total, at=expiredTimerInfo.getExpiryTimeInMs())

    def close(self) -> None:
        pass


class WatcherOfFrames(Watcher):
    """The same with pandas."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        n, total = self._count([int(value) for frame in rows for value in frame["v"]])
        yield _frame(key[0], "rows", n, total, timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        for row in super().handleExpiredTimer(key, timerValues, expiredTimerInfo):
            yield _frame(*row)


def _frame(*values: Any) -> pd.DataFrame:
    return pd.DataFrame([values], columns=["k", "what", "n", "total", "at"])


@pytest.fixture(scope="module")
def history(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(ROWS, "k string, ts timestamp, v int").repartition(3)


def check(query: Callable[[Any], Any], rows: DataFrame) -> Counter[str]:
    """Spark's and our rows are the same, under the same names and types."""
    native, ours = query(rows), query(anabranch.stream(rows)).toDF()
    assert names_and_types(ours.schema) == names_and_types(native.schema)
    expected = Counter(map(repr, native.collect()))
    assert Counter(map(repr, ours.collect())) == expected
    assert expected
    return expected


@pytest.mark.parametrize("mode", ["processingTime", "eventTime"])
def test_a_processor_of_rows_gives_what_spark_gives_on_a_batch(history: DataFrame, mode: str) -> None:
    processor = Watcher(ttl_ms=3_600_000 if mode == "processingTime" else None)
    rows = check(
        lambda df: (
            df.withWatermark("ts", "10 seconds").where("v > 2").groupBy("k")
            .transformWithState(processor, TOLD, "append", mode)
        ),
        history,
    )  # fmt: skip
    assert any("timer" in row for row in rows) == (mode == "processingTime")


class Tally(Watcher):
    """Without timers."""

    def _count(self, values: list[int]) -> tuple[int, int]:
        n, total = self.total.get() or (0, 0)
        self.total.update((n + len(values), total + sum(values)))
        return self.total.get()


def test_a_processor_of_frames_gives_what_spark_gives_with_initial_state(
    spark: SparkSession, history: DataFrame
) -> None:
    initial = spark.createDataFrame([("k1", 1000), ("other", 5)], "k string, start int")

    def query(df: Any) -> Any:
        return df.groupBy("k").transformWithStateInPandas(
            WatcherOfFrames(), TOLD, "update", "processingTime", initialState=initial.groupBy("k")
        )

    rows = check(query, history.where("k is not null"))
    assert any("'other'" in row and "timer" in row for row in rows)


def test_a_whole_pipeline_runs_on_history(spark: SparkSession, history: DataFrame) -> None:
    names = spark.createDataFrame([(f"k{n}", f"name {n}") for n in range(17)], "k string, name string")

    def query(df: Any) -> Any:
        wrap = anabranch.stream if isinstance(df, anabranch.Stream) else lambda rows: rows
        counts = (
            df.withWatermark("ts", "1 minute")
            .dropDuplicates(["k", "ts"])
            .groupBy(F.window("ts", "2 minutes"), "k")
            .agg(F.count("*").alias("v"), F.max("ts").alias("last"))
            .join(wrap(names), "k", "left")
        )
        sessions = df.groupBy(F.session_window("ts", "20 seconds"), "k").count()
        united = counts.select("k", "v").union(sessions.select("k", "count"))
        return united.groupBy("k").transformWithState(Tally(), TOLD, "append", "none").orderBy("k").toDF(*"abcde")

    check(query, history)
    planned = query(anabranch.stream(history))
    assert not planned.isStreaming
    keys = [row.a for row in planned.toDF().collect()]
    assert keys == sorted(keys, key=lambda key: key or "")


def summed(keys: pa.Table, rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
    assert state.column("total").null_count == len(keys)
    sums = rows.group_by("_key").aggregate([("v", "sum")]).sort_by("_key").column("v_sum")
    return pa.table({"k": keys.column("k"), "total": sums}), pa.table({"total": pc.cast(sums, pa.int64())})


def test_functions_with_state_run_on_a_batch(history: DataFrame) -> None:
    def counted(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        assert not state.exists
        assert not state.hasTimedOut
        count = sum(len(frame) for frame in frames)
        state.update((count,))
        state.setTimeoutTimestamp(1)
        yield pd.DataFrame({"k": [key[0]], "n": [count], "at": [state.getCurrentWatermarkMs()]})

    grouped = anabranch.stream(history).withWatermark("ts", "1 minute").groupBy("k")
    ours = grouped.applyInPandasWithState(
        counted, "k string, n long, at long", "n long", "append", GroupStateTimeout.EventTimeTimeout
    )
    expected = Counter((row.k, row.n, -1) for row in history.groupBy("k").agg(F.count("*").alias("n")).collect())
    assert Counter(map(tuple, ours.toDF().collect())) == expected

    columns = anabranch.stream(history).stage("sums", parallelism=3).groupBy("k")
    totals = columns.processInArrow(summed, "k string, total long", "total long").toDF()
    assert totals.rdd.getNumPartitions() == 3
    sums = history.groupBy("k").agg(F.sum("v").alias("total"))
    assert Counter(map(tuple, totals.collect())) == Counter(map(tuple, sums.collect()))
    empty = anabranch.stream(history.where("false")).groupBy("k").transformWithState(Tally(), TOLD, "append", "none")
    assert empty.toDF().collect() == []


def test_what_a_batch_cannot_do_is_said_at_once(spark: SparkSession, history: DataFrame) -> None:
    batch = anabranch.stream(history)
    stream = anabranch.stream(spark.readStream.format("rate").load().selectExpr("'k' as k", "value"))
    with pytest.raises(UnsupportedError, match=r"toDF\(\)\.write"):
        batch.writeStream  # noqa: B018
    with pytest.raises(UnsupportedError, match=r"toDF\(\)\.collect"):
        batch.collect()
    with pytest.raises(UnsupportedError, match="begin with the stream"):
        batch.join(stream, "k")
    with pytest.raises(UnsupportedError, match="as in Spark"):
        batch.dropDuplicatesWithinWatermark("k")
    with pytest.raises(UnsupportedError, match="A stream has no end"):
        stream.toDF()
    assert stream.join(batch, "k").columns == ["k", "value", "ts", "v"]
    assert stream.toDF("a", "b").columns == ["a", "b"]
