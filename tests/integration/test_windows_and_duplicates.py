"""Append mode, sessions and de-duplication under a watermark: the rows that Spark gives, and state that goes."""

import random
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle, Result, drain, names_and_types
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from streams import EpochFeed

import anabranch
from anabranch.core.errors import UnsupportedError

START = datetime(2026, 1, 1)
Query = Callable[[Any], Any]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def some_epochs() -> list[list[tuple[datetime | None, str | None, int]]]:
    """Times that rise by 20 s from epoch to epoch, with rows that are late, that just are not, and that repeat."""
    chance = random.Random(7)
    epochs = []
    for number in range(5):
        # After the restart, which comes before the fourth epoch, none is so late that it matters when Spark ticks.
        earliest = 20 * number - (0 if number == 3 else 45)
        rows = [
            (at(max(0, chance.randrange(earliest, 20 * number + 15))), chance.choice("abcd"), chance.randrange(4))
            for _ in range(25)
        ]
        epochs.append([*rows, *rows[:3], (at(20 * number + 14.5), None, 1), (None, "a", 1)])
    # All that came before is over in the last epoch.
    return [*epochs, [(at(1000), "z", 1)], [(at(1001), "z", 2)]]


EPOCHS = some_epochs()


@pytest.fixture(scope="module")
def feed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path_factory.mktemp("windows") / "input", "ts timestamp, k string, v long")
    feed.add(*EPOCHS)
    return feed


def watermarked(rows: Any) -> Any:
    return rows.withWatermark("ts", "10 seconds")


def tumbling(rows: Any) -> Any:
    sums = F.count("*").alias("n"), F.sum("v").alias("total"), F.avg("v").alias("mean"), F.max("ts").alias("last")
    return watermarked(rows).groupBy(F.window("ts", "10 seconds"), "k").agg(*sums)


def sliding(rows: Any) -> Any:
    return watermarked(rows).groupBy("k", F.window("ts", "20 seconds", "10 seconds")).agg(F.count("*").alias("n"))


def by_time(rows: Any) -> Any:
    return watermarked(rows).groupBy("ts").count()


def windows_of_windows(rows: Any) -> Any:
    first = watermarked(rows).groupBy(F.window("ts", "5 seconds"), "k").agg(F.count("*").alias("n"))
    return first.groupBy(F.window(F.window_time("window"), "20 seconds")).agg(F.max("n").alias("most"))


def sessions(rows: Any) -> Any:
    sums = F.count("*").alias("n"), F.avg("v").alias("mean"), F.min("ts").alias("first")
    return watermarked(rows).groupBy("k", F.session_window("ts", "3 seconds")).agg(*sums)


def sessions_of_changing_gaps(rows: Any) -> Any:
    gap = F.when(F.col("k") == "a", "12 seconds").when(F.col("k") == "b", "-1 seconds").otherwise("2 seconds")
    return watermarked(rows).groupBy(F.session_window("ts", gap).alias("s"), "k", "v").count()


def first_of_key_and_time(rows: Any) -> Any:
    return watermarked(rows).dropDuplicates(["k", "ts"])


def first_within_watermark(rows: Any) -> Any:
    return watermarked(rows).dropDuplicatesWithinWatermark(["k", "v"])


def distinct_counted(rows: Any) -> Any:
    return watermarked(rows).distinct().groupBy(F.window("ts", "20 seconds")).agg(F.count("v").alias("n"))


def first_of_key(rows: Any) -> Any:
    return rows.withColumn("x", F.col("v") * -0.5).dropDuplicates(["K", "x"])


def filled(result: Result) -> dict[int, Counter[str]]:
    return {epoch: rows for epoch, rows in result.by_epoch().items() if rows}


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        (tumbling, "append"),
        (sliding, "append"),
        (sliding, "update"),
        (windows_of_windows, "append"),
        (sessions, "append"),
        (sessions, "complete"),
        (sessions_of_changing_gaps, "append"),
        (first_of_key_and_time, "append"),
        (first_within_watermark, "append"),
        (distinct_counted, "update"),
        (first_of_key, "update"),
    ],
)
def test_the_same_rows_in_the_same_epochs_as_spark(oracle: Oracle, feed: EpochFeed, query: Query, mode: str) -> None:
    native = oracle.native(query, feed.stream(), mode)
    ours = oracle.ours(query, feed.stream(), mode)
    assert ours.schemas == native.schemas
    assert filled(ours) == filled(native)
    assert sum(sum(rows.values()) for rows in filled(native).values()) >= 5
