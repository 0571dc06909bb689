"""Joins of two streams give the rows that Spark's own joins give, and keep no more state than the watermark needs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from oracle import Oracle, Result, drain, names_and_types
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from streams import EpochFeed

import anabranch

START = datetime(2026, 1, 1)
EPOCHS = 5
KEYS = ["a", "b", "c", "d", "e", None]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def generated(seed: int) -> list[list[tuple[Any, ...]]]:
    """Rows of one side: a minute for each epoch, some far too late, and at last epochs far in the future."""
    draw = random.Random(seed)
    epochs = []
    for epoch in range(EPOCHS):
        rows = [
            (draw.choice(KEYS), at(60 * epoch + draw.randrange(60)), draw.randrange(100), draw.choice([0.0, -0.0, 1.5]))
            for _ in range(12)
        ]
        if epoch > 3:
            rows.append(("a", at(60 * (epoch - 4)), 50, 1.5))
        epochs.append(rows + rows[:2])
    return [*epochs, [(f"last{seed}", at(4000), 1, 0.0)], [(f"end{seed}", at(4000), 1, 0.0)]]


@pytest.fixture(scope="module")
def feeds(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[EpochFeed, EpochFeed]:
    folder = tmp_path_factory.mktemp("joins")
    left = EpochFeed(spark, folder / "left", "k string, t timestamp, a int, x double")
    right = EpochFeed(spark, folder / "right", "k string, t timestamp, b int, x double")
    left.add(*generated(1))
    right.add(*generated(2))
    return left, right


Query = Callable[[Any, Any], Any]


def marked(left: Any, right: Any) -> tuple[Any, Any]:
    return left.withWatermark("t", "100 seconds"), right.withWatermark("t", "90 seconds")


def bounded(how: str) -> Query:
    """Rows of the right within a minute before and half a minute after one of the left."""

    def query(left: Any, right: Any) -> Any:
        left, right = marked(left, right)
        near = left.t.between(right.t - F.expr("interval 30 seconds"), right.t + F.expr("interval 1 minute"))
        return left.join(right, (left.k == right.k) & near, how)

    return query


def unbounded(left: Any, right: Any) -> Any:
    return left.join(right, ["k", "x"]).withColumn("sum", F.col("a") + F.col("b"))


def with_predicates(left: Any, right: Any) -> Any:
    """Conditions on one side and on both, in SQL, with the sides' aliases in what follows."""
    left, right = marked(left, right)
    text = """l.k <=> r.k AND l.t BETWEEN r.t - INTERVAL 30 SECONDS AND r.t + INTERVAL 1 MINUTE
              AND l.a > 10 AND r.b < 95 AND (l.a - r.b > -20 OR l.x = r.x AND NOT abs(l.a - r.b) = 3)"""
    joined = left.alias("l").join(right.alias("r"), F.expr(text), "left")
    return joined.select("l.k", F.col("l.t").alias("lt"), "a", F.col("r.k").alias("rk"), "r.t", "b")


def windows(how: str) -> Query:
    def query(left: Any, right: Any) -> Any:
        left, right = marked(left, right)
        left = left.select(F.window("t", "1 minute").alias("w"), "k", "a")
        right = right.select(F.window("t", "1 minute").alias("w"), "k", "b")
        return left.join(right, ["w", "k"], how)

    return query


def run_both(oracle: Oracle, feeds: tuple[EpochFeed, EpochFeed], query: Query) -> tuple[Result, Result]:
    left, right = (feed.stream() for feed in feeds)
    native, ours = Result(), Result()
    stream = query(anabranch.stream(left), anabranch.stream(right))
    for rows, result in ((query(left, right), native), (stream, ours)):
        writer = rows.writeStream.outputMode("append").foreachBatch(result)
        if result is ours:
            writer = writer.options(**oracle.options)
        drain(writer.option("checkpointLocation", str(oracle.new_folder("join"))))
    assert ours.schemas == native.schemas == [names_and_types(stream.schema)]
    return native, ours


def all_rows(result: Result) -> Counter[str]:
    return sum(result.multisets(), Counter())


QUERIES = {
    "inner": bounded("inner"),
    "unbounded": unbounded,
    "left": bounded("left_outer"),
    "right": bounded("right"),
    "full": bounded("full_outer"),
    "semi": bounded("left_semi"),
    "windows, left": windows("left"),
    "windows, full": windows("full"),
    "predicates": with_predicates,
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_join_gives_the_rows_of_spark(oracle: Oracle, feeds: tuple[EpochFeed, EpochFeed], name: str) -> None:
    native, ours = run_both(oracle, feeds, QUERIES[name])
    expected, found = all_rows(native), all_rows(ours)
    assert found == expected, f"too many: {list(found - expected)[:5]}, missing: {list(expected - found)[:5]}"
    assert sum(expected.values()) > 20
