"""Rows that a stage gives out although the watermark has passed them, and late rows of joins whose time nobody uses."""

import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch
from support.oracle import Oracle, Result, drain
from support.streams import EpochFeed

# Processors travel with the tasks, which cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

START = datetime(2026, 1, 1)
SCHEMA = "id long, ts timestamp, k string"
_STORE = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_CONDITION = "EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED"
Query = Callable[[Any], Any]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


#: The watermark is at 90 s after the first of these epochs: what is not later than that is late in the third.
EPOCHS = [[(10 * n + i, at(100 * n + i), f"k{i}") for i in range(1, 11)] for n in range(1, 4)]
#: So many seconds earlier, the rows of the third epoch are late.
OLD = 250


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)
    feed.add(*EPOCHS)
    return feed


class Delaying(StatefulProcessor):
    """Gives out each row with an earlier time."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del key, timerValues
        for row in rows:
            yield Row(id=row.id, ts=row.ts - timedelta(seconds=self._seconds), k=row.k)

    def close(self) -> None:
        pass


def delayed(rows: Any, seconds: int) -> Any:
    processor = Delaying(seconds)
    return rows.groupBy("k").transformWithState(processor, SCHEMA, "append", "none", eventTimeColumnName="ts")


def watermarked(rows: Any) -> Any:
    return rows.withWatermark("ts", "20 seconds")


def windows(seconds: int) -> Query:
    def query(rows: Any) -> Any:
        return delayed(watermarked(rows), seconds).groupBy(F.window("ts", "10 seconds")).agg(F.sum("id").alias("ids"))

    return query


def alone(rows: Any) -> Any:
    return delayed(watermarked(rows), OLD)


@pytest.mark.parametrize("query", [windows(OLD), alone], ids=["before another stage", "alone"])
def test_a_stage_that_gives_out_rows_older_than_the_watermark_fails_as_in_spark(
    spark: SparkSession, feed: EpochFeed, oracle: Oracle, query: Query
) -> None:
    spark.conf.set(_STORE, _ROCKSDB)
    try:
        with pytest.raises(StreamingQueryException, match=_CONDITION):
            oracle.native(query, feed.stream(), "append")
    finally:
        spark.conf.unset(_STORE)
    with pytest.raises(StreamingQueryException, match=rf"{_CONDITION}\] The stage 'stage2' .* ts .*not after"):
        oracle.ours(query, feed.stream(), "append")


def test_rows_that_are_not_older_than_the_watermark_may_have_any_time(
    spark: SparkSession, feed: EpochFeed, oracle: Oracle
) -> None:
    spark.conf.set(_STORE, _ROCKSDB)
    try:
        native = oracle.check(windows(50), feed, "append")
    finally:
        spark.conf.unset(_STORE)
    assert sum(map(len, native.epochs.values())) >= 2


def test_with_late_rows_a_later_stage_keeps_what_is_too_old_for_it(feed: EpochFeed, oracle: Oracle) -> None:
    late: list[Row] = []
    accepted: list[int] = []

    def keep_late(rows: DataFrame, epoch: int) -> None:
        late.extend(row for row in rows.withColumn("epoch", F.lit(epoch)).collect())

    def keep(rows: DataFrame, epoch: int) -> None:
        del epoch
        accepted.extend(row.ids for row in rows.collect())

    def collected(rows: Any) -> Any:
        named = delayed(watermarked(rows), OLD).stage("windows").groupBy(F.window("ts", "10 seconds"))
        return named.agg(F.count("*").alias("ids"))

    def writer(query: Query) -> Any:
        stream = query(anabranch.stream(feed.stream())).writeStream.outputMode("append").options(**oracle.options)
        return (
            stream.lateRows(keep_late).foreachBatch(keep).option("checkpointLocation", str(oracle.new_folder("late")))
        )

    ended = drain(writer(collected))
    assert {row["_stage"] for row in late} == {"windows"}
    assert {row.id for row in late} == {row[0] for row in EPOCHS[2]}
    assert all(row.ts <= row["_watermark"] for row in late)
    assert sum(accepted) == len(EPOCHS[0]) + len(EPOCHS[1])
    reports = ended.recentProgress
    assert sum(report["anabranch"]["lateRows"] for report in reports) == len(late)
    dropped = [[each.numRowsDroppedByWatermark for each in report.stateOperators] for report in reports]
    # Rows of a window that are combined before count as one, as in Spark.
    assert sum(sum(each) for each in dropped) == sum(each[0] for each in dropped) > 0
    # Where no later stage would keep them, they are no late rows of any.
    distinct = lambda rows: watermarked(rows).dropDuplicates(["id", "ts"])  # noqa: E731
    with pytest.raises(StreamingQueryException, match=_CONDITION):
        drain(writer(lambda rows: delayed(distinct(rows), OLD).select(F.col("id").alias("ids"))))


@pytest.mark.parametrize("times", [[], ["ts"]], ids=["without the time", "with the time"])
def test_late_rows_of_a_join_are_dropped_whether_or_not_their_time_is_used(
    spark: SparkSession, oracle: Oracle, times: list[str]
) -> None:
    """Spark keeps them where nothing after the join uses the time: it has left the column out before the join."""
    feed = EpochFeed(spark, oracle.new_folder("joined") / "input", SCHEMA)
    feed.add([(0, at(101), "a"), (1, at(102), "a")], [(2, at(205), "b"), (3, at(206), "b")])
    feed.add([(4, at(50), "a"), (5, at(301), "b")])

    def joined(rows: Any) -> Any:
        other = rows.filter("id % 2 = 1").selectExpr("id as other", "ts as at", "k as who")
        pairs = watermarked(rows.filter("id % 2 = 0")).join(other.withWatermark("at", "20 seconds"), F.expr("k = who"))
        return pairs.select("id", "other", *times)

    native, ours = oracle.native(joined, feed.stream(), "append"), oracle.ours(joined, feed.stream(), "append")
    pairs, late = {(0, 1), (2, 3), (2, 5)}, {(4, 1)}
    assert pairs_of(ours) == pairs
    assert pairs_of(native) == (pairs if times else pairs | late)


def pairs_of(result: Result) -> set[tuple[int, int]]:
    return {(row.id, row.other) for rows in result.epochs.values() for row in rows}
