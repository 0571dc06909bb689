"""Sinks take every epoch exactly once, through restarts and crashes between the sink's write and the commit."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.control.coordinator import Coordinator
from anabranch.control.epochs import durability
from anabranch.core.requests import Commit, Prepare
from anabranch.wire.client import WorkerClient
from support.oracle import Oracle, drain
from support.streams import Collector, EpochFeed

KEYS = [f"k{number:02d}" for number in range(30)]
#: Each epoch changes other keys, and the last changes all: its rows show the whole state.
EPOCHS = [
    [(key, 1) for key in KEYS],
    [(key, 10) for key in KEYS[::2]] + [("k01", None)],
    [(key, 100) for key in KEYS[::3]] + [("new", 5)],
    [("k00", 1000), ("k01", 1000), ("new", 1000)],
    [(key, 10_000) for key in [*KEYS, "new"]],
]


class CrashError(Exception):
    """Stands for the end of the driver."""


@pytest.fixture(scope="module")
def expected(spark: SparkSession, oracle: Oracle) -> dict[int, list[Any]]:
    """What Spark itself gives in each epoch."""
    feed = EpochFeed(spark, oracle.folder / "native-input", "k string, v long")
    feed.add(*EPOCHS)
    return oracle.native(counted, feed.stream()).epochs


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], Any]]:
    """Crashes once in an epoch: before its commit, that is, after the sink's write; or after it, before Spark's."""
    commit = Coordinator.commit

    def arrange(crashing: int, point: str) -> None:
        def crash(self: Coordinator, epoch: int) -> Any:
            if epoch == crashing and point == "before":
                raise CrashError(f"before the commit of epoch {epoch}")
            figures = commit(self, epoch)
            if epoch == crashing:
                raise CrashError(f"after the commit of epoch {epoch}")
            return figures

        monkeypatch.setattr(Coordinator, "commit", crash)

    yield arrange
    monkeypatch.undo()


class Job:
    """A counting query that is run piece by piece on one checkpoint."""

    def __init__(
        self, spark: SparkSession, folder: Path, options: dict[str, Any], checkpoint: Path | None = None
    ) -> None:
        self.feed = EpochFeed(spark, folder / "input", "k string, v long")
        self._checkpoint = checkpoint or folder / "checkpoint"
        self._options = options
        self._fed = 0

    def writer(self, query: Callable[[Any], Any] | None = None) -> Any:
        stream = (query or counted)(anabranch.stream(self.feed.stream()))
        writer = stream.writeStream.outputMode("update").options(**self._options)
        return writer.option("checkpointLocation", str(self._checkpoint))

    def add_epochs(self, upto: int) -> None:
        self.feed.add(*EPOCHS[self._fed : upto])
        self._fed = upto

    def last_epoch(self) -> list[Any]:
        """The rows of the last epoch, whatever took those before it."""
        collector = Collector()
        self.add_epochs(5)
        drain(self.writer().foreachBatch(collector))
        return collector.epochs[4]


@pytest.fixture
def job(spark: SparkSession, oracle: Oracle, tmp_path: Path) -> Job:
    return Job(spark, tmp_path, oracle.options)


def counted(rows: Any) -> Any:
    grouped = rows.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"), F.avg("v").alias("mean"))
    return grouped.select(F.substring("k", -1, 1).alias("last"), "k", "n", "total", "mean")


def run_through_crashes(job: Job, crash_at: Callable[[int, str], Any], write: Callable[[], Any]) -> None:
    """All epochs: one stop, one crash before a commit, one after a commit."""
    job.add_epochs(2)
    drain(write())
    crash_at(2, "before")
    job.add_epochs(3)
    with pytest.raises(StreamingQueryException, match="before the commit of epoch 2"):
        drain(write())
    crash_at(3, "after")
    job.add_epochs(4)
    with pytest.raises(StreamingQueryException, match="after the commit of epoch 3"):
        drain(write())
    crash_at(-1, "never")
    job.add_epochs(5)
    drain(write())


def multiset(rows: list[Any]) -> Counter[Any]:
    return Counter(tuple(row) for row in rows)


def union(expected: dict[int, list[Any]], *epochs: int) -> Counter[Any]:
    return multiset([row for epoch in epochs or expected for row in expected[epoch]])


@pytest.mark.parametrize(
    ("file_format", "partition_by"),
    # Which files count is the same for all formats.
    [("parquet", ["last"]), ("json", []), ("csv", []), pytest.param("orc", ["last"], marks=pytest.mark.slow)],
)
def test_files_hold_every_epoch_once(
    job: Job, expected: dict[int, list[Any]], crash_at: Any, tmp_path: Path, file_format: str, partition_by: list[str]
) -> None:
    def write() -> Any:
        return job.writer().format(file_format).partitionBy(*partition_by).option("path", str(tmp_path / "out"))

    run_through_crashes(job, crash_at, write)
    assert (tmp_path / "out" / "_spark_metadata" / "4").is_file()
    assert bool(list((tmp_path / "out").glob("last=*"))) == bool(partition_by)
    schema = "last string, k string, n long, total long, mean double"
    rows = job.feed.spark.read.format(file_format).schema(schema).load(str(tmp_path / "out"))
    assert multiset(rows.select("last", "k", "n", "total", "mean").collect()) == union(expected)


def test_a_table_holds_every_epoch_once(job: Job, expected: dict[int, list[Any]], crash_at: Any) -> None:
    spark = job.feed.spark

    class ToTable:
        """Starts with toTable what others start with start."""

        def trigger(self, **trigger: Any) -> Any:
            self.writer = job.writer().trigger(**trigger)
            return self

        def start(self) -> Any:
            return self.writer.toTable("counted_once", partitionBy="last")

    try:
        run_through_crashes(job, crash_at, ToTable)
        rows = spark.table("counted_once")
        assert multiset(rows.select("last", "k", "n", "total", "mean").collect()) == union(expected)
        with pytest.raises(anabranch.UnsupportedError, match=r"partitioned by \['last'\], not by \['k'\]"):
            job.writer().toTable("counted_once", partitionBy="k")
        with pytest.raises(anabranch.UnsupportedError, match=r"has the columns k: string, .*result has struct<"):
            job.writer(lambda rows: rows.groupBy("k").count()).toTable("counted_once")
    finally:
        spark.sql("drop table if exists counted_once")


def test_a_memory_table_holds_every_epoch_of_its_run_once(
    job: Job, expected: dict[int, list[Any]], crash_at: Any
) -> None:
    spark = job.feed.spark
    found: list[Counter[Any]] = []

    def write() -> Any:
        return job.writer().format("memory").queryName("counted")

    job.add_epochs(2)
    drain(write())
    found.append(multiset(spark.table("counted").collect()))
    for epoch, point in [(2, "before"), (3, "after")]:
        crash_at(epoch, point)
        job.add_epochs(epoch + 1)
        with pytest.raises(StreamingQueryException, match=f"{point} the commit of epoch {epoch}"):
            drain(write())
        found.append(multiset(spark.table("counted").collect()))
    crash_at(-1, "never")
    job.add_epochs(5)
    drain(write())
    found.append(multiset(spark.table("counted").collect()))
    epochs = [(0, 1), (2,), (2, 3), (3, 4)]
    assert found == [union(expected, *numbers) for numbers in epochs]


def test_a_memory_table_in_complete_mode_holds_the_last_result(job: Job, expected: dict[int, list[Any]]) -> None:
    job.add_epochs(5)
    drain(job.writer().outputMode("complete").format("memory").queryName("counted_completely"))
    rows = job.feed.spark.table("counted_completely").collect()
    assert multiset(rows) == union(expected, 4)


def test_the_console_shows_some_rows_and_state_takes_all(
    job: Job, expected: dict[int, list[Any]], crash_at: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    job.add_epochs(3)
    crash_at(2, "before")
    with pytest.raises(StreamingQueryException):
        drain(job.writer().format("console").option("numRows", 7).option("truncate", False))
    crash_at(-1, "never")
    job.add_epochs(4)
    drain(job.writer().format("console"))
    shown = capfd.readouterr().out
    assert [shown.count(f"Batch: {epoch}\n") for epoch in range(4)] == [1, 1, 2, 1]
    assert "only showing top 7 rows" in shown
    assert multiset(job.last_epoch()) == union(expected, 4)


def test_noop_runs_everything(job: Job, expected: dict[int, list[Any]], crash_at: Any) -> None:
    job.add_epochs(3)
    crash_at(1, "after")
    with pytest.raises(StreamingQueryException):
        drain(job.writer().format("noop"))
    crash_at(-1, "never")
    job.add_epochs(4)
    drain(job.writer().format("noop"))
    assert multiset(job.last_epoch()) == union(expected, 4)


def test_a_function_gets_the_same_rows_when_an_epoch_is_run_again(
    job: Job, expected: dict[int, list[Any]], crash_at: Any
) -> None:
    calls: list[tuple[int, Counter[Any]]] = []

    def keep(rows: DataFrame, epoch: int) -> None:
        calls.append((epoch, multiset(rows.collect())))

    run_through_crashes(job, crash_at, lambda: job.writer().foreachBatch(keep))
    assert calls == [(epoch, union(expected, epoch)) for epoch in (0, 1, 2, 2, 3, 3, 4)]


def test_a_function_that_fails_is_named_and_its_epoch_is_run_again(job: Job, expected: dict[int, list[Any]]) -> None:
    def fail(rows: DataFrame, epoch: int) -> None:
        rows.collect()
        if epoch == 2:
            raise ValueError("no room")

    job.add_epochs(4)
    with pytest.raises(
        anabranch.EpochError, match=r"foreachBatch function failed in epoch 2: ValueError: no room\..*not"
    ):
        drain(job.writer().foreachBatch(fail))
    assert multiset(job.last_epoch()) == union(expected, 4)


def test_an_epoch_that_cannot_be_written_is_not_committed(
    job: Job, expected: dict[int, list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("a file where a directory should be")
    job.add_epochs(2)
    with pytest.raises((StreamingQueryException, anabranch.AnabranchError)):
        drain(job.writer().format("parquet").option("path", str(tmp_path / "out")))
    (tmp_path / "out").unlink()
    job.add_epochs(4)
    drain(job.writer().format("parquet").option("path", str(tmp_path / "out")))
    rows = job.feed.spark.read.parquet(str(tmp_path / "out")).collect()
    assert multiset(rows) == union(expected, 0, 1, 2, 3)
    assert multiset(job.last_epoch()) == union(expected, 4)


@pytest.mark.parametrize("point", [Prepare, "manifest", Commit, "closing"])
def test_a_crash_at_any_point_of_the_commit_loses_and_doubles_nothing(
    job: Job,
    oracle: Oracle,
    expected: dict[int, list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: Any,
) -> None:
    second = oracle.options["anabranch.workerAddresses"].split(",")[1]

    def write() -> Any:
        return job.writer().format("parquet").option("path", str(tmp_path / "out"))

    call, write_manifest, commit = WorkerClient.call, durability.write_manifest, Coordinator.commit

    def crash_before_request(client: WorkerClient, request: Any, **named: Any) -> Any:
        if isinstance(request, point) and request.epoch == 1 and client.address == second:
            raise CrashError("here")
        return call(client, request, **named)

    def crash_after_manifest(storage: Any, manifest: Any) -> None:
        write_manifest(storage, manifest)
        if manifest.epoch == 1:
            raise CrashError("here")

    def crash_after_commit(self: Coordinator, epoch: int) -> Any:
        figures = commit(self, epoch)
        if epoch == 1:
            raise CrashError("here")
        return figures

    with monkeypatch.context() as patch:
        if point == "manifest":
            patch.setattr(durability, "write_manifest", crash_after_manifest)
        elif point == "closing":
            patch.setattr(Coordinator, "commit", crash_after_commit)
        else:
            patch.setattr(WorkerClient, "call", crash_before_request)
        job.add_epochs(2)
        with pytest.raises(StreamingQueryException, match="here"):
            drain(write())
    job.add_epochs(5)
    drain(write())
    assert multiset(job.feed.spark.read.parquet(str(tmp_path / "out")).collect()) == union(expected)


@pytest.mark.parametrize("name", ["two words", "ä 日本", "a%20b#c+d=e"])
def test_a_checkpoint_is_where_its_name_says(
    spark: SparkSession, oracle: Oracle, expected: dict[int, list[Any]], tmp_path: Path, name: str
) -> None:
    job = Job(spark, tmp_path, oracle.options, checkpoint=tmp_path / name / "ck")
    job.add_epochs(4)
    drain(job.writer().format("noop"))
    assert sorted(path.name for path in (tmp_path / name / "ck").iterdir() if path.is_dir()) == [
        "anabranch",
        "commits",
        "offsets",
        "sources",
    ]
    assert multiset(job.last_epoch()) == union(expected, 4)
