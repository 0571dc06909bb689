"""Jobs that start from savepoints: they read what comes after it, and their sinks keep what they are given."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import anabranch
from support.counting import SCHEMA, counted, multiset, writer_of
from support.oracle import Oracle, drain
from support.streams import Collector, EpochFeed

WAIT_S = 60.0
#: More than Spark lets the log of a file sink, or of a file source, grow before it compacts it: ten.
EPOCHS = [[("a", number), (f"k{number}", 1)] for number in range(30)]


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> EpochFeed:
    return EpochFeed(spark, tmp_path / "input", SCHEMA)


def results(first: int, last: int) -> Counter[Any]:
    """What comes out of these epochs."""
    totals = [sum(range(number + 1)) for number in range(len(EPOCHS))]
    changed = [(("a", number + 1, totals[number]), (f"k{number}", 1, 1)) for number in range(first, last)]
    return Counter(row for rows in changed for row in rows)


class Held(Collector):
    """Holds up an epoch until it may go on."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        super().__call__(rows, epoch)
        if epoch == self.epoch:
            self.is_held.set()
            assert self.may_go_on.wait(WAIT_S)


# Of ten entries of its log, Spark's file source makes one.
@pytest.mark.parametrize("held", [3, 9])
def test_a_fork_reads_the_files_that_come_after_the_epoch_of_its_savepoint(
    oracle: Oracle, feed: EpochFeed, tmp_path: Path, held: int
) -> None:
    """When a savepoint is made, Spark may have noted already which files the next epoch has."""
    original, fork = Held(held), Collector()
    feed.add(*EPOCHS[: held + 1])
    stream = counted(anabranch.stream(feed.stream()))
    query = writer_of(stream, tmp_path / "one", **oracle.options).foreachBatch(original).start()
    try:
        assert original.is_held.wait(WAIT_S)
        assert query.savepoint(str(tmp_path / "savepoint")) == held - 1
        feed.add(EPOCHS[held + 1])
        options = {"anabranch.savepoint": str(tmp_path / "savepoint")}
        stream = counted(anabranch.stream(feed.stream()))
        drain(writer_of(stream, tmp_path / "two", **options).foreachBatch(fork))
        original.may_go_on.set()
        query.processAllAvailable()
    finally:
        original.may_go_on.set()
        query.stop()
    expected = {number: results(number, number + 1) for number in range(held + 2)}
    assert {epoch: multiset(rows) for epoch, rows in original.epochs.items()} == expected
    after = {number: rows for number, rows in expected.items() if number >= held}
    assert {epoch: multiset(rows) for epoch, rows in fork.epochs.items()} == after


def test_the_files_of_a_fork_hold_every_epoch_once(oracle: Oracle, feed: EpochFeed, tmp_path: Path) -> None:
    """Spark's file sink counts its batches from 0, and a fork's first epoch is another."""
    spark = feed.spark

    def run(checkpoint: str, output: str, **options: Any) -> Any:
        writer = writer_of(counted(anabranch.stream(feed.stream())), tmp_path / checkpoint, **oracle.options, **options)
        return drain(writer.format("parquet").option("path", str(tmp_path / output)))

    def found(output: str) -> Counter[Any]:
        return multiset(spark.read.parquet(str(tmp_path / output)).select("k", "n", "total").collect())

    feed.add(*EPOCHS[:4])
    writer = writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "one", **oracle.options)
    query = writer.format("parquet").option("path", str(tmp_path / "out-one")).start()
    try:
        query.processAllAvailable()
        assert query.savepoint(str(tmp_path / "savepoint")) == 3
    finally:
        query.stop()
    savepoint = {"anabranch.savepoint": str(tmp_path / "savepoint")}
    # Into a new directory, beyond the first compaction of its log, and on after a restart.
    feed.add(*EPOCHS[4:16])
    run("two", "out-two", **savepoint)
    assert found("out-two") == results(4, 16)
    feed.add(*EPOCHS[16:18])
    run("two", "out-two")
    assert found("out-two") == results(4, 18)
    # Into the directory of the original, which has been at the epoch of the savepoint when it ended, and into one whose
    # log has gone on since then.
    run("three", "out-one", **savepoint)
    assert found("out-one") == results(0, 18)
    run("four", "out-two", **savepoint)
    assert found("out-two") == results(4, 18) + results(4, 18)
    # A streaming read goes by the log as well.
    rows = Collector()
    again = spark.readStream.schema("k string, n long, total long").parquet(str(tmp_path / "out-two"))
    drain(again.writeStream.foreachBatch(rows).option("checkpointLocation", str(tmp_path / "reader")))
    assert multiset([row for each in rows.epochs.values() for row in each]) == found("out-two")
