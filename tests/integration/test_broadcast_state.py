"""Broadcast tables: every task of an epoch sees the same version, also when it is repeated, restarted or rescaled."""

import os
import signal
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch
from anabranch.control.coordinator import Coordinator
from anabranch.core.errors import EpochError, UnsupportedError
from anabranch.engine.tables import TableKeeper
from support.streams import EpochFeed

# Processors travel with the tasks, which cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

RULES = "k string, most long, _delete boolean"
ROWS = "id long, k string, ts timestamp"
START = datetime(2026, 1, 1)


def row(number: int, k: str, seconds: float = 0) -> tuple[int, str, datetime]:
    return number, k, START + timedelta(seconds=seconds)


def rule(k: str, most: int | None, *, delete: bool = False) -> tuple[str, int | None, bool]:
    return k, most, delete


class Judge(StatefulProcessor):
    """Says what the rule of each row's key is, and how many rules there are."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", "n long")
        self._rules = handle.getBroadcast("rules")  # type: ignore[attr-defined]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        found = self._rules.get(key[0])
        for each in rows:
            yield Row(id=each.id, most=None if found is None else found.most, rules=len(self._rules))

    def close(self) -> None:
        pass


class Job:
    """A query over two feeds, that can be started again."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.rules = EpochFeed(spark, folder / "rules", RULES)
        self.rows = EpochFeed(spark, folder / "rows", ROWS)
        self.output: list[Row] = []
        self.late: list[Row] = []
        self.query: Any = None

    @property
    def table(self) -> Any:
        return anabranch.broadcast(self.rules.stream(), key="k")

    def start(self, build: Any, *, late: bool = False, **options: Any) -> None:
        table = self.table
        stream = anabranch.stream(self.rows.stream()).withWatermark("ts", "10 seconds").stage("tables")
        writer = build(stream.withBroadcast(rules=table), table).writeStream.outputMode("update")
        writer = writer.lateRows(self._take_late) if late else writer
        writer = writer.foreachBatch(self._take).option("anabranch.controlPort", -1).options(**options)
        self.query = writer.option("checkpointLocation", str(self.checkpoint)).start()

    def _take(self, rows: DataFrame, epoch: int) -> None:
        del epoch
        self.output += rows.collect()

    def _take_late(self, rows: DataFrame, epoch: int) -> None:
        del epoch
        self.late += rows.collect()

    def after(self) -> list[tuple[Any, ...]]:
        """What comes out once all input is worked off."""
        self.query.processAllAvailable()
        output, self.output = self.output, []
        return sorted(map(tuple, output))

    def stop(self) -> None:
        if self.query is not None:
            self.query.stop()


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Iterator[Job]:
    job = Job(spark, tmp_path)
    yield job
    job.stop()


def judged(stream: Any, table: Any) -> Any:
    del table
    return stream.groupBy("k").transformWithState(Judge(), "id long, most long, rules long", "update", "none")


def test_a_processor_sees_one_version_in_each_epoch_whatever_happens(
    spark: SparkSession, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    folder = Path(str(spark.sparkContext._temp_dir))  # type: ignore[attr-defined]
    files = set(folder.iterdir())
    begin = TableKeeper.begin

    def noting(self: TableKeeper, *arguments: Any, may_change: bool) -> None:
        looked.append(may_change)
        begin(self, *arguments, may_change=may_change)

    monkeypatch.setattr(TableKeeper, "begin", noting)
    # What comes in the same epoch counts for it.
    job.rules.add([rule("a", 10)])
    job.rows.add([row(1, "a"), row(2, "b")])
    job.start(judged)
    assert job.after() == [(1, 10, 1), (2, None, 1)]
    job.rows.add([row(3, "a")])
    assert job.after() == [(3, 10, 1)]
    assert looked == [True, False], "input without rows for the table was searched for them"
    # Of several rows of one key, the last one counts.
    job.rules.add([rule("b", 5), rule("a", 11), rule("a", 12), rule("c", 1)])
    assert job.after() == []
    assert job.query.rescale(workers=3, parallelism=4).wait(60)
    job.rows.add([row(4, "a"), row(5, "b"), row(6, "d")])
    assert job.after() == [(4, 12, 3), (5, 5, 3), (6, None, 3)]
    assert sorted(map(tuple, job.query.state("tables", "rules").collect())) == [("a", 12), ("b", 5), ("c", 1)]
    assert len(set(folder.iterdir()) - files) == 1, "of three versions, the newest is left"

    # An epoch that removes a rule fails before its commit, and is repeated by the next run of the query.
    with monkeypatch.context() as patch:
        job.stop()
        patch.setattr(Coordinator, "commit", _fails)
        job.rules.add([rule("a", None, delete=True), rule("b", 6)])
        job.rows.add([row(7, "a"), row(8, "b")])
        job.start(judged, **{"anabranch.workers": 3})
        with pytest.raises(Exception, match="before the commit"):
            job.query.processAllAvailable()
        job.stop()
    first, job.output = sorted(map(tuple, job.output)), []
    job.start(judged, **{"anabranch.workers": 1})
    assert job.after() == first == [(7, None, 2), (8, 6, 2)]
    job.stop()
    assert set(folder.iterdir()) <= files, "nor is anything left of an epoch that failed"
    # From the checkpoint alone, in an epoch that brings nothing for the table.
    job.start(judged, **{"anabranch.store": "rocksdb"})
    job.rows.add([row(9, "a"), row(10, "c")])
    assert job.after() == [(9, None, 2), (10, 1, 2)]


def _fails(self: Coordinator, epoch: int) -> Any:
    del self, epoch
    raise RuntimeError("crashed before the commit")


class Ledger(StatefulProcessor):
    """Adds up what the rules in force say of each row, so that a wrong version of the table is never forgotten."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", "total long")
        self._rules = handle.getBroadcast("rules")  # type: ignore[attr-defined]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        found = self._rules.get(key[0])
        total = self._total.get()[0] if self._total.exists() else 0
        for number in sorted(each.id for each in rows):
            total += -1 if found is None else found.most
            yield Row(id=number, rules=len(self._rules), total=total)
        self._total.update((total,))

    def close(self) -> None:
        pass


def booked(stream: Any, table: Any) -> Any:
    del table
    grouped = stream.stage("ledger").groupBy("k")
    return grouped.transformWithState(Ledger(), "id long, rules long, total long", "update", "none")


#: What comes for the table before the rows of each step.
CHANGES = [
    [rule("a", 10), rule("b", 500)],
    [rule("a", 11), rule("e", 3000)],
    [rule("b", None, delete=True), rule("c", 70)],
    [],
    [rule("a", None, delete=True), rule("b", 20), rule("e", 4000)],
    [rule("d", 100_000), rule("c", 71)],
]


def kill_workers(job: Job, count: int) -> None:
    for worker in job.query.workers()[:count]:
        os.kill(worker["pid"], signal.SIGKILL)


def rescale_and_kill(job: Job) -> None:
    """While state is on its way, if it has not arrived yet."""
    job.query.rescale(workers=3, parallelism=2)
    kill_workers(job, 1)


def start_from_a_savepoint(job: Job) -> None:
    assert [repair for report in job.query.epoch_reports() for repair in report.repairs], "no kill was noticed"
    job.query.savepoint(str(job.folder / "savepoint"))
    job.stop()
    job.checkpoint = job.folder / "forked"
    options = {"savepoint": str(job.folder / "savepoint"), "workers": 1, "store": "rocksdb", "parallelism": 3}
    job.start(booked, **{f"anabranch.{name}": value for name, value in options.items()})


#: Before the steps of these numbers.
DISTURBANCES = {
    1: lambda job: job.query.rescale(workers=3, parallelism=4).wait(60),
    2: lambda job: kill_workers(job, 1),
    3: lambda job: kill_workers(job, 3),
    4: start_from_a_savepoint,
    5: rescale_and_kill,
}


def test_killed_workers_rescales_and_a_savepoint_change_nothing(spark: SparkSession, tmp_path: Path) -> None:
    quiet, disturbed = (Job(spark, tmp_path / name) for name in ("quiet", "disturbed"))
    try:
        for job in (quiet, disturbed):
            job.start(booked, **{"anabranch.workers": 2})
        for number, changes in enumerate(CHANGES):
            if number in DISTURBANCES:
                DISTURBANCES[number](disturbed)
            rows = [row(100 * number + i, k) for i, k in enumerate("abcdefghab")]
            for job in (quiet, disturbed):
                if changes:
                    job.rules.add(changes)
                job.rows.add(rows)
            expected = quiet.after()
            assert len(expected) == len(rows)
            assert disturbed.after() == expected, f"step {number}"
        for stage, variable in (("tables", "rules"), ("ledger", "total")):
            found, wanted = (sorted(job.query.state(stage, variable).collect()) for job in (disturbed, quiet))
            assert found == wanted, stage
            assert len(wanted) > 3
    finally:
        quiet.stop()
        disturbed.stop()


def test_joins_and_functions_read_tables_in_columns(job: Job) -> None:
    def capped(keys: pa.Table, rows: pa.Table, state: pa.Table, rules: pa.Table) -> tuple[pa.Table, pa.Table]:
        del state
        known = dict(zip(rules["k"].to_pylist(), rules["most"].to_pylist(), strict=True))
        most = pa.array([known.get(k) for k in rows["k"].to_pylist()], pa.int64())
        return rows.select(["id", "n"]).append_column("most", most), pa.table({"n": pa.array([1] * len(keys))})

    def build(stream: Any, table: Any) -> Any:
        joined = stream.filter("id > 0").join(table, "k").groupBy(F.window("ts", "10 seconds"), "k")
        counted = joined.agg(F.count("*").alias("n"), F.max("most").alias("most"), F.max("id").alias("id"))
        return counted.groupBy("k").processInArrow(capped, "id long, n long, most long", "n long")

    job.rows.add([row(1, "a", 1), row(2, "b", 2)])
    job.start(build, late=True)
    assert job.after() == [], "there are no rules yet to join with"
    job.rules.add([rule("b", 5), rule("a", 3)])
    job.rows.add([row(3, "b", 40), row(-1, "b", 40)])
    assert job.after() == [(3, 1, 5)]
    job.rows.add([row(4, "a", 41), row(5, "b", 3), row(6, "b", 42)])
    assert job.after() == [(4, 1, 3), (6, 2, 5)]
    # Late rows have what the join has added.
    assert [(late.id, late.most) for late in job.late] == [(5, 5)]


def test_a_table_that_grows_too_large_stops_the_query(job: Job) -> None:
    job.rules.add([rule("a", 1)])
    job.start(judged, **{"anabranch.broadcastBytes": 1000})
    assert job.after() == []
    job.rules.add([rule(f"k{number}", number) for number in range(200)])
    with pytest.raises(EpochError, match="table 'rules' would have 201 rows"):
        job.query.processAllAvailable()
    job.stop()
    job.start(judged)
    job.rows.add([row(1, "k7")])
    assert job.after() == [(1, 7, 201)]


def test_what_makes_no_sense_is_refused_when_the_query_is_built(spark: SparkSession, job: Job) -> None:
    rows, table = anabranch.stream(job.rows.stream()), job.table
    never = spark.createDataFrame([("a", 1)], "k string, most long")
    refused = [
        (lambda: anabranch.broadcast(never, key="k"), "never changes"),
        (lambda: anabranch.broadcast(job.rules.stream(), key="q"), "no column 'q'"),
        (lambda: anabranch.broadcast(job.rules.stream(), key=[]), "needs a key"),
        (lambda: rows.withBroadcast(), "by their names"),
        (lambda: rows.withBroadcast(rules=never), "anabranch.broadcast"),
        (lambda: rows.groupBy("k").count().withBroadcast(rules=table), "Move it up"),
        (lambda: rows.join(table, "k"), "withBroadcast"),
        (lambda: rows.withBroadcast(rules=table).join(table, "k", "outer"), "outer join"),
        (lambda: judged(rows, None), "no broadcast table 'rules'"),
        (lambda: judged(rows.withBroadcast(other=table), None), "but other"),
    ]
    for attempt, message in refused:
        with pytest.raises(UnsupportedError, match=message):
            attempt()
