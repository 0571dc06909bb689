"""Windows under a watermark: the rows that Spark gives, late rows dropped, and state that does not grow for ever."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch
from support.oracle import Oracle
from support.streams import EpochFeed, run_anabranch, run_native

START = datetime(2026, 1, 1)


def at(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


EPOCHS = [
    [(at(1), "a"), (at(4), "a"), (at(11), "b")],
    [(at(25), "a"), (at(12), "b")],
    # The watermark is 15 s from here on. What is late is decided by that of the epoch before.
    [(at(24), "b")],
    # The first of these is late, the second is not.
    [(at(3), "a"), (at(18), "c"), (at(26), "a")],
    [(at(60), "a"), (at(2), "late")],
    [(at(60), "a")],
    [(at(61), "a"), (at(27), "late"), (at(49), "late"), (at(55), "b")],
]


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path / "input", "ts timestamp, k string")
    feed.add(*EPOCHS)
    return feed


def tumbling(rows: Any) -> Any:
    watermarked = rows.withWatermark("ts", "10 seconds")
    return watermarked.groupBy(F.window("ts", "10 seconds"), "k").agg(
        F.count("*").alias("n"), F.max("ts").alias("last")
    )


def sliding(rows: Any) -> Any:
    watermarked = rows.withWatermark("ts", "10 seconds")
    return watermarked.groupBy("k", F.window("ts", "20 seconds", "10 seconds")).agg(F.count("*").alias("n"))


def by_time(rows: Any) -> Any:
    return rows.withWatermark("ts", "10 seconds").groupBy("ts").count()


@pytest.mark.parametrize("query", [tumbling, sliding, by_time])
def test_late_rows_are_dropped_as_spark_drops_them(oracle: Oracle, feed: EpochFeed, tmp_path: Path, query: Any) -> None:
    native = run_native(query, feed.stream(), tmp_path / "native")
    ours = run_anabranch(query, feed.stream(), tmp_path / "ours", options=oracle.options)
    assert ours.multisets() == native.multisets()
    if query is tumbling:
        assert not any("late" in row for epoch in ours.multisets() for row in epoch)


def test_complete_mode_keeps_every_window(oracle: Oracle, feed: EpochFeed, tmp_path: Path) -> None:
    ours = run_anabranch(tumbling, feed.stream(), tmp_path / "ours", mode="complete", options=oracle.options)
    native = run_native(tumbling, feed.stream(), tmp_path / "native", mode="complete")
    assert ours.multisets() == native.multisets()


def test_state_of_closed_windows_is_removed(oracle: Oracle, feed: EpochFeed, tmp_path: Path) -> None:
    """By a worker that keeps it in memory, and by one that keeps it on disk."""

    def start() -> Any:
        writer = tumbling(anabranch.stream(feed.stream())).writeStream.outputMode("update").format("noop")
        return writer.option("checkpointLocation", str(tmp_path / "ck")).options(**oracle.options).start()

    query = start()
    try:
        query.processAllAvailable()
        ends = {row["window"]["end"] for row in query.state(2).collect()}
        assert min(ends) == at(60)
    finally:
        query.stop()
    feed.add([(at(100), "z")], [(at(101), "z")])
    query = start()
    try:
        query.processAllAvailable()
        assert {row["k"] for row in query.state(2).collect()} == {"z"}
    finally:
        query.stop()


def test_windows_have_no_state_before_the_first_row(spark: SparkSession, tmp_path: Path) -> None:
    feed = EpochFeed(spark, tmp_path / "input", "ts timestamp, k string")
    writer = tumbling(anabranch.stream(feed.stream())).writeStream.outputMode("update").format("noop")
    query = writer.option("checkpointLocation", str(tmp_path / "ck")).start()
    try:
        assert query.state(2).columns == ["window", "k", "n", "last"]
        assert query.state(2).collect() == []
    finally:
        query.stop()
