"""What a naive engine gets wrong: results read twice or never, merged partitions, failing tasks, crowded workers."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from oracle import Oracle, drain, external_worker, wait_until
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from streams import Collector, EpochFeed

import anabranch
from anabranch.control.coordinator import Coordinator
from anabranch.core.epoch_events import SealsReported

# Tasks cannot import a test: what it defines travels with them.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEYS = [f"k{number:02d}" for number in range(30)]
#: As many epochs as there are ways to misuse a result, and one that changes all keys, whose rows show the whole state.
EPOCHS = [[(key, number) for key in KEYS[number % 3 :: 3]] + [(f"new{number}", 1)] for number in range(8)]
EPOCHS.append([(key, 100) for key in [*KEYS, *(f"new{number}" for number in range(8))]])
#: Epochs of (stage, partition) to the attempts of it that were sealed.
Attempts = dict[int, dict[tuple[int, int], set[int]]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    with external_worker("--id", "one") as one, external_worker("--id", "two") as two:
        yield Oracle(tmp_path_factory.mktemp("traps"), [one["address"], two["address"]])


@pytest.fixture(scope="module")
def feed(spark: SparkSession, oracle: Oracle) -> EpochFeed:
    feed = EpochFeed(spark, oracle.folder / "input", "k string, v long")
    feed.add(*EPOCHS)
    return feed


@pytest.fixture(scope="module")
def expected(feed: EpochFeed, oracle: Oracle) -> list[Counter[Any]]:
    """What Spark itself gives in each epoch."""
    native = oracle.native(counted, feed.stream())
    return [multiset(native.epochs[epoch]) for epoch in range(len(EPOCHS))]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Which attempts of which partitions the workers reported: more than one is state logic that ran again."""
    seen: Attempts = defaultdict(lambda: defaultdict(set))
    ask = Coordinator._ask

    def record(self: Coordinator, instruction: Any) -> Any:
        event = ask(self, instruction)
        if isinstance(event, SealsReported):
            for attempt in event.attempts:
                seen[instruction.epoch][attempt.stage, attempt.partition].add(attempt.attempt)
        return event

    monkeypatch.setattr(Coordinator, "_ask", record)
    return seen


def counted(rows: Any) -> Any:
    return rows.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def multiset(rows: list[Any]) -> Counter[Any]:
    return Counter(tuple(row) for row in rows)


def writer_of(stream: Any, checkpoint: Path, **options: Any) -> Any:
    return stream.writeStream.outputMode("update").options(checkpointLocation=str(checkpoint), **options)


def assert_ran_once(attempts: Attempts, epochs: int, partitions: int = 2) -> None:
    assert list(attempts) == list(range(epochs))
    for epoch, tasks in attempts.items():
        again = {task: numbers for task, numbers in tasks.items() if len(numbers) != 1}
        assert not again, f"epoch {epoch}: state logic ran more than once: {again}"
        assert len(tasks) == partitions, f"epoch {epoch}: {sorted(tasks)}"


# ----------------------------------------------------------------------------------- what foreachBatch may do


def test_state_is_complete_whatever_a_function_does_with_the_rows(
    feed: EpochFeed,
    oracle: Oracle,
    expected: list[Counter[Any]],
    attempts: Attempts,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found: dict[int, Any] = {}

    def show(rows: DataFrame) -> None:
        rows.show(1)

    def read_first(rows: DataFrame) -> Any:
        return rows.limit(1).collect()

    def filter_all(rows: DataFrame) -> Any:
        return rows.filter(F.lit(False)).collect()

    def ignore(rows: DataFrame) -> None:
        del rows

    def read_twice(rows: DataFrame) -> Any:
        return rows.count(), multiset(rows.collect())

    def write_one_file(rows: DataFrame) -> Any:
        rows.coalesce(1).write.parquet(str(tmp_path / "one"))
        return multiset(rows.sparkSession.read.parquet(str(tmp_path / "one")).collect())

    def sort(rows: DataFrame) -> Any:
        return [row["k"] for row in rows.orderBy(F.desc("k")).collect()]

    def join_itself(rows: DataFrame) -> Any:
        return multiset(rows.join(rows.select("k", F.col("n").alias("again")), "k").drop("again").collect())

    def collect(rows: DataFrame) -> Any:
        return multiset(rows.collect())

    uses = [show, read_first, filter_all, ignore, read_twice, write_one_file, sort, join_itself, collect]

    def misuse(rows: DataFrame, epoch: int) -> None:
        found[epoch] = uses[epoch](rows)

    drain(writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "ck", **oracle.options).foreachBatch(misuse))
    assert found[8] == expected[8]
    assert_ran_once(attempts, 9)
    assert "only showing top 1 row" in capfd.readouterr().out
    assert set(map(tuple, found[1])) < set(expected[1])
    assert (found[2], found[3]) == ([], None)
    assert found[4] == (sum(expected[4].values()), expected[4])
    assert found[5] == expected[5]
    assert found[6] == sorted((key for key, _, _ in expected[6]), reverse=True)
    assert found[7] == expected[7]


class Tally(StatefulProcessor):
    """Counts rows and adds up values, and writes a line into a file for each key that it is called for."""

    def __init__(self, journal: str, fail_first: bool = False) -> None:
        self.journal = journal
        self.fail_first = fail_first

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("tally", "n long, total long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: ARG002
        count, total = self.state.get() if self.state.exists() else (0, 0)
        for row in rows:
            count, total = count + 1, total + row.v
        self.state.update((count, total))
        if self.fail_first and key[0] == "k03":
            fail_first_time(Path(self.journal + ".failed"))
        with Path(self.journal).open("a") as journal:
            journal.write(f"{key[0]}\n")
        yield Row(k=key[0], n=count, total=total)

    def close(self) -> None:
        pass


def fail_first_time(marker: Path) -> None:
    """Fails in the first task that comes here, whichever process it runs in."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    raise RuntimeError("this attempt fails")


def tallied(processor: Tally) -> Callable[[Any], Any]:
    return lambda rows: rows.groupBy("k").transformWithState(
        processor, "k string, n long, total long", "update", "none"
    )


def test_a_processor_runs_once_for_a_key_though_its_output_is_read_twice(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    found: list[Counter[Any]] = []

    def read_often(rows: DataFrame, epoch: int) -> None:
        if epoch % 2:
            rows.filter("n > 100").count()
            rows.orderBy("k").limit(3).collect()
        found.append(multiset(rows.collect()))

    stream = tallied(Tally(str(tmp_path / "journal")))(anabranch.stream(feed.stream()))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(read_often))
    assert found == expected
    called = Counter((tmp_path / "journal").read_text().split())
    assert called == Counter(key for epoch in expected for key, _, _ in epoch.elements())
    assert_ran_once(attempts, 9)


# ------------------------------------------------------------------- operations recorded after a stateful stage


def ignore_input(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    del frames
    yield from ()


def take_some(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for frame in frames:
        yield frame.head(1)
        return


RESULT = "k string, n long, total long"
RECORDED: dict[str, Callable[[Any], Any]] = {
    "coalesce": lambda rows: rows.coalesce(1),
    "repartition": lambda rows: rows.repartition(5),
    "repartitionByRange": lambda rows: rows.repartitionByRange(3, "n"),
    "union": lambda rows: rows.union(rows.sparkSession.createDataFrame([("static", 0, 0)], RESULT)),
    "cross join": lambda rows: rows.crossJoin(rows.sparkSession.createDataFrame([(1,), (2,)], "i int")).drop("i"),
    "join with nothing": lambda rows: rows.join(rows.sparkSession.createDataFrame([], "k string"), "k"),
    "nothing left": lambda rows: rows.filter(F.lit(False)),
    "a constant": lambda rows: rows.filter(F.col("k").isNull() & F.col("k").isNotNull()),
    "input ignored": lambda rows: rows.mapInPandas(ignore_input, RESULT),
    "input half read": lambda rows: rows.mapInPandas(take_some, RESULT),
}


@pytest.mark.parametrize("after", RECORDED)
def test_operations_after_a_stage_do_not_touch_its_state(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path, after: str
) -> None:
    operations = RECORDED[after]
    collector = Collector()
    first, last = split_feed(feed, tmp_path)
    drain(
        writer_of(operations(counted(anabranch.stream(first.stream()))), tmp_path / "ck", **oracle.options)
        .format("parquet")
        .option("path", str(tmp_path / "out"))
    )
    assert_ran_once(attempts, 2)
    last()
    drain(
        writer_of(counted(anabranch.stream(first.stream())), tmp_path / "ck", **oracle.options).foreachBatch(collector)
    )
    assert multiset(collector.epochs[2]) == expected[2]
    written = multiset(feed.spark.read.schema(RESULT).parquet(str(tmp_path / "out")).collect())
    both = expected[0] + expected[1]
    if after in ("coalesce", "repartition", "repartitionByRange"):
        assert written == both
    elif after == "union":
        assert written == both + Counter({("static", 0, 0): 2})
    elif after == "cross join":
        assert written == both + both
    elif after == "input half read":
        assert written <= both
    else:
        assert not written


def split_feed(feed: EpochFeed, folder: Path) -> tuple[EpochFeed, Callable[[], None]]:
    """A feed of the first two epochs, and how to give it the third."""
    part = EpochFeed(feed.spark, folder / "input", "k string, v long")
    files = sorted(feed.folder.glob("epoch-*.parquet"))[:3]
    for file in files[:2]:
        (part.folder / file.name).write_bytes(file.read_bytes())
    return part, lambda: (part.folder / files[2].name).write_bytes(files[2].read_bytes())


def test_sorting_in_complete_mode_runs_state_logic_once(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    found: dict[int, list[Any]] = {}

    def keep(rows: DataFrame, epoch: int) -> None:
        found[epoch] = [tuple(row) for row in rows.collect()]

    stream = counted(anabranch.stream(feed.stream())).orderBy(F.desc("total"), "k")
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).outputMode("complete").foreachBatch(keep))
    assert found[8] == sorted(expected[8], key=lambda row: (-row[2], row[0]))
    assert_ran_once(attempts, 9)


# ------------------------------------------------------------------------------------------------ bound columns


def test_columns_of_the_streaming_dataframe_work_before_the_first_stage(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    df = feed.stream()
    collector = Collector()
    bound = anabranch.stream(df).filter(df.v >= 0).withColumn("w", df["v"] * 1).groupBy(df.k)
    stream = bound.agg(F.count(df.k).alias("n"), F.sum(df.v).alias("total"))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


@pytest.mark.parametrize(
    "use",
    [
        lambda counts, df: counts.filter(df.v > 1),
        lambda counts, df: counts.select(df.k),
        lambda counts, df: counts.withColumn("x", df["k"]),
        lambda counts, df: counts.groupBy(df.k).transformWithState(Tally("unused"), RESULT, "update", "none"),
        lambda _, df: tallied(Tally("unused"))(anabranch.stream(df)).groupBy("k").agg(F.sum(df.v)),
    ],
    ids=["filter", "select", "withColumn", "groupBy", "agg"],
)
def test_columns_of_the_streaming_dataframe_are_refused_after_it(
    feed: EpochFeed, use: Callable[[Any, Any], Any]
) -> None:
    df = feed.stream()
    with pytest.raises(anabranch.UnsupportedError, match=r"such as df\.x.*Use its name instead"):
        use(counted(anabranch.stream(df)), df)


# ------------------------------------------------------------------------------------------------- failing tasks


def test_an_attempt_that_fails_before_the_stage_changes_nothing_twice(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    marker = tmp_path / "failed"

    def checked(value: Any) -> Any:
        fail_first_time(marker)
        return value

    collector = Collector()
    stream = counted(anabranch.stream(feed.stream()).withColumn("v", F.udf(checked, "long", useArrow=False)("v")))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert marker.exists()
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


def test_an_attempt_that_fails_after_it_was_sealed_changes_nothing_twice(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    marker = tmp_path / "failed"

    def fail_once(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            fail_first_time(marker)
            yield frame

    collector = Collector()
    stream = counted(anabranch.stream(feed.stream())).mapInPandas(fail_once, RESULT)
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert marker.exists()
    assert max(len(numbers) for numbers in attempts[0].values()) == 2
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


def test_a_processor_that_fails_in_its_first_attempt_changes_nothing_twice(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    collector = Collector()
    stream = tallied(Tally(str(tmp_path / "journal"), fail_first=True))(anabranch.stream(feed.stream()))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert (tmp_path / "journal.failed").exists()
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


# ---------------------------------------------------------------------------------------- workers and partitions


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
    feed: EpochFeed, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path, options: dict[str, Any]
) -> None:
    collector = Collector()
    named = {f"anabranch.{name}": value for name, value in options.items()}
    drain(writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "ck", **named).foreachBatch(collector))
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected
    assert_ran_once(attempts, 9, partitions=min(options["parallelism"], options.get("keyGroups", 1024)))


def test_a_stage_has_a_parallelism_of_its_own(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    collector = Collector()
    stream = counted(anabranch.stream(feed.stream()).stage("counting", parallelism=5))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected
    assert_ran_once(attempts, 9, partitions=5)


def test_several_queries_run_at_once_each_with_workers_of_its_own(
    feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    collectors = [Collector() for _ in range(3)]
    queries = [
        writer_of(counted(anabranch.stream(feed.stream())), tmp_path / str(number), **{"anabranch.workers": 1})
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


def test_one_worker_serves_two_jobs_at_once(feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path) -> None:
    collectors = [Collector(), Collector()]
    with external_worker() as worker:
        address = {"anabranch.workerAddresses": worker["address"]}
        queries = [
            writer_of(counted(anabranch.stream(feed.stream())), tmp_path / str(number), **address)
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
    feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    options = {"anabranch.store": "rocksdb", "anabranch.statePath": str(tmp_path / "state")}
    query = writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "ck", **options).format("noop").start()
    try:
        query.processAllAvailable()
        assert multiset(query.state("stage1").collect()) == expected[8]
        assert len(list((tmp_path / "state").iterdir())) == 2
        assert list((tmp_path / "state").rglob("*.log")) or list((tmp_path / "state").rglob("*.sst"))
    finally:
        query.stop()
    assert list((tmp_path / "state").iterdir()) == []


def test_two_stages_see_one_another_once(
    feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    """The second stage counts how often the first has emitted each key."""
    collector = Collector()
    twice = tallied(Tally(str(tmp_path / "journal")))(anabranch.stream(feed.stream())).select(
        "k", F.col("n").alias("v")
    )
    stream = twice.groupBy("k").agg(F.count("*").alias("n"), F.max("v").alias("most"))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    times = Counter(key for epoch in expected for key, _, _ in epoch.elements())
    assert multiset(collector.epochs[8]) == Counter((key, times[key], n) for key, n, _ in expected[8])
    assert_ran_once(attempts, 9, partitions=4)


def test_a_query_that_is_always_busy_can_be_stopped_and_continued(
    spark: SparkSession, oracle: Oracle, tmp_path: Path
) -> None:
    totals: dict[int, int] = {}

    def keep(rows: DataFrame, epoch: int) -> None:
        totals[epoch] = rows.agg(F.sum("n")).first()[0]

    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).option("numPartitions", 2).load()
    for last in (1, 3, 5):
        stream = anabranch.stream(rows).groupBy((F.col("value") % 10).alias("k")).agg(F.count("*").alias("n"))
        query = writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(keep).start()
        try:
            wait_until(lambda: last in totals, f"epoch {last} is out")  # noqa: B023
        finally:
            query.stop()
        assert query.exception() is None
        assert not query.isActive
    assert totals == {epoch: 100 * (epoch + 1) for epoch in range(max(totals) + 1)}
