"""Scenarios of Spark's own tests of stateful operators, played in an enabled session; each query must be ours."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import PySparkRuntimeError, StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.listener import StateOperatorProgress, StreamingQueryListener, StreamingQueryProgress
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import anabranch
from support.streams import Collector, EpochFeed

EPOCHS = [[("a", 1), ("b", 2), ("a", 3)], [("c", 4), ("a", 5)]]


class Noting(StreamingQueryListener):
    """Keeps what Spark says about queries."""

    def __init__(self) -> None:
        self.reports: list[StreamingQueryProgress] = []
        self.ended: list[Any] = []

    def onQueryStarted(self, event: Any) -> None:
        """Nothing to note."""

    def onQueryProgress(self, event: Any) -> None:
        self.reports.append(event.progress)

    def onQueryIdle(self, event: Any) -> None:
        """Nothing to note."""

    def onQueryTerminated(self, event: Any) -> None:
        self.ended.append(event)


def test_a_query_over_a_view_into_a_memory_table_needs_no_checkpoint_and_reports_its_state(
    enabled: SparkSession,
    feed: EpochFeed,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    listener = Noting()
    enabled.streams.addListener(listener)
    feed.stream().observe("seen", F.count("*").alias("rows")).createOrReplaceTempView("edits")
    rows = enabled.sql("SELECT k, v * 2 AS w FROM edits WHERE v > 1")
    writer = rows.groupBy("k").agg(F.sum("w").alias("total")).writeStream.outputMode("complete")
    try:
        query: Any = writer.format("memory").queryName("totals").option("ignored", None).start()
        assert isinstance(query, anabranch.StreamQuery)
        found = enabled.streams.get(query.id)
        assert found is not None
        assert [each.name for each in enabled.streams.active] == [query.name] == [found.name] == ["totals"]
        query.processAllAvailable()
        assert sorted(enabled.sql("SELECT * FROM totals").collect()) == [Row("a", 16), Row("b", 4), Row("c", 8)]
        last = query.lastProgress
        assert any(report == last for report in query.recentProgress)
        assert len(_names(temporary, "anabranch-checkpoint-*")) == 1
    finally:
        for each in enabled.streams.active:
            each.stop()
        query.stop()
        assert query.awaitTermination(10)
        enabled.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()  # type: ignore[union-attr]
        enabled.streams.removeListener(listener)
    assert query.exception() is None
    assert _names(temporary, "anabranch-checkpoint-*") == []
    assert (last.name, last["id"], str(last.runId)) == ("totals", query.id, query.runId)
    told = [report for report in listener.reports if report.numInputRows]
    assert [report.observedMetrics["seen"]["rows"] for report in told] == [3, 2]
    for report, rows_held in ((last, 3), (query.lastProgress, 3), (told[-1], None)):
        assert isinstance(report, StreamingQueryProgress)
        (operator,) = report.stateOperators
        assert isinstance(operator, StateOperatorProgress)
        assert operator.operatorName == "stateStoreSave"
        assert rows_held is None or operator.numRowsTotal == rows_held
        assert report.sources[0].description.startswith("FileStreamSource")
        assert len(report.sources) == 1
        assert "anabranch" in report.json
    assert [report.stateOperators[0].numRowsUpdated for report in told] == [2, 2]
    assert [str(event.runId) for event in listener.ended] == [query.runId]
    # What SQL does with state of its own stays with Spark, and that is said.
    counted = enabled.sql("SELECT k, count(*) FROM edits GROUP BY k").writeStream.outputMode("update").format("noop")
    checkpoint = str(tmp_path / "of Spark")
    with caplog.at_level(logging.WARNING):
        counted.trigger(once=True).option("checkpointLocation", checkpoint).start().awaitTermination(60)
        assert "stays with Spark's own state store: Aggregate is in a SQL text or a view" in caplog.text
        # So does a query that has its state there already.
        again = feed.stream().groupBy("k").count().writeStream.outputMode("update").format("noop").trigger(once=True)
        again.option("checkpointLocation", checkpoint).start().awaitTermination(60)
    assert "is the checkpoint of a plain Spark query" in caplog.text


def test_a_processor_may_delete_what_it_asked_for_and_gets_frames_of_the_size_that_is_set(
    enabled: SparkSession, feed: EpochFeed
) -> None:
    # Inside, so that tasks, which do not have this module, get it by value.
    class Counting(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self._frames = handle.getValueState("frames", "n int")
            self._gone = handle.getValueState("gone", "n int")
            self._gone_too = handle.getMapState("gone too", "m int", "n int")
            handle.deleteIfExists("gone")
            handle.deleteIfExists("gone too")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
            del timerValues
            frames = list(rows)
            refused = []
            for call in (self._gone.exists, self._gone.get, lambda: self._gone_too.containsKey((1,))):
                try:
                    call()
                except PySparkRuntimeError as error:
                    refused.append(str(error).split(":")[0])
            before = self._frames.get()
            self._frames.update(((before[0] if before else 0) + len(frames),))
            yield pd.DataFrame({"k": [key[0]], "frames": self._frames.get(), "refused": ["; ".join(refused)]})

    per_batch = "spark.sql.execution.arrow.maxBytesPerBatch"
    without_rows = "spark.sql.streaming.noDataMicroBatches.enabled"
    enabled.conf.set(per_batch, "2")
    enabled.conf.set(without_rows, "false")
    collector = Collector()
    try:
        counted = (
            feed.stream()
            .groupBy("k")
            .transformWithStateInPandas(Counting(), "k string, frames int, refused string", "Update", "processingTime")
        )
        query: Any = counted.writeStream.foreachBatch(collector).outputMode("update").start()
        assert isinstance(query, anabranch.StreamQuery)
        query.processAllAvailable()
        query.awaitTermination(2)  # time in which an idle stream would have epochs of its own
        query.stop()
    finally:
        enabled.conf.unset(per_batch)
        enabled.conf.unset(without_rows)
    assert sorted(collector.epochs) == [0, 1]
    refused = "Error checking value state exists; Error getting value state; Error checking if map state contains key"
    assert sorted(collector.epochs[0]) == [Row("a", 2, refused), Row("b", 1, refused)]
    assert sorted(collector.epochs[1]) == [Row("a", 3, refused), Row("c", 1, refused)]
    (operator,) = query.lastProgress.stateOperators
    assert operator.operatorName == "transformWithStateInPandasExec"
    assert operator.customMetrics["numValueStateVars"] == 1
    assert operator.customMetrics["numDeletedStateVars"] == 2
    assert operator.numRowsTotal == 3
    assert [source.description.split("[")[0] for source in query.lastProgress.sources] == ["FileStreamSource"]


def test_a_failure_is_spark_s_and_ours_and_rows_reach_a_foreach_writer(
    enabled: SparkSession, feed: EpochFeed, tmp_path: Path
) -> None:
    del enabled

    class Failing(StatefulProcessor):
        def init(self, handle: Any) -> None:
            del handle

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
            del timerValues
            yield Row(k=key[0], n=1 // (len(list(rows)) - 1))

    failing = feed.stream().groupBy("k").transformWithState(Failing(), "k string, n int", "Update", "none")
    query: Any = failing.writeStream.format("noop").outputMode("update").start()
    assert isinstance(query, anabranch.StreamQuery)
    with pytest.raises(StreamingQueryException, match="Failing failed in handleInputRows") as raised:
        query.processAllAvailable()
    for error in (raised.value, query.exception()):
        assert isinstance(error, anabranch.EpochError)
        assert isinstance(error, StreamingQueryException)
        assert "ZeroDivisionError" in str(error)
    assert raised.value.getCondition() == "STREAM_FAILED"

    folder = str(tmp_path)

    class Files:
        """Writes a file for each call."""

        def open(self, partition: int, epoch: int) -> bool:
            self._begin = f"{folder}/{epoch}-{partition}-"
            return True

        def process(self, row: Row) -> None:
            Path(f"{self._begin}{row.k}-{row['count']}.row").touch()

        def close(self, error: Exception | None) -> None:
            Path(f"{self._begin}{error}.end").touch()

    counts = feed.stream().groupBy("k").count().writeStream.outputMode("update").foreach(Files())
    query = counts.trigger(availableNow=True).start()
    assert isinstance(query, anabranch.StreamQuery)
    assert query.awaitTermination(120)
    written = sorted("-".join([part.split("-")[i] for i in (0, 2, 3)]) for part in _names(tmp_path, "*.row"))
    assert written == ["0-a-2.row", "0-b-1.row", "1-a-3.row", "1-c-1.row"]
    assert {name.split("-")[2] for name in _names(tmp_path, "*.end")} == {"None.end"}


def test_a_setting_without_spark_s_prefix_is_an_error_that_names_the_right_one(
    enabled: SparkSession, feed: EpochFeed
) -> None:
    counts: DataFrame = feed.stream().groupBy("k").count()
    enabled.conf.set("anabranch.workers", "3")
    try:
        with pytest.raises(anabranch.SettingsError, match=r"anabranch\.workers, which has no effect.*Set spark\.anab"):
            counts.writeStream.format("noop").outputMode("update").start()
    finally:
        enabled.conf.unset("anabranch.workers")
    writer = counts.writeStream.format("noop").outputMode("update").option("spark.anabranch.workers", "3")
    with pytest.raises(anabranch.SettingsError, match=r"Use option\('anabranch\.workers'"):
        writer.start()


def _names(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]
