"""Joins of two streams give the rows that Spark's own joins give, and keep no more state than the watermark needs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.core.errors import UnsupportedError
from support.oracle import Oracle, Result, drain, names_and_types
from support.seeds import seeds
from support.streams import EpochFeed, quick_checkpoints

START = datetime(2026, 1, 1)
EPOCHS = 3
KEYS = ["a", "b", "c", "d", None]
#: Everything before is over when the last epochs have run.
FAR = 4000
LATE = 12345
Feeds = tuple[EpochFeed, EpochFeed]
Query = Callable[[Any, Any], Any]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def generated(side: int, seed: int = 0, *, late: bool = False) -> list[list[tuple[Any, ...]]]:
    """Rows of one side: a minute for each epoch, and at last epochs far in the future, which move the watermark."""
    draw = random.Random(side + 2 * seed)
    epochs = []
    for epoch in range(EPOCHS):
        rows = [
            (draw.choice(KEYS), at(60 * epoch + draw.randrange(60)), draw.randrange(100), draw.choice([0.0, -0.0, 1.5]))
            for _ in range(12)
        ]
        epochs.append(rows + rows[:2])
    ends = [[(f"{name}{side}", at(FAR), 1, 0.0)] for name in ("far", "further", "end")]
    if late:
        # Spark goes by the watermark of the epoch before: the first of them is not late yet.
        ends[-2].append(("a", at(150), 7, 1.5))
        ends[-1].append(("a", at(150), LATE, 1.5))
    return [*epochs, *ends]


@pytest.fixture
def feeds(spark: SparkSession, tmp_path: Path) -> Feeds:
    left = EpochFeed(spark, tmp_path / "left", "k string, t timestamp, a int, x double")
    right = EpochFeed(spark, tmp_path / "right", "k string, t timestamp, b int, x double")
    return left, right


def marked(left: Any, right: Any) -> tuple[Any, Any]:
    return left.withWatermark("t", "100 seconds"), right.withWatermark("t", "90 seconds")


def bounded(how: str) -> Query:
    """Rows of the right within a minute before and half a minute after one of the left."""

    def query(left: Any, right: Any) -> Any:
        near = left.t.between(right.t - F.expr("interval 30 seconds"), right.t + F.expr("interval 1 minute"))
        return left.join(right, (left.k == right.k) & near, how)

    return query


def with_predicates(left: Any, right: Any) -> Any:
    """Conditions on one side and on both, in SQL, with the sides' aliases in what follows."""
    text = """l.k <=> r.k AND l.t BETWEEN r.t - INTERVAL 30 SECONDS AND r.t + INTERVAL 1 MINUTE
              AND l.a > 10 AND r.b < 95 AND (l.a - r.b > -20 OR l.x = r.x AND NOT abs(l.a - r.b) = 3)
              AND l.t - r.t < INTERVAL '50' SECOND"""
    left, right = marked(left, right)
    joined = left.alias("l").join(right.alias("r"), F.expr(text), "full")
    return joined.select("l.k", F.col("l.t").alias("lt"), "a", F.col("r.k").alias("rk"), "r.t", "b")


def in_windows(left: Any, right: Any) -> Any:
    left, right = marked(left, right)
    left = left.select(F.window("t", "1 minute").alias("w"), "k", "a")
    right = right.select(F.window("t", "1 minute").alias("w"), "k", "b")
    return left.join(right, ["w", "k"], "full_outer")


def counted_in_windows(left: Any, right: Any) -> Any:
    """How many rows, and how many with a match, in windows that end while rows still wait for theirs."""
    left, right = marked(left, right)
    joined = bounded("left_outer")(left, right).select(left.t.alias("at"), right.b)
    return joined.groupBy(F.window("at", "20 seconds")).agg(F.count("*").alias("n"), F.count("b").alias("matches"))


def writer_of(stream: Any, oracle: Oracle, result: Result, checkpoint: Path) -> Any:
    writer = stream.writeStream.foreachBatch(result).outputMode("append").options(**oracle.options)
    return writer.option("checkpointLocation", str(checkpoint))


def all_rows(result: Result) -> Counter[str]:
    return sum(result.multisets(), Counter())


def settled(rows: DataFrame, *times: str) -> Counter[str]:
    """The rows of a join as a batch, without those of the last epochs, which still wait for a match."""
    return all_rows(Result(epochs={0: rows.filter(F.coalesce(*times) < F.lit(at(FAR))).collect()}))


def assert_same(found: Counter[str], expected: Counter[str]) -> None:
    assert found == expected, f"too many: {list(found - expected)[:5]}, missing: {list(expected - found)[:5]}"
    assert sum(expected.values()) > 8


@pytest.mark.parametrize("seed", seeds(0))
@pytest.mark.parametrize("query", [with_predicates, in_windows, counted_in_windows])
def test_an_outer_join_gives_the_rows_of_spark(oracle: Oracle, feeds: Feeds, query: Query, seed: int) -> None:
    for number, feed in enumerate(feeds):
        feed.add(*generated(number, seed, late=True))
    left, right = (feed.stream() for feed in feeds)
    native, ours = Result(), Result()
    stream = query(anabranch.stream(left), right)
    with quick_checkpoints(left.sparkSession):
        drain(writer_of(query(left, right), oracle, native, oracle.new_folder("native")))
    drain(writer_of(stream, oracle, ours, oracle.new_folder("ours")))
    assert ours.schemas == native.schemas == [names_and_types(stream.schema)]
    assert_same(all_rows(ours), all_rows(native))
    assert not any(str(LATE) in row for row in all_rows(ours))


@pytest.mark.parametrize("seed", seeds(0))
def test_an_outer_join_goes_on_after_a_restart(oracle: Oracle, feeds: Feeds, seed: int) -> None:
    query = bounded("right_outer")
    checkpoint, ours = oracle.new_folder("restarted"), Result()
    rows = [generated(number, seed) for number in range(2)]
    for part in (slice(0, 3), slice(3, None)):
        for feed, epochs in zip(feeds, rows, strict=True):
            feed.add(*epochs[part])
        left, right = marked(*(anabranch.stream(feed.stream()) for feed in feeds))
        drain(writer_of(query(left, right), oracle, ours, checkpoint))
    left, right = (feed.spark.read.parquet(str(feed.folder)) for feed in feeds)
    assert_same(all_rows(ours), settled(query(left, right), left.t, right.t))


@pytest.mark.parametrize("seed", seeds(0))
def test_a_semi_join_gives_each_row_once_and_forgets_what_is_over(oracle: Oracle, feeds: Feeds, seed: int) -> None:
    for number, feed in enumerate(feeds):
        feed.add(*generated(number, seed))
    query, ours = bounded("left_semi"), Result()
    left, right = marked(*(anabranch.stream(feed.stream()) for feed in feeds))
    running = writer_of(query(left, right), oracle, ours, oracle.new_folder("semi")).start()
    try:
        running.processAllAvailable()
        kept = [{row["k"] for row in running.state("stage2", side).collect()} for side in ("left", "right")]
    finally:
        running.stop()
    assert kept == [{"far0", "further0", "end0"}, {"far1", "further1", "end1"}]
    left, right = (feed.spark.read.parquet(str(feed.folder)) for feed in feeds)
    assert_same(all_rows(ours), settled(query(left, right), "t"))


def test_a_stream_joined_with_itself_by_names_is_counted(oracle: Oracle, feeds: Feeds) -> None:
    def query(rows: Any) -> Any:
        joined = rows.join(rows, ["k", "x"]).filter("k != 'far0'")
        return joined.groupBy("k", "x").agg(F.count("*").alias("n"))

    (feed, _), ours = feeds, Result()
    feed.add(*generated(0)[:3])
    stream = query(anabranch.stream(feed.stream()))
    drain(writer_of(stream, oracle, ours, oracle.new_folder("self")).outputMode("update"))
    last = {(row.k, row.x): row.n for epoch in sorted(ours.epochs) for row in ours.epochs[epoch]}
    expected = {(row.k, row.x): row.n for row in query(feed.spark.read.parquet(str(feed.folder))).collect()}
    assert last == expected
    assert len(expected) == 8


def test_streams_are_united_and_joined_with_static_rows(spark: SparkSession, oracle: Oracle, feeds: Feeds) -> None:
    names = spark.createDataFrame([("a", "Anna"), ("b", "Bert"), ("z", "Zoe")], "k string, name string")
    hidden = spark.createDataFrame([("Bert",)], "name string")

    def query(left: Any, right: Any) -> Any:
        both = left.select("k", "a").unionByName(right.select("k", F.col("b").alias("a"))).union(left.select("k", "a"))
        totals = both.join(names, "k", "left").groupBy("k", "name").agg(F.sum("a").alias("total"))
        return totals.join(hidden, "name", "left_anti").join(names.drop("name"), ["k"], "left_semi")

    ours = Result()
    for number, feed in enumerate(feeds):
        feed.add(generated(number)[0])
    stream = query(*(anabranch.stream(feed.stream()) for feed in feeds))
    drain(writer_of(stream, oracle, ours, oracle.new_folder("static")).outputMode("update"))
    expected = query(*(spark.read.parquet(str(feed.folder)) for feed in feeds))
    assert all_rows(ours) == all_rows(Result(epochs={0: expected.collect()}))
    assert ours.schemas == [names_and_types(expected.schema)]


def test_results_have_the_columns_that_spark_gives_them(feeds: Feeds) -> None:
    left, right = marked(*(feed.stream() for feed in feeds))
    ours = anabranch.stream(left)
    for join in (
        lambda rows: rows.join(right, "k"),
        lambda rows: rows.join(right, ["k", "t"], "full"),
        lambda rows: rows.join(right, [left.k == right.k, left.t == right.t], "right").drop(right.k),
        lambda rows: rows.join(right, ["t", "x"], "leftsemi"),
        lambda rows: rows.join(right, left.k == right.k).select(left.k, right.b, (left.a + right.b).alias("c")),
    ):
        assert join(ours).schema.simpleString() == join(left).schema.simpleString()


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (lambda left, right: left.join(right, "k", "left"), "without a watermark in the join keys"),
        (lambda left, right: left.join(right, "k", "left_anti"), "not supported"),
        (lambda left, right: left.join(right, left.t < right.t), "at least one equality"),
        (lambda left, right: left.crossJoin(right), "join with a key"),
        (lambda left, right: left.join(right, (left.k == right.k) & (F.concat(left.k, right.k) > "x")), "concat"),
        (lambda left, right: left.join(right, (left.k == right.k) & (left.a / right.b > 2)), "combines columns"),
        (lambda left, right: left.join(right, "k").join(right, "k"), "'t', 't' of one side of the join all have"),
        (lambda left, right: left.join(right.sparkSession.range(3), F.lit(True), "right"), "static DataFrame"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_refused_when_it_is_built(feeds: Feeds, join: Query, reason: str) -> None:
    left, right = marked(*(feed.stream() for feed in feeds))
    with pytest.raises(UnsupportedError, match=reason):
        join(anabranch.stream(left), anabranch.stream(right))
