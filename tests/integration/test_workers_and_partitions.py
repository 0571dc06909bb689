"""Partitions and workers in any numbers, several jobs at once, and a look into a query that is always busy."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch
from support.counting import Attempts, Tally, assert_ran_once, counted, multiset, tallied, writer_of
from support.oracle import Oracle, drain, external_worker
from support.streams import Collector, EpochFeed


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"parallelism": 1, "workers": 2}, id="one partition for two workers"),
        pytest.param({"parallelism": 3, "workers": 2}, id="three partitions"),
        pytest.param(
            {"parallelism": 8, "workers": 2, "routingCache": False}, id="eight partitions that ask for routes"
        ),
        pytest.param({"parallelism": 2, "workers": 5, "keyGroups": 7}, id="five workers for two partitions"),
        pytest.param({"parallelism": 8, "workers": 1, "keyGroups": 3}, id="fewer key groups than partitions"),
    ],
)
def test_partitions_and_workers_come_in_any_numbers(
    counting_feed: EpochFeed, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path, options: dict[str, Any]
) -> None:
    collector = Collector()
    named = {f"anabranch.{name}": value for name, value in options.items()}
    drain(
        writer_of(counted(anabranch.stream(counting_feed.stream())), tmp_path / "ck", **named).foreachBatch(collector)
    )
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected
    assert_ran_once(attempts, 9, partitions=min(options["parallelism"], options.get("keyGroups", 1024)))


def test_a_stage_has_a_parallelism_of_its_own(
    counting_feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    collector = Collector()
    stream = counted(anabranch.stream(counting_feed.stream()).stage("counting", parallelism=5))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected
    assert_ran_once(attempts, 9, partitions=5)


def test_several_queries_run_at_once_each_with_workers_of_its_own(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    collectors = [Collector() for _ in range(3)]
    queries = [
        writer_of(counted(anabranch.stream(counting_feed.stream())), tmp_path / str(number), **{"anabranch.workers": 1})
        .foreachBatch(collector)
        .start()
        for number, collector in enumerate(collectors)
    ]
    try:
        for query in queries:
            query.processAllAvailable()
        pids = [worker["pid"] for query in queries for worker in query.workers()]
        assert len(set(pids)) == 3
        for query in queries:
            assert multiset(query.state("stage1").collect()) == expected[8]
    finally:
        for query in queries:
            query.stop()
    for collector in collectors:
        assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


def test_one_worker_serves_two_jobs_at_once(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    collectors = [Collector(), Collector()]
    with external_worker() as worker:
        address = {"anabranch.workerAddresses": worker["address"]}
        queries = [
            writer_of(counted(anabranch.stream(counting_feed.stream())), tmp_path / str(number), **address)
            .foreachBatch(collector)
            .start()
            for number, collector in enumerate(collectors)
        ]
        try:
            for query in queries:
                query.processAllAvailable()
            assert [w["pid"] for query in queries for w in query.workers()] == [worker["pid"]] * 2
            queries[0].stop()
            assert multiset(queries[1].state("stage1").collect()) == expected[8]
        finally:
            for query in queries:
                query.stop()
    for collector in collectors:
        assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


def test_rocksdb_keeps_state_in_the_given_directory_while_the_query_runs(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    options = {"anabranch.store": "rocksdb", "anabranch.statePath": str(tmp_path / "state")}
    query = (
        writer_of(counted(anabranch.stream(counting_feed.stream())), tmp_path / "ck", **options).format("noop").start()
    )
    try:
        query.processAllAvailable()
        assert multiset(query.state("stage1").collect()) == expected[8]
        assert len(list((tmp_path / "state").iterdir())) == 2
        assert list((tmp_path / "state").rglob("*.log")) or list((tmp_path / "state").rglob("*.sst"))
    finally:
        query.stop()
    assert list((tmp_path / "state").iterdir()) == []


def test_two_stages_see_one_another_once(
    counting_feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    """The second stage counts how often the first has emitted each key."""
    collector = Collector()
    twice = tallied(Tally(str(tmp_path / "journal")))(anabranch.stream(counting_feed.stream())).select(
        "k", F.col("n").alias("v")
    )
    stream = twice.groupBy("k").agg(F.count("*").alias("n"), F.max("v").alias("most"))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    times = Counter(key for epoch in expected for key, _, _ in epoch.elements())
    assert multiset(collector.epochs[8]) == Counter((key, times[key], n) for key, n, _ in expected[8])
    assert_ran_once(attempts, 9, partitions=4)


def test_a_query_that_is_always_busy_can_be_looked_into_stopped_and_continued(
    spark: SparkSession, oracle: Oracle, tmp_path: Path
) -> None:
    totals: dict[int, int] = {}
    seen = [0]

    def keep(rows: DataFrame, epoch: int) -> None:
        totals[epoch] = rows.agg(F.sum("n")).first()[0]

    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).option("numPartitions", 2).load()
    for last in (2, 5, 8):
        stream = anabranch.stream(rows).groupBy((F.col("value") % 10).alias("k")).agg(F.count("*").alias("n"))
        query = writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(keep).start()
        try:
            while not (last in totals or query.exception()):
                state = query.state("stage1").toPandas()
                seen.append(int(state["n"].sum()))
        finally:
            query.stop()
        assert query.exception() is None
        assert not query.isActive
    assert totals == {epoch: 100 * (epoch + 1) for epoch in range(max(totals) + 1)}
    assert seen == sorted(seen), "state never goes back"
    assert all(total % 100 == 0 for total in seen), "state is that of a whole epoch"
    assert max(seen) > 0


def test_state_is_empty_before_the_first_epoch(spark: SparkSession, oracle: Oracle, tmp_path: Path) -> None:
    empty = EpochFeed(spark, tmp_path / "input", "k string, v long")
    query = writer_of(counted(anabranch.stream(empty.stream())), tmp_path / "ck", **oracle.options)
    started = query.format("noop").trigger(processingTime="100 milliseconds").start()
    try:
        assert started.state("stage1").collect() == []
        assert [worker["rows"] for worker in started.workers()] == [0, 0]
        assert started.lastProgress is None or started.lastProgress["numInputRows"] == 0
        empty.add([("a", 1)])
        started.processAllAvailable()
        assert multiset(started.state("stage1").collect()) == Counter({("a", 1, 1): 1})
    finally:
        started.stop()
