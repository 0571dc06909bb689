"""Watermarks are Spark's: where they begin, which of several counts, and how far behind one stage leaves the next."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import anabranch
from support.oracle import Oracle, Result, drain
from support.side_by_side import rows_of, side_by_side
from support.streams import EpochFeed

# Tasks run in processes that do not have the tests on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "k string, ts timestamp, v int"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"


def moment(seconds: float) -> datetime:
    """So many seconds after 1970 began."""
    return datetime(1970, 1, 1) + timedelta(seconds=seconds)


@pytest.fixture
def configured(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Sets what Spark is to use in one test."""
    changed: list[str] = []

    def set_for_now(name: str, value: str) -> None:
        changed.append(name)
        spark.conf.set(name, value)

    yield set_for_now
    for name in changed:
        spark.conf.unset(name)


def rows_by_epoch(result: Result) -> dict[int, Counter[str]]:
    return {epoch: rows for epoch, rows in result.by_epoch().items() if rows}


def assert_like_spark(oracle: Oracle, query: Callable[[Any], Any], feed: EpochFeed) -> list[Any]:
    """Both give the same rows in the same epochs; all of Spark's."""
    native = oracle.native(query, feed.stream(), "append")
    ours = oracle.ours(query, feed.stream(), "append")
    assert rows_by_epoch(ours) == rows_by_epoch(native)
    return [row for rows in native.epochs.values() for row in rows]


class Remembering(StatefulProcessor):
    """Tells each row that it gets, and ten seconds later that it got it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.ts is not None:
                self.handle.registerTimer(int(row.ts.timestamp() * 1000) + 10_000)
            yield Row(k=key[0], told=f"{row.ts} {timerValues.getCurrentWatermarkInMs()}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], told=f"{expiredTimerInfo.getExpiryTimeInMs()} {timerValues.getCurrentWatermarkInMs()}")


DAY_S = 24 * 3600
FAR_S = 56 * 365 * DAY_S
#: Before 1970, around its beginning, and long after. Keys say when.
EARLY_EPOCHS: list[list[tuple[str, datetime | None, int]]] = [
    [("before", moment(-DAY_S), 1), ("just before", moment(-1), 2), ("at", moment(0), 3), ("none", None, 4)],
    [("before", moment(-DAY_S), 5), ("just before", moment(-2), 6), ("after", moment(0.001), 7), ("x", moment(5), 8)],
    [("x", moment(60), 9), ("far", moment(FAR_S), 10)],
    [("far", moment(FAR_S + 100), 11), ("before", moment(-3), 12)],
]


def early_pipelines(feed: EpochFeed) -> Callable[[Any], Any]:
    def query(rows: Any) -> Any:
        marked = rows.withWatermark("ts", "10 seconds")
        other = feed.stream().withWatermark("ts", "10 seconds")
        other = other.select(F.col("k").alias("k2"), F.col("ts").alias("ts2"), F.col("v").alias("v2"))
        # Rows on the left are over when the watermark is 20 seconds before them, so that some are from the beginning.
        near = F.expr("k = k2 AND ts BETWEEN ts2 + INTERVAL 20 SECONDS AND ts2 + INTERVAL 90 SECONDS")
        joined = marked.join(other, near, "left_outer")
        return side_by_side(
            {
                "windows": marked.groupBy(F.window("ts", "10 seconds"), "k").count(),
                "sessions": marked.groupBy("k", F.session_window("ts", "3 seconds")).count(),
                "distinct": marked.dropDuplicates(["k", "ts"]),
                "first": marked.dropDuplicatesWithinWatermark(["k"]),
                "joined": joined.select("k", "ts", "v", "v2"),
                "windows of joined": joined.groupBy(F.window("ts", "10 seconds")).count(),
                "processed": marked.groupBy("k").transformWithState(
                    Remembering(), "k string, told string", "append", "eventTime"
                ),
            }
        )

    return query


def test_rows_before_1970_are_late_from_the_first_epoch_on_as_in_spark(
    spark: SparkSession, oracle: Oracle, tmp_path: Path, configured: Callable[[str, str], None]
) -> None:
    configured(_PROVIDER, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)
    feed.add(*EARLY_EPOCHS)
    rows = assert_like_spark(oracle, early_pipelines(feed), feed)
    for name in sorted({row.pipeline for row in rows}):
        assert not any("1969-12-30" in row or '"before"' in row for row in rows_of(name, rows)), name
    assert len({row.pipeline for row in rows}) == 7


def test_what_the_watermark_has_passed_goes_out_after_a_restart_though_no_rows_come(
    spark: SparkSession, oracle: Oracle, tmp_path: Path
) -> None:
    """A run of one epoch ends before the one in which the window would end."""
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)
    feed.add([("a", moment(1), 1), ("b", moment(100), 1)])
    marked = anabranch.stream(feed.stream()).withWatermark("ts", "10 seconds")
    counts = marked.groupBy(F.window("ts", "10 seconds"), "k").count()
    result = Result()
    writer = counts.writeStream.outputMode("append").foreachBatch(result).options(**oracle.options)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    once = writer.trigger(once=True).start()
    assert once.awaitTermination(60)
    assert result.epochs == {0: []}
    drain(writer)
    assert {epoch: [row["k"] for row in rows] for epoch, rows in result.epochs.items()} == {0: [], 1: ["a"]}


#: Seconds, one list for each epoch. The watermark of the first source is 10 s behind it, that of the second 60 s. The
#: second is silent at first, and now and then.
SWIFT_EPOCHS = [[5, 15], [100], [130, 35], [200, 36, 95], [205], [400], [401, 37]]
SLOW_EPOCHS = [[], [], [120, 3], [], [190, 38], [400], []]


def meeting(slow: EpochFeed) -> Callable[[Any], Any]:
    def query(swift: Any) -> Any:
        swift = swift.withWatermark("ts", "10 seconds")
        late = slow.stream().withWatermark("ts", "60 seconds")
        near = F.expr("k = k2 AND ts2 BETWEEN ts - INTERVAL 20 SECONDS AND ts + INTERVAL 20 SECONDS")
        other = late.select(F.col("k").alias("k2"), F.col("ts").alias("ts2"))
        return side_by_side(
            {
                "united": swift.union(late).groupBy(F.window("ts", "10 seconds")).agg(F.sum("v").alias("total")),
                "joined": swift.join(other, near, "left_outer").select("ts", "v", "ts2"),
            }
        )

    return query


@pytest.mark.parametrize("policy", ["min", "max"])
def test_the_watermark_of_several_is_the_one_that_spark_s_policy_chooses(
    spark: SparkSession, oracle: Oracle, tmp_path: Path, configured: Callable[[str, str], None], policy: str
) -> None:
    configured(_POLICY, policy)
    swift, slow = (EpochFeed(spark, tmp_path / name, SCHEMA) for name in ("swift", "slow"))
    for feed, epochs in ((swift, SWIFT_EPOCHS), (slow, SLOW_EPOCHS)):
        feed.add(*([("k", moment(FAR_S + second), second) for second in seconds] for seconds in epochs))
    rows = assert_like_spark(oracle, meeting(slow), swift)
    # What is late under one policy is not under the other.
    assert ('"v":36' in str(rows)) == (policy == "min")
    assert {row.pipeline for row in rows} == {"united", "joined"}
