"""The epoch loop on a small Spark: in which order an epoch's work is done, how often, and what a failure leaves."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.storage import Storage
from anabranch.control.coordinator import Coordinator
from anabranch.core.errors import EpochError, FencedError
from anabranch.engine.loop import EpochLoop
from anabranch.engine.spark.sinks import NoopSink
from support.streams import EpochFeed
from support.waiting import wait_until

# Tasks cannot import a test: what it defines travels with them.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "k string, v long, ts timestamp"
KEYS = [f"k{number}" for number in range(12)]
START = datetime(2026, 1, 1)
OMITS_EMPTY = "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"
RULES = "spark.sql.optimizer.excludedRules"


def rows_of(epoch: int, keys: Sequence[str] = KEYS) -> list[tuple[str, int, datetime]]:
    """A row of each key, a minute after those of the epoch before."""
    return [(key, epoch, START + timedelta(minutes=epoch)) for key in keys]


class Tally(StatefulProcessor):
    """Gives each row out with the number of its key's rows so far, and notes in a file that it was called."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("tally", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        (count,) = self.state.get() or (0,)
        for row in rows:
            count += 1
            yield Row(k=key[0], v=count, ts=row.ts)
        self.state.update((count,))
        with self.journal.open("a") as journal:
            journal.write(f"{key[0]}\n")

    def close(self) -> None:
        pass


class Job:
    """A query of one or more tallies, whose epochs are lists of rows."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.feed = EpochFeed(spark, folder / "input", SCHEMA)
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.stream: Any = anabranch.stream(self.feed.stream()).withWatermark("ts", "0 seconds")
        self.query: Any = None

    def tally(self, rows: Any, name: str = "first") -> Any:
        """The rows after a stateful stage, whose calls `calls` tells."""
        processor = Tally(self.folder / name)
        grouped = rows.stage(name).groupBy("k")
        return grouped.transformWithState(processor, SCHEMA, "append", "none", eventTimeColumnName="ts")

    def calls(self, name: str = "first") -> Counter[int]:
        """How many keys a tally was called for so often, since this was asked last."""
        journal = self.folder / name
        lines = journal.read_text().splitlines() if journal.exists() else []
        journal.unlink(missing_ok=True)
        return Counter(Counter(lines).values())

    @contextmanager
    def running(self, writer: Any, **options: Any) -> Iterator[Any]:
        settings = {"workers": 2, "parallelism": 3, "controlPort": -1, **options}
        named = {f"anabranch.{name}": value for name, value in settings.items()}
        writer = writer.outputMode("append").options(checkpointLocation=str(self.checkpoint), **named)
        self.query = writer.start()
        try:
            yield self.query
        finally:
            self.query.stop()

    def run(self, *epochs: Sequence[Any]) -> None:
        self.feed.add(*epochs)
        self.query.processAllAvailable()

    def tallied(self, stage: str = "first") -> dict[str, int]:
        return {row["k"]: row["n"] for row in self.query.state(stage).collect()}


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)


ONCE = Counter({1: len(KEYS)})


def test_state_logic_runs_once_before_a_sink_that_reads_again_and_the_commit_comes_last(job: Job) -> None:
    """Also where what follows a stage merges its partitions."""
    seen: list[tuple[Any, ...]] = []

    def look(rows: DataFrame, epoch: int) -> None:
        before = job.calls("first"), job.calls("second"), job.query.coordinator.committed_epoch
        first, again = [Counter(row.v for row in rows.collect()) for _ in range(2)]
        seen.append((*before, first == again, first))
        assert epoch == len(seen) - 1

    result = job.tally(job.tally(job.stream).coalesce(1), "second").where("v > 0")
    with job.running(result.writeStream.foreachBatch(look)) as query:
        job.run(rows_of(0), rows_of(1))
        assert seen == [(ONCE, ONCE, epoch - 1, True, {epoch + 1: len(KEYS)}) for epoch in range(2)]
        assert (job.calls("first"), job.calls("second")) == (Counter(), Counter()), "run again by the sink"
        assert job.tallied("first") == job.tallied("second") == dict.fromkeys(KEYS, 2)
        check_reports(query.recentProgress)


def check_reports(progress: Sequence[Any]) -> None:
    reports = [each["anabranch"] for each in progress if each["numInputRows"]]
    assert [report["epoch"] for report in reports] == [0, 1]
    for report in reports:
        assert list(report["durationMs"]) == ["begin", "plan", "sink", "complete", "commit"]
        assert report["changedRows"] == 2 * len(KEYS)
    assert reports[1]["watermarkMs"] == round(START.timestamp() * 1000)


def test_a_sink_that_reads_once_runs_the_tasks_itself_and_those_that_it_leaves_out_are_run_afterwards(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads one partition of three. The filter lets Spark leave out the stages before it altogether."""
    before: list[Counter[int]] = []

    def write_some(_sink: NoopSink, rows: DataFrame, _epoch: int) -> None:
        before.append(job.calls("second"))
        rows.sparkSession.sparkContext.runJob(rows.rdd, lambda some: [len(list(some))], [0])

    monkeypatch.setattr(NoopSink, "write", write_some)
    second = job.tally(job.tally(job.stream).where("v > 0"), "second")
    third = job.tally(second.where("1 = 0"), "third")
    with job.running(third.writeStream.format("noop")) as query:
        for epoch in range(2):
            job.run(rows_of(epoch))
            assert before[epoch] == Counter(), "run before the sink asked for it"
            assert job.calls("second") == ONCE, "run more than once, or not at all"
            assert query.coordinator.committed_epoch == epoch
        assert job.tallied("first") == job.tallied("second") == dict.fromkeys(KEYS, 2)
        assert job.tallied("third") == {}


def test_tasks_that_a_sink_has_run_are_not_run_again_with_those_that_it_left_out(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_some(_sink: NoopSink, rows: DataFrame, _epoch: int) -> None:
        rows.sparkSession.sparkContext.runJob(rows.rdd, lambda some: [len(list(some))], [0, 2])

    monkeypatch.setattr(NoopSink, "write", write_some)
    with job.running(job.tally(job.stream).writeStream.format("noop")):
        job.run(rows_of(0), rows_of(1))
        assert job.calls() == Counter({2: len(KEYS)})
        assert job.tallied() == dict.fromkeys(KEYS, 2)


def test_late_rows_are_written_after_the_sinks_and_before_the_commit_and_no_state_logic_runs_for_them_again(
    job: Job,
) -> None:
    """The rows pass one stage before they are late for the next."""
    steps: list[tuple[Any, ...]] = []

    def note(step: str) -> Callable[[DataFrame, int], None]:
        def act(rows: DataFrame, epoch: int) -> None:
            steps.append((step, epoch, rows.count(), job.query.coordinator.committed_epoch))

        return act

    windows = job.tally(job.stream).groupBy(F.window("ts", "10 seconds"), "k").agg(F.count("*").alias("n"))
    writer = windows.writeStream.lateRows(note("late")).foreachBatch(note("sink"))
    with job.running(writer) as query:
        job.run(rows_of(5))
        # An epoch without rows has followed, in which the watermark is that of the first one's rows.
        job.run([*rows_of(6), *rows_of(1, KEYS[:4])])
        with_late = next(epoch for step, epoch, _, _ in steps if step == "late")
        assert [step for step in steps if step[1] == with_late] == [
            ("sink", with_late, 0, with_late - 1),
            ("late", with_late, 4, with_late - 1),
        ]
        assert job.calls() == Counter({2: len(KEYS)})
        late = {each["anabranch"]["epoch"]: each["anabranch"]["lateRows"] for each in query.recentProgress}
        assert {epoch: count for epoch, count in late.items() if count} == {with_late: 4}


def test_an_epoch_without_late_rows_takes_back_those_that_an_earlier_run_of_it_had(job: Job) -> None:
    place = job.folder / "late"
    windows = job.stream.groupBy(F.window("ts", "10 seconds"), "k").agg(F.count("*").alias("n"))
    with job.running(windows.writeStream.lateRows(place, format="json").format("noop")):
        (place / "epoch=0").mkdir(parents=True)
        (place / "epoch=0" / "part-0.json").write_text("{}")
        job.run(rows_of(0))
        assert not (place / "epoch=0").exists()


def test_a_sink_that_fails_ends_the_query_and_its_epoch_is_run_again_in_the_next(job: Job) -> None:
    broken = [True]
    taken: list[tuple[int, Counter[int]]] = []

    def take(rows: DataFrame, epoch: int) -> None:
        if epoch == 1 and broken:
            raise ValueError("full")
        taken.append((epoch, Counter(row.v for row in rows.collect())))

    writer = job.tally(job.stream).writeStream.foreachBatch(take)
    with job.running(writer) as query:
        with pytest.raises(EpochError, match=r"epoch 1.*ValueError: full.*not committed"):
            job.run(rows_of(0), rows_of(1))
        assert isinstance(query.exception(), EpochError)
        wait_until(lambda: not query.isActive, "Spark's query has ended")
        began_s = time.monotonic()
        query.stop()
        assert time.monotonic() - began_s < query.settings.request_timeout_s / 2, "no epoch runs that it could wait for"
    broken.clear()
    with job.running(writer) as query:
        job.run(rows_of(2))
        assert query.exception() is None
        assert job.tallied() == dict.fromkeys(KEYS, 3)
    assert taken == [(epoch, {epoch + 1: len(KEYS)}) for epoch in range(3)]


def test_each_session_is_configured_that_epochs_run_in(
    job: Job, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs that are repeated after a crash run in queries, and so in sessions, of their own."""
    theirs = "org.apache.spark.sql.catalyst.optimizer.CombineUnions"
    found: list[tuple[int, bool, str, Counter[int]]] = []

    def look(rows: DataFrame, epoch: int) -> None:
        conf = rows.sparkSession.conf
        assert conf.get("spark.sql.adaptive.enabled") == "false"
        found.append((epoch, theirs in conf.get(RULES), conf.get(RULES), Counter(row.v for row in rows.collect())))

    writer = job.tally(job.stream).writeStream.foreachBatch(look)
    with monkeypatch.context() as patch:
        # As if the driver had died: nothing is made durable at the end.
        patch.setattr(Coordinator, "flush", lambda _: None)
        with job.running(writer, checkpointInterval=3600):
            job.run(rows_of(0), rows_of(1))
    spark.conf.set(RULES, theirs)
    try:
        with job.running(writer, checkpointInterval=3600):
            job.run(rows_of(2))
    finally:
        spark.conf.unset(RULES)
    numbers = [0, 1, 0, 1, 2]
    both = f"{theirs},{OMITS_EMPTY}"
    expected = [
        (epoch, again, both if again else OMITS_EMPTY) for epoch, again in zip(numbers, [0, 0, 1, 1, 1], strict=True)
    ]
    assert [each[:3] for each in found] == expected
    assert [each[3] for each in found] == [{epoch + 1: len(KEYS)} for epoch in numbers]


def test_a_query_is_stopped_between_two_epochs_though_more_rows_wait(job: Job) -> None:
    """The next epoch waits where Spark can interrupt it, and none is interrupted in the middle."""
    arrived, go_on = threading.Event(), threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def hold(rows: DataFrame, epoch: int) -> None:
        begun.append(epoch)
        arrived.set()
        assert go_on.wait(60)
        rows.collect()
        ended.append(epoch)

    writer = job.tally(job.stream).writeStream.foreachBatch(hold)
    with job.running(writer) as query:
        job.feed.add(*map(rows_of, range(6)))
        assert arrived.wait(60)
        stopping = threading.Thread(target=query.stop)
        stopping.start()
        # For as long as the epoch runs, the stop waits.
        stopping.join(0.3)
        assert stopping.is_alive()
        go_on.set()
        stopping.join(60)
        assert not stopping.is_alive()
        assert query.exception() is None
    before = list(ended)
    assert begun == before == list(range(len(before)))
    assert len(before) < 6
    with job.running(writer):
        job.run()
        assert job.tallied() == dict.fromkeys(KEYS, 6)
    # Spark's own commit of the last epoch may have been interrupted: then that epoch is run again.
    assert ended[len(before) :] in (list(range(len(before), 6)), list(range(len(before) - 1, 6)))


class Stopping:
    """What Spark says about a query that is stopped after it was asked a few times."""

    def __init__(self, asked_max: int) -> None:
        self.left = asked_max

    def is_stopped(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(
    ("asked_max", "interrupt"),
    [
        pytest.param(1000, True, id="Spark interrupts the wait"),
        # It interrupts once, and a source may have caught that.
        pytest.param(2, False, id="the interrupt was missed"),
    ],
)
def test_an_epoch_that_waits_for_its_turn_gives_up_when_spark_stops_the_query(
    spark: SparkSession, asked_max: int, interrupt: bool
) -> None:
    """Spark tells a stop from a failure by the name of Java's error. No coordinator is asked for anything."""
    facts: Any = Stopping(asked_max)
    nothing: Any = None
    loop = EpochLoop([], nothing, NoopSink(), complete=False, shuffle_partitions=1, stream=facts)
    java: Any = spark.sparkContext._jvm
    if interrupt:
        java.java.lang.Thread.currentThread().interrupt()
    with loop.running, pytest.raises(Exception, match=r"java\.lang\.InterruptedException"):
        loop(spark.range(1), 0)
    assert (facts.left < 0) is not interrupt
    assert loop.error is None


def test_an_epoch_runs_again_when_a_worker_is_lost_in_it_and_the_next_one_when_one_is_lost_after_it(job: Job) -> None:
    taken: list[tuple[int, Counter[int]]] = []

    def take(rows: DataFrame, epoch: int) -> None:
        taken.append((epoch, Counter(row.v for row in rows.collect())))
        if [each for each, _ in taken].count(1) == 1 and epoch == 1:
            kill_one(job)

    with job.running(job.tally(job.stream).writeStream.foreachBatch(take)) as query:
        job.run(rows_of(0))
        assert job.calls() == ONCE
        job.run(rows_of(1))
        assert job.calls() == Counter({2: len(KEYS)}), "both runs have all keys"
        kill_one(job)
        job.run(rows_of(2))
        assert query.exception() is None
        assert job.tallied() == dict.fromkeys(KEYS, 3)
        wait_until(lambda: len(query.workers()) == 2, "the lost ones are replaced")
    assert sorted({epoch for epoch, _ in taken}) == [0, 1, 2]
    assert [epoch for epoch, _ in taken].count(1) == 2
    assert all(values == {epoch + 1: len(KEYS)} for epoch, values in taken)


def kill_one(job: Job) -> None:
    os.kill(job.query.coordinator.members[0].pid, signal.SIGKILL)


def test_whatever_fails_after_a_newer_driver_took_over_is_put_down_to_that(job: Job) -> None:
    """It clears away what this one was writing; to run the epoch again would be of no use."""
    calls: list[int] = []

    def take(rows: DataFrame, epoch: int) -> None:
        rows.collect()
        calls.append(epoch)
        if epoch == 1:
            claim_generation(Storage(str(job.checkpoint)), {})
            kill_one(job)
            raise FileNotFoundError("part-0 is gone")

    # With so long a heartbeat, nothing but the epoch notices it.
    with job.running(job.tally(job.stream).writeStream.foreachBatch(take), heartbeat=600) as query:
        with pytest.raises(FencedError, match="newer driver"):
            job.run(rows_of(0), rows_of(1))
        assert isinstance(query.exception(), FencedError)
    assert calls == [0, 1]
