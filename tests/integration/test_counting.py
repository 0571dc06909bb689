"""The thinnest slice end to end: a keyed count through state workers, exactly once, restarted."""

import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch
from support.streams import EpochFeed, run_anabranch, run_native

EPOCHS = [
    [("a", 1), ("b", 2), ("a", 3)],
    [("a", 10), ("c", 20)],
    [("b", None), ("d", 5), ("d", 6)],
]


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path / "input", "k string, v long")
    feed.add(*EPOCHS)
    return feed


def counted(rows):
    return rows.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"), F.avg("v").alias("mean"))


def test_every_epoch_gives_what_spark_gives(feed: EpochFeed, tmp_path: Path) -> None:
    native = run_native(counted, feed.stream(), tmp_path / "native")
    for store in ("memory", "rocksdb"):
        ours = run_anabranch(counted, feed.stream(), tmp_path / store, options={"anabranch.store": store})
        assert ours.multisets() == native.multisets(), store
        assert len(ours.multisets()) == 3


def test_complete_mode_gives_the_whole_result_each_time(feed: EpochFeed, tmp_path: Path) -> None:
    ours = run_anabranch(counted, feed.stream(), tmp_path / "ours", mode="complete")
    native = run_native(counted, feed.stream(), tmp_path / "native", mode="complete")
    assert ours.multisets() == native.multisets()


def test_a_restart_continues_where_it_stopped(feed: EpochFeed, tmp_path: Path) -> None:
    """Three of them: with as many workers as before, with fewer and with more."""
    found = []
    for workers in (2, 2, 1, 3):
        ours = run_anabranch(counted, feed.stream(), tmp_path / "ours", options={"anabranch.workers": workers})
        found += ours.multisets()
        feed.add([("a", 100), (f"new with {workers}", 1)])
    native = run_native(counted, feed.stream(), tmp_path / "native")
    assert found == native.multisets()[:-1]
    assert len(found) == len(EPOCHS) + 3


def test_state_and_workers_can_be_looked_at_while_it_runs(
    feed: EpochFeed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query = (
        counted(anabranch.stream(feed.stream()).stage("edits"))
        .writeStream.outputMode("update")
        .format("memory")
        .queryName("looked_at")
        .option("checkpointLocation", str(tmp_path / "ck"))
        .start()
    )
    try:
        query.processAllAvailable()
        rows = {row["k"]: (row["n"], row["total"], row["mean"]) for row in query.state("edits").collect()}
        assert rows == {"a": (3, 14, 14 / 3), "b": (2, 2, 2.0), "c": (1, 20, 20.0), "d": (2, 11, 5.5)}
        workers = query.workers()
        assert [worker["id"] for worker in workers] == ["worker-1", "worker-2"]
        assert sum(worker["keyGroups"] for worker in workers) == 1024
        assert sum(worker["rows"] for worker in workers) == 4
        assert all(worker["bytes"] > 0 and worker["pid"] > 0 for worker in workers)
        epochs = [progress["anabranch"]["epoch"] for progress in query.recentProgress if progress["numInputRows"]]
        assert epochs == [0, 1, 2]
        query.explain()
        assert "repartitionById" in capsys.readouterr().out
        result = feed.spark.sql("select k, max(n) n from looked_at group by k").collect()
        assert {row["k"]: row["n"] for row in result} == {"a": 3, "b": 2, "c": 1, "d": 2}
    finally:
        query.stop()
    assert not query.isActive


def test_relative_places_are_taken_from_the_working_directory(feed: EpochFeed, tmp_path: Path) -> None:
    place = Path(os.path.relpath(tmp_path))
    writer = counted(anabranch.stream(feed.stream())).writeStream.outputMode("update").format("parquet")
    query = writer.option("checkpointLocation", str(place / "ck")).trigger(availableNow=True).start(str(place / "out"))
    assert query.awaitTermination(120)
    assert feed.spark.read.parquet(str(tmp_path / "out")).count() == 6
