"""Append mode, sessions and de-duplication under a watermark: the rows that Spark gives, and state that goes."""

import random
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.core.errors import UnsupportedError
from support.oracle import Oracle, Result, drain
from support.seeds import seeds
from support.side_by_side import rows_of, side_by_side
from support.streams import EpochFeed, quick_checkpoints

START = datetime(2026, 1, 1)
Query = Callable[[Any], Any]
SCHEMA = "ts timestamp, k string, v long"
#: The epoch before which some queries are started again.
RESTART = 3


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


Epochs = list[list[tuple[datetime | None, str | None, int]]]


def some_epochs(seed: int) -> Epochs:
    """Times that rise by 20 s from epoch to epoch, with rows that are late, that just are not, and that repeat."""
    chance = random.Random(seed)
    epochs: Epochs = []
    for number in range(5):
        rows = [
            (
                at(max(0, chance.randrange(20 * number - 45, 20 * number + 15))),
                chance.choice("abcd"),
                chance.randrange(4),
            )
            for _ in range(25)
        ]
        epochs.append([*rows, *rows[:3], (at(20 * number + 14.5), None, 1), (None, "a", 1)])
    # All that came before is over in the last epoch.
    return [*epochs, [(at(1000), "z", 1)], [(at(1001), "z", 2)]]


@pytest.fixture(scope="module", params=seeds(7))
def epochs(request: pytest.FixtureRequest) -> Epochs:
    return some_epochs(request.param)


@pytest.fixture(scope="module")
def feed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, epochs: Epochs) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path_factory.mktemp("windows") / "input", SCHEMA)
    feed.add(*epochs)
    return feed


def watermarked(rows: Any) -> Any:
    return rows.withWatermark("ts", "10 seconds")


def tumbling(rows: Any) -> Any:
    sums = F.count("*").alias("n"), F.sum("v").alias("total"), F.avg("v").alias("mean"), F.max("ts").alias("last")
    return watermarked(rows).groupBy(F.window("ts", "10 seconds"), "k").agg(*sums)


def windows_of_windows(rows: Any) -> Any:
    first = watermarked(rows).groupBy("k", F.window("ts", "10 seconds", "5 seconds")).agg(F.count("*").alias("n"))
    return first.groupBy(F.window(F.window_time("window"), "20 seconds"), "k").agg(F.max("n").alias("most"))


def sessions(rows: Any) -> Any:
    sums = F.count("*").alias("n"), F.avg("v").alias("mean"), F.min("ts").alias("first")
    return watermarked(rows).groupBy("k", F.session_window("ts", "3 seconds")).agg(*sums)


def sessions_of_changing_gaps(rows: Any) -> Any:
    gap = F.when(F.col("k") == "a", "12 seconds").when(F.col("k") == "b", "-1 seconds").otherwise("2 seconds")
    return watermarked(rows).groupBy(F.session_window("ts", gap).alias("s"), "k", "v").count()


def first_within_watermark(rows: Any) -> Any:
    return watermarked(rows).dropDuplicatesWithinWatermark(["K", "v"])


def distinct_counted(rows: Any) -> Any:
    zeros = (
        watermarked(rows).where("ts is not null").withColumn("x", F.when(F.col("v") > 1, 0.0).otherwise(-0.0)).drop("v")
    )
    return zeros.distinct().groupBy(F.window("ts", "20 seconds")).agg(F.count("x").alias("n"))


@pytest.mark.parametrize(("query", "mode"), [(tumbling, "append"), (sessions_of_changing_gaps, "complete")])
def test_the_same_rows_in_the_same_epochs_as_spark(oracle: Oracle, feed: EpochFeed, query: Query, mode: str) -> None:
    native = oracle.native(query, feed.stream(), mode)
    ours = oracle.ours(query, feed.stream(), mode)
    assert ours.schemas == native.schemas
    expected, found = ({e: rows for e, rows in result.by_epoch().items() if rows} for result in (native, ours))
    assert found == expected
    assert len(expected) > 3


#: By the name of their first stateful stage.
APPENDED = {"windows": windows_of_windows, "sessions": sessions, "first": first_within_watermark}


def appended(rows: Any) -> Any:
    starts = {name: rows.stage(name) if isinstance(rows, anabranch.Stream) else rows for name in APPENDED}
    return side_by_side({name: query(starts[name]) for name, query in APPENDED.items()})


def counted(rows: Any) -> Any:
    return side_by_side({"counted": distinct_counted(rows)})


@pytest.mark.parametrize(
    ("query", "mode", "stages"), [(appended, "append", APPENDED), (counted, "update", {5: distinct_counted})]
)
def test_a_restart_changes_nothing_and_state_goes_with_the_watermark(
    spark: SparkSession, oracle: Oracle, epochs: Epochs, query: Query, mode: str, stages: dict[str | int, Query]
) -> None:
    place = oracle.new_folder("restarted")
    some = EpochFeed(spark, place / "input", SCHEMA)
    native, result = Result(), Result()

    def writer_of(rows: Any, into: Result, name: str) -> Any:
        writer = query(rows).writeStream.outputMode(mode).foreachBatch(into)
        return writer.option("checkpointLocation", str(place / name))

    spark_writer = writer_of(some.stream(), native, "native")
    writer = writer_of(anabranch.stream(some.stream()), result, "ours").options(**oracle.options)
    some.add(*epochs[:RESTART])
    with quick_checkpoints(spark):
        drain(spark_writer)
    drain(writer)
    some.add(*epochs[RESTART:])
    with quick_checkpoints(spark):
        drain(spark_writer)
    running = writer.trigger(processingTime="0 seconds").start()
    try:
        running.processAllAvailable()
        kept = {stage: {row["k"] for row in running.state(stage).collect()} for stage in stages}
    finally:
        running.stop()
    assert kept == {stage: {"z"} for stage in stages}
    for name in APPENDED if query is appended else ["counted"]:
        expected, found = (rows_of(name, list(chain(*each.epochs.values()))) for each in (native, result))
        assert found == expected, name
        assert sum(expected.values()) > 10, name


@pytest.mark.parametrize(
    ("query", "mode", "message"),
    [
        (lambda rows: rows.groupBy(F.window("ts", "5 seconds")).count(), "append", "append needs a watermark"),
        (sessions, "update", "update is not supported for session windows.*'append'"),
        (windows_of_windows, "update", "update is not supported for an aggregation after another"),
        (
            lambda rows: watermarked(rows).groupBy(F.window("ts", "5 seconds"), "ts").count(),
            "append",
            "'window', 'ts' all",
        ),
        (first_within_watermark, "complete", "complete needs an aggregation"),
    ],
)
def test_an_output_mode_that_spark_refuses_too(feed: EpochFeed, query: Query, mode: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        query(anabranch.stream(feed.stream())).writeStream.outputMode(mode).format("noop").start()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda rows: rows.dropDuplicatesWithinWatermark(["k"]), "needs a watermark"),
        (lambda rows: watermarked(rows).groupBy(F.session_window("ts", "5 seconds")).count(), "needs another key"),
        (lambda rows: watermarked(rows).withColumn("w", F.window("ts", "5 seconds")).distinct(), "'ts', 'w' all have"),
        (
            lambda rows: watermarked(rows).groupBy("ts", F.session_window(F.now(), "5 seconds")).count(),
            "'ts' has a watermark, and the session window beside it has none",
        ),
    ],
)
def test_what_cannot_work_is_said_when_it_is_built(feed: EpochFeed, build: Query, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(anabranch.stream(feed.stream()))
