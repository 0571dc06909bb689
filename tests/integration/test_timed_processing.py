"""Timers, time-outs, initial state and time to live on Anabranch: what Spark gives, where it can be compared."""

import functools
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import anabranch
from anabranch.core.errors import UnsupportedError
from support.live_query import wait_until
from support.oracle import Oracle
from support.streams import Collector, EpochFeed, quick_checkpoints

# Tasks run in processes that do not have the tests on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = "k string, ts timestamp, v int"
FAR_MS = 24 * 3600 * 1000


def at(seconds: int) -> datetime:
    return (START + timedelta(seconds=seconds)).replace(tzinfo=None)


def ms(moment: datetime) -> int:
    return int(moment.replace(tzinfo=UTC).timestamp() * 1000)


#: The watermark follows 10 s behind. Keys of which something is due after an epoch have no rows in the next one: Spark
#: lets it happen in an epoch without rows in between.
EPOCHS: list[list[tuple[str, datetime, int]]] = [
    [("a", at(1), 1), ("b", at(2), 2), ("a", at(3), 3)],
    [("a", at(20), 4), ("c", at(15), 5), ("b", at(12), 0)],
    [("d", at(40), 7)],
    [("late", at(5), 8), ("z", at(200), 1)],
    [("tick", at(200), 0)],
]
RESTART_AFTER = 2


class Sessions(StatefulProcessor):
    """Counts what comes of a key until 8 seconds of event time have passed without it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.seen = handle.getValueState("seen", "n long, total long")
        self.ends = handle.getListState("ends", "at long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        n, total = self.seen.get() or (0, 0)
        self.seen.update((n, total + initialState.start))
        self.handle.registerTimer(ms(at(12)) + timerValues.getCurrentWatermarkInMs())
        del key

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, total = self.seen.get() or (0, 0)
        last = 0
        for row in rows:
            n, total, last = n + 1, total + row.v, max(last, int(row.ts.timestamp() * 1000))
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(last + 8000)
        self.handle.registerTimer(last + 8000)
        if n > 2:
            self.handle.registerTimer(1)  # is due at once
        self.seen.update((n, total))
        yield self.told(key, "rows", n, total, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        n, total = self.seen.get() or (0, 0)
        self.ends.appendValue((expiry,))
        if expiry == 1:
            self.handle.registerTimer(2)  # is due at once, but fires in an epoch to come
        elif n and expiry > 2:
            self.handle.registerTimer(expiry + 300_000)
            self.seen.clear()
        yield self.told(key, f"end {expiry} {[end for (end,) in self.ends.get()]}", n, total, timerValues)

    def told(self, key: Any, what: str, n: int, total: int, times: Any) -> Row:
        timers = sorted(self.handle.listTimers())
        return Row(k=key[0], what=f"{what} {timers} {times.getCurrentWatermarkInMs()}", n=n, total=total)


def sessions(rows: Any, initial: Any) -> Any:
    grouped = rows.withWatermark("ts", "10 seconds").groupBy("k")
    output = "k string, what string, n long, total long"
    return grouped.transformWithState(Sessions(), output, "update", "eventTime", initialState=initial.groupBy("k"))


def sum_up(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """The same with a GroupState: adds up, tells all that it sees, and lets go of a key that times out."""
    pieces = list(frames)
    told = (
        f"{key!r} {[type(item).__name__ for item in key]} {state} {state.hasTimedOut} {state.getCurrentWatermarkMs()}"
    )
    told += "".join(f" {list(piece.columns)} {[str(kind) for kind in piece.dtypes]}" for piece in pieces)
    rows = pd.concat(pieces)
    total = (state.getOption or (0, ""))[0] + (0 if state.hasTimedOut else int(rows["v"].sum()))
    if not state.hasTimedOut and total == (state.getOption or (0,))[0]:
        told += " which is left as it is, with its time-out"
    elif not state.hasTimedOut:
        state.update((total, key[0]))
        state.setTimeoutTimestamp(max(ms(rows["ts"].max().to_pydatetime()) + 8000, state.getCurrentWatermarkMs()))
    elif total % 2:
        state.remove()
    else:
        state.update((total, "again"))
        state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 20_000)
    yield pd.DataFrame({"told": [told], "total": [total]})
    yield pd.DataFrame()


def summed_up(rows: Any, initial: Any) -> Any:
    del initial
    grouped = rows.withWatermark("ts", "10 seconds").withColumn("g", F.lit(7).cast("int")).groupBy("k", "g")
    return grouped.applyInPandasWithState(
        sum_up, "told string, total long", "total long, name string", "update", GroupStateTimeout.EventTimeTimeout
    )


@pytest.fixture(scope="module")
def _rocksdb(spark: SparkSession) -> Iterator[None]:
    """Spark's transformWithState needs its RocksDB store, and a process for each partition."""
    name, partitions = "spark.sql.streaming.stateStore.providerClass", "spark.sql.shuffle.partitions"
    before = spark.conf.get(partitions)
    spark.conf.set(name, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    spark.conf.set(partitions, "1")
    yield
    spark.conf.unset(name)
    spark.conf.set(partitions, str(before))


def step_by_step(start: Callable[[Any], Any], feed: EpochFeed, epochs: list[Any]) -> Counter[str]:
    """All rows that come out. Epochs come one at a time, so that the watermark is settled between two of them."""
    collector = Collector()
    query = start(collector)
    try:
        for epoch in epochs:
            feed.add(epoch)
            query.processAllAvailable()
    finally:
        query.stop()
    return sum(collector.multisets(), Counter())


@pytest.mark.usefixtures("_rocksdb")
@pytest.mark.parametrize("query", [sessions, summed_up])
def test_event_time_goes_as_in_spark_also_across_a_restart(
    spark: SparkSession, oracle: Oracle, tmp_path: Path, query: Any
) -> None:
    initial = spark.createDataFrame([("a", 100), ("i", 1000), ("a", 200)], "k string, start long")

    def start(rows: Any, name: str, options: Any, collector: Collector) -> Any:
        writer = query(rows, initial).writeStream.outputMode("update").foreachBatch(collector)
        return writer.options(**options).option("checkpointLocation", str(tmp_path / name)).start()

    feed = EpochFeed(spark, tmp_path / "native-input", SCHEMA)
    with quick_checkpoints(spark):
        native = step_by_step(functools.partial(start, feed.stream(), "native", {}), feed, EPOCHS)
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)
    start_ours = functools.partial(start, anabranch.stream(feed.stream()), "ours", oracle.options)
    ours = step_by_step(start_ours, feed, EPOCHS[:RESTART_AFTER])
    ours += step_by_step(start_ours, feed, EPOCHS[RESTART_AFTER:])
    assert [list((ours - native).elements()), list((native - ours).elements())] == [[], []]
    assert sum("end 17672" in row or " True " in row for row in native) > 4
    assert not any("late'" in row for row in native)


class Fading(StatefulProcessor):
    """State that lives for a moment and state that lives for a day; a timer for each row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.states = {
            name: (
                handle.getValueState(f"v_{name}", "n long", ttl),
                handle.getListState(f"l_{name}", "n long", ttl),
                handle.getMapState(f"m_{name}", "n long", "n long", ttl),
            )
            for name, ttl in (("near", 1), ("far", FAR_MS), ("ever", None))
        }

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        seen = []
        for value, elements, items in self.states.values():
            seen.append([value.exists(), len(list(elements.get())), len(list(items.keys()))])
        n = sum(len(frame) for frame in rows)
        for value, elements, items in self.states.values():
            value.update((n,))
            elements.appendValue((n,))
            items.updateValue((n,), (n,))
        now = timerValues.getCurrentProcessingTimeInMs()
        self.handle.registerTimer(now + 1)
        self.handle.registerTimer(now + FAR_MS)
        yield pd.DataFrame({"k": [key[0]], "seen": [str(seen)]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        assert expiredTimerInfo.getExpiryTimeInMs() <= timerValues.getCurrentProcessingTimeInMs()
        left = len(list(self.handle.listTimers()))
        yield pd.DataFrame({"k": [key[0]], "seen": [f"timer {left} {self.states['near'][0].get()}"]})


def test_state_lives_and_timers_fire_by_the_time_of_day(spark: SparkSession, oracle: Oracle, tmp_path: Path) -> None:
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)
    stream = anabranch.stream(feed.stream()).groupBy("k")
    fading = stream.transformWithStateInPandas(Fading(), "k string, seen string", "append", "processingTime")
    collector = Collector()
    ticking = itertools.count(time.time_ns() // 1_000_000, 10)
    writer = fading.writeStream.outputMode("append").foreachBatch(collector).options(**oracle.options)
    writer = writer.clock(lambda: next(ticking))
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        for rows in ([("a", at(0), 1), ("b", at(0), 1)], [("a", at(0), 1)], [("c", at(0), 1)]):
            feed.add(rows)
            query.processAllAvailable()
        # What the last epoch has set may have expired meanwhile; what is older has.
        for variable in ("v_near", "l_near", "m_near"):
            assert {row["k"] for row in query.state(1, variable).collect()} <= {"c"}
        for variable in ("v_far", "v_ever", "l_far"):
            assert {row["k"] for row in query.state(1, variable).collect()} == {"a", "b", "c"}
        horizon = time.time() * 1000 + FAR_MS / 2
        timers = [row["k"] for row in query.state(1, "_timers").collect() if row["expiry_ms"] > horizon]
        assert sorted(timers) == ["a", "a", "b", "c"]
    finally:
        query.stop()
    told = [row for epoch in sorted(collector.epochs) for row in collector.epochs[epoch]]
    seen = [(row["k"], row["seen"]) for row in told if row["seen"].startswith("[")]
    nothing = "[[False, 0, 0], [False, 0, 0], [False, 0, 0]]"
    assert sorted(seen[:2]) == [("a", nothing), ("b", nothing)]
    assert seen[2:] == [("a", "[[False, 0, 0], [True, 1, 1], [True, 1, 1]]"), ("c", nothing)]
    fired = Counter(row["k"] for row in told if row["seen"].startswith("timer"))
    assert (fired["a"], fired["b"]) == (2, 1)


def wait_a_moment(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Lets a key time out, which is told with what is known of it."""
    rows = sum(len(frame) for frame in frames)
    seen = (state.getOption or (0,))[0]
    if state.hasTimedOut:
        state.remove()
    else:
        state.update((seen + rows,))
        state.setTimeoutDuration(100)
    yield pd.DataFrame({"k": [key[0]], "seen": [seen], "out": [state.hasTimedOut]})


def test_a_key_times_out_by_the_time_of_day_while_no_rows_come(
    spark: SparkSession, oracle: Oracle, tmp_path: Path
) -> None:
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)
    feed.add([("a", at(0), 1), ("a", at(0), 2), ("b", at(0), 3)])
    waiting = (
        anabranch.stream(feed.stream())
        .groupBy("k")
        .applyInPandasWithState(
            wait_a_moment,
            "k string, seen long, out boolean",
            "n long",
            "append",
            GroupStateTimeout.ProcessingTimeTimeout,
        )
    )
    collector = Collector()
    writer = waiting.writeStream.outputMode("append").foreachBatch(collector).options(**oracle.options)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        wait_until(lambda: len(list(itertools.chain(*collector.epochs.values()))) == 4, "both keys have timed out")
        query.processAllAvailable()
        assert [query.state(1, variable).collect() for variable in ("state", "_timers")] == [[], []]
    finally:
        query.stop()
    told = sorted(tuple(row) for row in itertools.chain(*collector.epochs.values()))
    assert told == [("a", 0, False), ("a", 2, True), ("b", 0, False), ("b", 1, True)]


def test_keys_that_have_not_moved_yet_time_out_in_the_same_epoch_as_others(spark: SparkSession, tmp_path: Path) -> None:
    """Whether state is still on its way must not show: if the epoch is repeated, it may have arrived."""
    keys = [f"k{number}" for number in range(40)]
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)
    feed.add([(key, at(0), 1) for key in keys])
    now_ms = [1_000_000]
    waiting = anabranch.stream(feed.stream()).groupBy("k")
    waiting = waiting.applyInPandasWithState(
        wait_a_moment, "k string, seen long, out boolean", "n long", "append", GroupStateTimeout.ProcessingTimeTimeout
    )
    collector = Collector()
    writer = waiting.writeStream.outputMode("append").foreachBatch(collector).clock(lambda: now_ms[0])
    writer = writer.option("anabranch.workers", 1).option("anabranch.drain", False).option("anabranch.parallelism", 2)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        query.processAllAvailable()
        query.rescale(workers=3)
        wait_until(lambda: len(query.workers()) == 3, "the others own key groups")
        now_ms[0] += 1000
        feed.add([("z", at(0), 1)])
        query.processAllAvailable()
    finally:
        query.stop()
    first = next(epoch for epoch in sorted(collector.epochs) if any(row["out"] for row in collector.epochs[epoch]))
    assert sorted(row["k"] for row in collector.epochs[first] if row["out"]) == sorted(keys)


def test_what_makes_no_sense_is_refused_when_the_query_is_built(spark: SparkSession, tmp_path: Path) -> None:
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)
    rows = anabranch.stream(feed.stream())
    marked = rows.withWatermark("ts", "10 seconds").groupBy("k")
    batch = spark.createDataFrame([], "k string, n int")

    def process(
        grouped: Any = marked, mode: str = "eventTime", output: str = "at timestamp, n int", **more: Any
    ) -> Any:
        return grouped.transformWithState(Sessions(), output, "update", mode, **more)

    def apply(grouped: Any = marked, mode: str = "update", timeout: str = "EventTimeTimeout") -> Any:
        return grouped.applyInPandasWithState(sum_up, "told string, total long", "total long", mode, timeout)

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: process(initialState=batch), r"initialState is a DataFrame. Pass a grouped batch DataFrame"),
        (lambda: process(initialState=feed.stream().groupBy("k")), "initialState is a streaming DataFrame"),
        (lambda: process(initialState=batch.groupBy("n")), r"grouped by \(int\), and the stream by \(string\)"),
        (lambda: process(eventTimeColumnName="n"), "eventTimeColumnName 'n' is no timestamp of the output"),
        (lambda: process(rows.groupBy("k"), eventTimeColumnName="at"), "eventTimeColumnName 'at' needs a watermark"),
        (lambda: process(mode="processingTime", eventTimeColumnName="at"), "'at' has no meaning"),
        (lambda: process(rows.groupBy("k")), "timeMode 'eventTime' needs a watermark"),
        (lambda: apply(mode="complete"), "outputMode is 'complete'. Use one of append, update"),
        (lambda: apply(timeout="Never"), "timeoutConf is 'Never'. Use one of NoTimeout, ProcessingTimeTimeout"),
        (lambda: apply(rows.groupBy("k")), "an event-time time-out needs a watermark"),
        (lambda: apply(rows.groupBy()), "needs a"),
        (
            lambda: apply().writeStream.outputMode("append").option("checkpointLocation", str(tmp_path)).start(),
            "has outputMode 'update' and the query 'append'. Give both the same",
        ),
    ]
    for build, says in refused:
        with pytest.raises(UnsupportedError, match=says):
            build()
    # Stages after this one go by the column, as they would in Spark.
    (at_field, _) = process(eventTimeColumnName="at").schema.fields
    assert at_field.metadata == {"spark.watermarkDelayMs": 10_000}
