"""Rows that come too late go to a sink of their own: those that Spark drops, as they came, and each of them once."""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch
from anabranch.control.coordinator import Coordinator
from anabranch.core.errors import UnsupportedError
from support.oracle import WAIT_S, Oracle, drain
from support.streams import EpochFeed, quick_checkpoints

# Processors travel with the tasks, which cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

START = datetime(2026, 1, 1)
SCHEMA = "id long, ts timestamp, k string, note string"
Query = Callable[[Any], Any]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def some_epochs() -> list[list[tuple[int, datetime | None, str, str]]]:
    """Times that rise by 30 s from epoch to epoch, and go back as far as 90 s. No two rows share a window and a key."""
    chance = random.Random(11)
    epochs = []
    for number in range(5):
        first = 100 * number
        seconds = [max(0, chance.randrange(30 * number - 90, 30 * number + 15)) for _ in range(16)]
        epochs.append([(first + i, at(s), f"k{first + i}", f"{s} s") for i, s in enumerate(seconds)])
        epochs[-1].append((first + 99, None, f"k{first + 99}", "no time"))
    return epochs


EPOCHS = some_epochs()
ALL = {row[0]: Row(id=row[0], ts=row[1], k=row[2], note=row[3]) for epoch in EPOCHS for row in epoch}


@pytest.fixture(scope="module")
def feed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path_factory.mktemp("late") / "input", SCHEMA)
    feed.add(*EPOCHS)
    return feed


class Late:
    """A lateRows function that keeps each epoch's rows."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[Row]] = {}

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        self.epochs[epoch] = rows.collect()

    @property
    def rows(self) -> list[Row]:
        return [row for epoch in sorted(self.epochs) for row in self.epochs[epoch]]


class Echo(StatefulProcessor):
    """Gives out each row as it came."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del key, timerValues
        yield from rows

    def close(self) -> None:
        pass


def watermarked(rows: Any) -> Any:
    return rows.withWatermark("ts", "10 seconds")


def tumbling(rows: Any) -> Any:
    return watermarked(rows).groupBy(F.window("ts", "10 seconds"), "k").agg(F.collect_list("id").alias("ids"))


def sessions(rows: Any) -> Any:
    return watermarked(rows).groupBy("k", F.session_window("ts", "5 seconds")).agg(F.collect_list("id").alias("ids"))


def distinct(rows: Any) -> Any:
    return watermarked(rows).dropDuplicates(["k", "ts"]).select(F.array("id").alias("ids"))


def processed(rows: Any) -> Any:
    echoed = watermarked(rows).groupBy("k").transformWithState(Echo(), SCHEMA, "append", "eventTime")
    return echoed.select(F.array("id").alias("ids"))


@pytest.mark.parametrize(("query", "mode"), [(tumbling, "update"), (sessions, "append"), (distinct, "append")])
def test_late_rows_are_those_that_spark_drops(feed: EpochFeed, oracle: Oracle, query: Query, mode: str) -> None:
    late, accepted = ours(feed, oracle, query, mode)
    assert dropped_by_spark(feed, oracle, query, mode) == len(late.rows) > 5
    check_each_row_is_somewhere(late, accepted, without_time="ids" if query is distinct else "")


def test_rows_late_for_a_processor_are_not_lost_either(feed: EpochFeed, oracle: Oracle) -> None:
    late, accepted = ours(feed, oracle, processed, "append")
    assert len(late.rows) > 5
    check_each_row_is_somewhere(late, accepted, without_time="ids")


@cache
def ours(feed: EpochFeed, oracle: Oracle, query: Query, mode: str) -> tuple[Late, list[int]]:
    late = Late()
    found: set[int] = set()
    writer = query(anabranch.stream(feed.stream())).writeStream.outputMode(mode).options(**oracle.options)

    def keep(rows: DataFrame, epoch: int) -> None:
        del epoch
        found.update(number for row in rows.collect() for number in row.ids)

    place = str(oracle.new_folder("late"))
    ended = drain(writer.lateRows(late).foreachBatch(keep).option("checkpointLocation", place))
    assert reported(ended) == len(late.rows)
    return late, sorted(found)


def reported(query: Any) -> int:
    """How many rows were dropped, by the progress reports."""
    return sum(each.numRowsDroppedByWatermark for one in query.recentProgress for each in one.stateOperators)


def dropped_by_spark(feed: EpochFeed, oracle: Oracle, query: Query, mode: str) -> int:
    writer = query(feed.stream()).writeStream.outputMode(mode).format("noop").trigger(availableNow=True)
    with quick_checkpoints(feed.spark):
        started = writer.option("checkpointLocation", str(oracle.new_folder("native"))).start()
    assert started.awaitTermination(WAIT_S)
    return reported(started)


def check_each_row_is_somewhere(late: Late, accepted: list[int], *, without_time: str) -> None:
    assert all(row["_watermark"] >= row.ts for row in late.rows)
    assert {row["_stage"] for row in late.rows} == {"stage2"}
    # As they came, with columns that the stage itself has no use for.
    assert [Row(id=r.id, ts=r.ts, k=r.k, note=r.note) for r in late.rows] == [ALL[row.id] for row in late.rows]
    # In append mode some windows are still open; what has no time has no window, and is not late.
    open_since = max(row.ts for row in ALL.values() if row.ts) - timedelta(seconds=30)
    somewhere = Counter([*accepted, *(row.id for row in late.rows)])
    assert max(somewhere.values()) == 1
    missing = [ALL[number] for number in ALL.keys() - somewhere.keys()]
    assert all(row.ts > open_since if row.ts else not without_time for row in missing)


def test_a_row_late_for_some_of_its_windows_comes_once(feed: EpochFeed, oracle: Oracle) -> None:
    def sliding(rows: Any) -> Any:
        return watermarked(rows).groupBy("k", F.window("ts", "20 seconds", "10 seconds")).agg(F.count("*").alias("n"))

    late = Late()
    writer = sliding(anabranch.stream(feed.stream())).writeStream.outputMode("update").lateRows(late).format("noop")
    drain(writer.options(**oracle.options).option("checkpointLocation", str(oracle.new_folder("sliding"))))
    assert max(Counter(row.id for row in late.rows).values()) == 1

    def windows(row: Row) -> int:
        """Of the two windows of the row, those that are over."""
        start = (row.ts - START).total_seconds() // 10 * 10
        return sum(at(end) <= row["_watermark"] for end in (start + 10, start + 20))

    missed = [windows(row) for row in late.rows]
    assert set(missed) == {1, 2}
    assert sum(missed) == dropped_by_spark(feed, oracle, sliding, "update")


def test_late_rows_of_both_sides_and_of_stages_one_after_the_other(
    spark: SparkSession, feed: EpochFeed, oracle: Oracle, tmp_path: Path
) -> None:
    def joined(rows: Any) -> Any:
        right = rows.filter("id % 2 = 1").selectExpr("id as other", "ts as at", "k as who", "note")
        near = F.expr("k = who and at >= ts and at <= ts + interval 10 seconds")
        return watermarked(rows.filter("id % 2 = 0")).join(right.withWatermark("at", "10 seconds"), near)

    place = str(tmp_path / "late")
    writer = joined(anabranch.stream(feed.stream())).writeStream.lateRows(place).format("noop")
    ended = drain(writer.options(**oracle.options).option("checkpointLocation", str(oracle.new_folder("join"))))
    found = spark.read.parquet(place).collect()
    assert len(found) == reported(ended) == dropped_by_spark(feed, oracle, joined, "append")
    assert Counter(row["_side"] for row in found) == Counter("left" if row.id is not None else "right" for row in found)
    for row in found:
        came = ALL[row.id if row["_side"] == "left" else row.other]
        given = (row.ts, row.k) if row["_side"] == "left" else (row.at, row.who)
        assert (*given, row.note) == (came.ts, came.k, came.note)

    def staged(rows: Any) -> Any:
        echo = watermarked(rows).groupBy("k").transformWithState(
            Echo(), SCHEMA, "append", "none", eventTimeColumnName="ts"
        )  # fmt: skip
        first = echo.withColumn("note", F.upper("note")).stage("windows").groupBy(F.window("ts", "10 seconds"), "k")
        return first.agg(F.count("*").alias("n")).stage("again").dropDuplicates(["k", "window"])

    late = Late()
    writer = staged(anabranch.stream(feed.stream())).writeStream.lateRows(late).format("noop")
    drain(writer.options(**oracle.options).option("checkpointLocation", str(oracle.new_folder("staged"))))
    assert {row["_stage"] for row in late.rows} == {"windows"}
    assert {row.note for row in late.rows} == {f"{ALL[row.id].note}".upper() for row in late.rows}
    tumbled, _ = ours(feed, oracle, tumbling, "update")
    assert {row.id for row in late.rows} == {row.id for row in tumbled.rows}


def test_each_late_row_is_in_the_files_once_whatever_happens(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    place = tmp_path / "late"
    accepted: dict[int, set[int]] = {}
    source = EpochFeed(spark, tmp_path / "input", SCHEMA)

    def keep(rows: DataFrame, epoch: int) -> None:
        accepted[epoch] = {number for row in rows.collect() for number in row.ids}

    def start() -> Any:
        writer = tumbling(anabranch.stream(source.stream())).writeStream.outputMode("update").foreachBatch(keep)
        writer = writer.option("checkpointLocation", str(tmp_path / "ck")).option("anabranch.controlPort", -1)
        return writer.lateRows(place, format="json").start()

    query = start()
    try:
        source.add(*EPOCHS[:3])
        query.processAllAvailable()
        query.rescale(workers=3, parallelism=3).wait(60)
        commit = Coordinator.commit

        def failing(self: Coordinator, epoch: int) -> Any:
            if any(place.glob(f"epoch={epoch}")):
                raise RuntimeError("crashed between the late rows and the commit")
            return commit(self, epoch)

        monkeypatch.setattr(Coordinator, "commit", failing)
        source.add(EPOCHS[3])
        with pytest.raises(Exception, match="crashed between"):
            query.processAllAvailable()
        monkeypatch.undo()
    finally:
        query.stop()
    left = {path.name for path in place.iterdir()}
    source.add(EPOCHS[4])
    query = start()
    try:
        query.processAllAvailable()
        assert sum(one["anabranch"]["lateRows"] for one in query.recentProgress) > 0
        query.explain()
        assert "late rows: json files in" in capsys.readouterr().out
    finally:
        query.stop()
    found = spark.read.json(str(place)).collect()
    somewhere = Counter([row.id for row in found] + list(set().union(*accepted.values())))
    assert somewhere == Counter(number for number, row in ALL.items() if row.ts is not None)
    assert len(found) > 5
    assert left & {f"epoch={row.epoch}" for row in found}, "nothing had been written before the crash"


def test_what_makes_no_sense_is_refused_at_the_start(feed: EpochFeed, tmp_path: Path) -> None:
    rows = anabranch.stream(feed.stream())

    def refusal(stream: Any, target: Any, mode: str = "update", **keywords: Any) -> str:
        writer = stream.writeStream.outputMode(mode).option("checkpointLocation", str(tmp_path / "ck"))
        with pytest.raises(UnsupportedError) as error:
            writer.lateRows(target, **keywords).start(str(tmp_path / "out"))
        return str(error.value)

    place = str(tmp_path / "late")
    assert "needs a watermark" in refusal(rows.groupBy("k").count(), place)
    assert "no stage of this query drops" in refusal(watermarked(rows).groupBy("k").count(), place)
    assert "directory of their own" in refusal(tumbling(rows), tmp_path / "out")
    assert "directory of their own" in refusal(tumbling(rows), tmp_path / "out" / "late")
    assert "directory of their own" in refusal(tumbling(rows), tmp_path / "ck")
    assert "a function" in refusal(tumbling(rows), 7)
    assert "not 'xml'" in refusal(tumbling(rows), place, format="xml")
    assert "the name '_stage'" in refusal(tumbling(rows.withColumn("_stage", F.lit(1))), place)
    assert "csv cannot hold 'l'" in refusal(tumbling(rows.withColumn("l", F.array("id"))), place, format="csv")
    (tmp_path / "late" / "epoch=0").mkdir(parents=True)
    assert "late rows of another query" in refusal(tumbling(rows), place)
    assert not (tmp_path / "ck").exists()
