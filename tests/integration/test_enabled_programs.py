"""Programs written for Spark, with one line more; and the vectorised processor on real epochs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import anabranch
from support.streams import Collector, EpochFeed

EPOCHS = [
    [("a", 1), ("b", 2), ("a", 3), (None, 1)],
    [("c", 4), ("a", -5)],
    [("b", 6), ("b", 7), (None, 8)],
]


def program(feed: EpochFeed, folder: Path) -> tuple[Any, Collector]:
    """As a user of Spark writes it, columns taken from DataFrames included."""
    edits = feed.stream()
    doubled = edits.select("k", (edits.v * 2).alias("w"))
    totals = doubled.filter(doubled.w > 2).groupBy(doubled.k).agg(F.sum("w").alias("total"), F.count("*").alias("n"))
    collector = Collector()
    writer = totals.select("k", "total", (F.col("n") + 1).alias("m")).writeStream.outputMode("update")
    query = writer.foreachBatch(collector).option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
    assert query.awaitTermination(240)
    return query, collector


def test_a_program_gives_the_same_with_one_line_more(
    spark: SparkSession, feed: EpochFeed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native_query, native = program(feed, tmp_path / "native")
    anabranch.enable(spark)
    try:
        with caplog.at_level(logging.WARNING):
            query, ours = program(feed, tmp_path / "ours")
    finally:
        anabranch.disable(spark)
    assert isinstance(native_query, StreamingQuery)
    assert isinstance(query, anabranch.StreamQuery)
    assert "stays with Spark" not in caplog.text
    assert ours.multisets() == native.multisets()
    assert isinstance(feed.stream().groupBy("k").count(), DataFrame)


def test_what_cannot_be_taken_over_is_named_and_stays_with_spark(
    enabled: SparkSession, feed: EpochFeed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    del enabled
    rows = feed.stream()
    assert isinstance(rows, DataFrame)
    # A query without state is Spark's alone, and needs no word.
    stateless = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "1")).trigger(once=True)
    with caplog.at_level(logging.WARNING):
        query = stateless.start()
        assert query.awaitTermination(60)
        assert isinstance(query, StreamingQuery)
        assert caplog.text == ""
        shapes = rows.groupBy("k").agg(F.histogram_numeric("v", F.lit(3))).writeStream.outputMode("update")
        query = shapes.option("checkpointLocation", str(tmp_path / "2")).format("noop").trigger(once=True).start()
        assert query.awaitTermination(60)
        assert isinstance(query, StreamingQuery)
        assert "stays with Spark's own state store: agg: " in caplog.text
        # Spark has something to say about a sink that keeps its rows and a query that does not know its place.
        with pytest.raises(AnalysisException, match="checkpointLocation"):
            rows.dropDuplicates(["k"]).writeStream.format("parquet").start(str(tmp_path / "out"))
        assert "stays with Spark's own state store: The query needs a checkpoint" in caplog.text


def test_a_vectorised_processor_gives_what_the_aggregate_gives(feed: EpochFeed, tmp_path: Path) -> None:
    # Inside, so that tasks, which do not have this module, get it by value.
    def running_totals(keys: pa.Table, rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        totals = np.bincount(rows.column("_key").to_numpy(), rows.column("v").to_numpy(), minlength=len(keys))
        counts = np.bincount(rows.column("_key").to_numpy(), minlength=len(keys))
        after = pa.table(
            {
                "total": totals.astype(np.int64) + state.column("total").fill_null(0).to_numpy(),
                "n": counts + state.column("n").fill_null(0).to_numpy(),
            }
        )
        return pa.table([keys.column("k"), *after.columns], names=["k", "total", "n"]), after

    grouped = anabranch.stream(feed.stream()).groupBy("k")
    found = []
    for number, counts in enumerate(
        [
            grouped.agg(F.sum("v").alias("total"), F.count("*").alias("n")),
            grouped.processInArrow(running_totals, "k string, total bigint, n bigint", "total bigint, n bigint"),
        ]
    ):
        collector = Collector()
        writer = counts.writeStream.outputMode("update").foreachBatch(collector).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / str(number))).start()
        assert query.awaitTermination(240)
        found.append(collector.multisets())
    assert found[0] == found[1]


def test_a_mistake_of_ours_is_not_taken_for_something_unsupported(
    enabled: SparkSession, feed: EpochFeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del enabled
    rows = feed.stream().groupBy("k").count().writeStream.outputMode("update").format("noop")

    def broken(*_: Any, **__: Any) -> Any:
        raise AttributeError("a mistake")

    monkeypatch.setattr("anabranch.api.writer.start_query", broken)
    with pytest.raises(AttributeError, match="a mistake"):
        rows.option("checkpointLocation", str(tmp_path / "checkpoint")).start()


def test_only_a_session_of_this_process_can_be_enabled() -> None:
    with pytest.raises(anabranch.UnsupportedError, match="needs a SparkSession"):
        anabranch.enable("spark")  # type: ignore[arg-type]
