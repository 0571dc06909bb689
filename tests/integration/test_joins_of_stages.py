"""Joins and unions of streams that have stateful stages of their own give the rows that Spark gives."""

import random
from collections import Counter
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.core.errors import UnsupportedError
from anabranch.testing.steps import Rescale, Restart, Rows
from anabranch.testing.streams import StreamTest
from support.oracle import Oracle, Result, names_and_types
from support.side_by_side import rows_of, side_by_side
from support.streams import EpochFeed, quick_checkpoints

START = datetime(2026, 1, 1)
SCHEMA = "k string, ts timestamp, v long"
EPOCHS = 3


def epochs_of(seed: int) -> list[list[tuple[str, datetime, int]]]:
    """Rows of a few keys, whose times move on from epoch to epoch, and some of which are late."""
    chance = random.Random(seed)
    epochs = []
    for number in range(EPOCHS):
        times = [number * 15 + chance.choice((-40, 0, 0, 0, 0, 0)) + chance.uniform(0, 15) for _ in range(25)]
        rows = [(chance.choice("abc"), START + timedelta(seconds=int(s)), chance.randrange(9)) for s in times]
        epochs.append([*rows, ("tick", START + timedelta(seconds=number * 15 + 14), 0)])
    # Far enough ahead for all that waits to go out.
    return [*epochs, [("end", START + timedelta(seconds=600), 0)], [("end", START + timedelta(seconds=900), 0)]]


@pytest.fixture(scope="module")
def feeds(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[DataFrame]:
    streams = []
    for number in range(3):
        feed = EpochFeed(spark, tmp_path_factory.mktemp("meeting") / f"input{number}", SCHEMA)
        feed.add(*epochs_of(number))
        streams.append(feed.stream())
    return streams


def prefixed(rows: Any, prefix: str) -> Any:
    named = rows.select(*[F.col(name).alias(prefix + name) for name in ("k", "ts", "v")])
    return named.withWatermark(f"{prefix}ts", "5 seconds")


def windowed(rows: Any, prefix: str, alias: str) -> Any:
    window = F.window(f"{prefix}ts", "10 seconds").alias("window")
    return prefixed(rows, prefix).groupBy(window, F.col(f"{prefix}k").alias("k")).agg(F.sum(f"{prefix}v").alias(alias))


def aggregates_joined(one: Any, two: Any, three: Any) -> Any:
    """Two windowed sums, joined on the window, and summed up again."""
    del three
    joined = windowed(one, "a", "x").join(windowed(two, "b", "y"), ["window", "k"])
    larger = joined.withColumn("both", F.col("x") + F.col("y")).where("both >= 0")
    return larger.groupBy(F.window(F.window_time("window"), "20 seconds")).agg(
        F.sum("both").alias("both"), F.count("*").alias("n")
    )


def three_joined(one: Any, two: Any, three: Any) -> Any:
    """A join of three streams; rows of the first two wait for each other, so the third has to wait too."""
    bounds = "bts between ats - interval 4 seconds and ats + interval 6 seconds"
    first = prefixed(one, "a").join(prefixed(two, "b"), F.expr(f"ak = bk and {bounds}"), "leftOuter")
    # Of both times only one may go on, in Spark too.
    shown = first.select("ak", "ats", "av", "bv", F.col("bts").cast("string").alias("other"))
    condition = "ak = ck and cts between ats and ats + interval 5 seconds and coalesce(bv, 0) <= cv"
    return shown.join(prefixed(three, "c"), F.expr(condition), "leftOuter")


def mixed(one: Any, two: Any, three: Any) -> Any:
    """A stream without state joined with one that has some, and both united with a third."""
    rows = prefixed(one, "a").select(F.window("ats", "10 seconds").alias("window"), F.col("ak").alias("k"), "av")
    joined = rows.alias("l").join(
        windowed(two, "b", "y").alias("r"), F.expr("l.window = r.window and l.k = r.k"), "left"
    )
    shown = joined.select("l.k", "av", F.col("y").alias("other"))
    new = (
        prefixed(three, "c")
        .dropDuplicates(["ck", "cts"])
        .select(F.lit(7).cast("long").alias("av"), F.col("ck").alias("k"))
    )
    return shown.unionByName(new, allowMissingColumns=True)


QUERIES = {"aggregates joined": aggregates_joined, "three joined": three_joined, "mixed": mixed}


def test_streams_that_meet_after_stateful_stages_give_what_spark_gives(oracle: Oracle, feeds: list[DataFrame]) -> None:
    def query(*streams: Any) -> Any:
        return side_by_side({name: build(*streams) for name, build in QUERIES.items()})

    one, *others = feeds
    native = oracle.native(lambda rows: query(rows, *others), one, "append")
    ours = oracle.ours(lambda rows: query(rows, *map(anabranch.stream, others)), one, "append")
    for name, build in QUERIES.items():
        expected, found = (rows_of(name, list(chain(*result.epochs.values()))) for result in (native, ours))
        assert found == expected, name
        assert sum(expected.values()) > 5, name
        schema = build(*map(anabranch.stream, feeds)).schema
        assert names_and_types(schema) == names_and_types(build(*feeds).schema), name


def both_sides(rows: Any) -> Any:
    """One stream, read twice: windowed sums of its halves, joined."""
    marked = rows.withWatermark("ts", "5 seconds")
    sums = [
        marked.where(F.col("v") % 2 == half).groupBy(F.window("ts", "10 seconds").alias("window"), "k")
        .agg(F.sum("v").alias(name))
        for half, name in enumerate(("even", "odd"))
    ]  # fmt: skip
    left = sums[0].stage("met") if isinstance(rows, anabranch.Stream) else sums[0]
    return left.join(sums[1], ["window", "k"], "leftOuter")


def one_by_one(query: Any, feed: EpochFeed, epochs: list[Any], checkpoint: Path) -> Result:
    """What Spark gives if it is done with each epoch's rows, and with what the watermark brings, before more come."""
    result = Result()
    writer = query(feed.stream()).writeStream.outputMode("append").foreachBatch(result)
    with quick_checkpoints(feed.spark):
        started = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        for rows in epochs:
            feed.add(rows)
            started.processAllAvailable()
    finally:
        started.stop()
    return result


def test_a_tree_of_stages_rescales_and_restarts(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = epochs_of(7)
    expected = one_by_one(both_sides, EpochFeed(spark, tmp_path / "input", SCHEMA), epochs, tmp_path / "checkpoint")
    with StreamTest(spark, SCHEMA, both_sides, outputMode="append", workers=1, parallelism=2) as test:
        disturbances = [[Rescale(workers=2, parallelism=3)], [Restart(crash=True)], [Rescale(parallelism=2)]]
        steps: list[Any] = []
        for number, rows in enumerate(epochs):
            steps += [Rows(rows), *(disturbances[number] if number < len(disturbances) else [])]
        found = Counter(repr(row) for rows in test.play(steps) for row in rows)
        waiting = test.state("met", "left")
        test.query.explain()
    assert found == Counter(repr(row) for rows in expected.epochs.values() for row in rows)
    assert sum(found.values()) > 5
    assert waiting == [], "what the watermark has passed is still in the state"
    assert "Stage 8 'met': repartitionById(2) by key group of [window: struct" in capsys.readouterr().out


def test_the_plan_shows_where_streams_meet(feeds: list[DataFrame], capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = map(anabranch.stream, feeds)
    aggregates_joined(one, two, three).explain()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("*8 after 3 and 7: join(on [window, k], inner)") for line in lines), lines
    counts = [windowed(rows.stage("same"), "a", "x") for rows in (one, two)]
    with pytest.raises(UnsupportedError, match="Both streams have a stage 'same'"):
        counts[0].join(counts[1], "k")
    bounded = F.expr("ak = bk and ats = bts")
    with pytest.raises(UnsupportedError, match="'ats', 'bts' of one side of the join all have a watermark"):
        prefixed(one, "a").join(prefixed(two, "b"), bounded).join(prefixed(three, "c"), F.expr("ak = ck"))
    with pytest.raises(UnsupportedError, match="Set withWatermark on both streams"):
        windowed(one, "a", "x").join(windowed(two, "b", "y"), "k", "left")
    joined = windowed(one, "a", "x").join(windowed(two, "b", "y"), ["window", "k"])
    with pytest.raises(UnsupportedError, match=r"outputMode\('append'\)"):
        joined.writeStream.outputMode("update").format("noop").start()
    united = windowed(one, "a", "x").select("k").union(two.select("k"))
    with pytest.raises(UnsupportedError, match="complete is not supported where"):
        united.writeStream.outputMode("complete").format("noop").start()
