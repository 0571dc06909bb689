"""Checkpoints that belong to something else or cannot be used, workers that are not there: named, and nothing left."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import (
    CheckpointError,
    EpochError,
    FencedError,
    LostWorkerError,
    SettingsError,
    UnsupportedError,
    WorkerError,
)
from support.oracle import drain, external_worker
from support.streams import EpochFeed


@pytest.fixture(scope="module")
def feed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path_factory.mktemp("places") / "input", "k string, v long")
    feed.add([("a", 1)])
    return feed


@pytest.fixture
def rows(feed: EpochFeed) -> anabranch.Stream:
    return anabranch.stream(feed.stream())


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    assert worker_children() == []


def worker_children() -> list[int]:
    """The state workers that this process has started and that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "anabranch" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def counted(rows: Any) -> Any:
    return rows.groupBy("k").count()


def writer_of(stream: Any, checkpoint: Path, **options: Any) -> Any:
    return stream.writeStream.outputMode("update").format("noop").options(checkpointLocation=str(checkpoint), **options)


@pytest.fixture(scope="module")
def used(feed: EpochFeed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a query that counts by k."""
    checkpoint = tmp_path_factory.mktemp("used") / "ck"
    drain(writer_of(counted(anabranch.stream(feed.stream())), checkpoint, **{"anabranch.workers": 1}))
    return checkpoint


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            lambda rows: rows.groupBy("v").count(),
            {},
            r"the key of stage1 is .*k.* in the checkpoint and .*v.* new checkpoint",
        ),
        (lambda rows: rows.groupBy(F.length("k").alias("k")).count(), {}, "the key of stage1"),
        (lambda rows: rows.groupBy("k").agg(F.sum("v")), {}, "the state variable aggregates of stage1 is"),
        (
            lambda rows: counted(rows.filter("v > 0").stage("other")),
            {},
            "has the stateful stage stage1 .*this query has the stateful stage other",
        ),
        (lambda rows: counted(rows.stage("other")), {}, "stage 1 is called stage1 in the checkpoint and other"),
        (lambda rows: rows, {}, "the stateful stage stage1 .*this query does not"),
        (counted, {"anabranch.keyGroups": 64}, r"anabranch\.keyGroups is 1024 in the checkpoint and 64 in this query"),
    ],
)
def test_the_checkpoint_of_another_job(
    rows: Any, used: Path, build: Callable[[Any], Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        writer_of(build(rows), used, **options).outputMode("append" if build(rows) is rows else "update").start()


def test_the_checkpoint_of_a_plain_spark_query(feed: EpochFeed, rows: Any, tmp_path: Path) -> None:
    drain(feed.stream().writeStream.format("noop").option("checkpointLocation", str(tmp_path / "ck")))
    with pytest.raises(CheckpointError, match=r"checkpoint of a plain Spark query.*new checkpoint"):
        writer_of(counted(rows), tmp_path / "ck").start()


def test_a_checkpoint_whose_description_is_damaged(rows: Any, tmp_path: Path) -> None:
    drain(writer_of(counted(rows), tmp_path / "ck", **{"anabranch.workers": 1}))
    job = tmp_path / "ck" / "anabranch" / "job.json"
    whole = job.read_bytes()
    job.write_bytes(whole[:40])
    with pytest.raises(CheckpointError, match=r"job\.json"):
        writer_of(counted(rows), tmp_path / "ck").start()
    job.unlink()
    with pytest.raises(CheckpointError, match=r"job\.json is missing"):
        writer_of(counted(rows), tmp_path / "ck").start()


@pytest.mark.parametrize("location", ["{folder}/file/ck", "unknown://place/ck"])
def test_a_checkpoint_that_cannot_be_written(rows: Any, tmp_path: Path, location: str) -> None:
    (tmp_path / "file").write_text("a file where a directory should be")
    place = location.format(folder=tmp_path)
    with pytest.raises(CheckpointError, match="ck"):
        writer_of(counted(rows), Path("x")).option("checkpointLocation", place).start()


def test_two_queries_on_one_checkpoint(rows: Any, tmp_path: Path) -> None:
    first = writer_of(counted(rows), tmp_path / "ck", **{"anabranch.workers": 1}).queryName("the_first").start()
    try:
        with pytest.raises(EpochError, match=r"The query the_first is running on the checkpoint .*/ck.*Stop it first"):
            writer_of(counted(rows), f"{tmp_path}/elsewhere/../ck").start()
        first.processAllAvailable()
        assert first.isActive
    finally:
        first.stop()


def test_two_queries_of_one_name(rows: Any, tmp_path: Path) -> None:
    options = {"anabranch.workers": 1}
    first = writer_of(counted(rows), tmp_path / "a", **options).format("memory").queryName("twice").start()
    try:
        first.processAllAvailable()
        for sink in ("memory", "noop"):
            with pytest.raises(UnsupportedError, match=r"query 'twice' is running already.*another name"):
                writer_of(counted(rows), tmp_path / "b", **options).format(sink).queryName("twice").start()
        assert [tuple(row) for row in rows.sparkSession.table("twice").collect()] == [("a", 1)]
        assert not (tmp_path / "b").exists()
    finally:
        first.stop()


def test_a_query_stops_when_another_driver_takes_its_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    feed = EpochFeed(spark, tmp_path / "input", "k string")
    feed.add([("a",)])
    query = writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "ck", **{"anabranch.workers": 1}).start()
    try:
        query.processAllAvailable()
        claim_generation(Storage(str(tmp_path / "ck")), {"host": "elsewhere"})
        feed.add([("b",)])
        with pytest.raises(FencedError, match=r"newer driver has taken over .*generation 2.*one query per checkpoint"):
            query.processAllAvailable()
        assert isinstance(query.exception(), FencedError)
    finally:
        query.stop()


# -------------------------------------------------------------------------------------------------------- workers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_worker_that_cannot_be_reached(rows: Any, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(LostWorkerError, match=f"{address} cannot be reached. See whether its process runs"):
        writer_of(counted(rows), tmp_path / "ck", **{"anabranch.workerAddresses": address}).start()


def test_something_that_is_no_worker(rows: Any, tmp_path: Path) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        options = {"anabranch.workerAddresses": address, "anabranch.startTimeout": 1}
        with pytest.raises(LostWorkerError, match=f"{address} .*(did not answer|cannot be reached)"):
            writer_of(counted(rows), tmp_path / "ck", **options).start()


def test_one_worker_named_twice_and_a_wrong_token(rows: Any, tmp_path: Path) -> None:
    with external_worker("--id", "twin", environment={**os.environ, "ANABRANCH_TOKEN": "secret"}) as worker:
        addresses = {
            "anabranch.workerAddresses": f"{worker['address']},{worker['address'].replace('127.0.0.1', 'localhost')}"
        }
        with pytest.raises(SettingsError, match="lead to the worker 'twin'"):
            writer_of(counted(rows), tmp_path / "a", **addresses, **{"anabranch.token": "secret"}).start()
        for token in ("", "guess"):
            options = {"anabranch.workerAddresses": worker["address"], "anabranch.token": token}
            with pytest.raises(WorkerError, match=r"asks for another token.*anabranch\.token"):
                writer_of(counted(rows), tmp_path / "b", **options).start()
        options["anabranch.token"] = "secret"
        drain(writer_of(counted(rows), tmp_path / "c", **options))


def test_workers_of_the_query_that_cannot_start(rows: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a directory should be")
    options = {"anabranch.store": "rocksdb", "anabranch.statePath": str(tmp_path / "file" / "state")}
    with pytest.raises(WorkerError, match=r"failed to start.*Local state cannot be kept in .*anabranch\.statePath"):
        writer_of(counted(rows), tmp_path / "ck", **options).start()


def run_command(*arguments: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if name != "ANABRANCH_TOKEN"}
    command = [sys.executable, "-m", "anabranch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    return done.returncode, done.stderr


def test_the_worker_command_says_in_one_sentence_what_is_wrong(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run_command("worker", "--port", port) == (
            1,
            f"Error: Port {port} on 127.0.0.1 is in use. Choose another --port, or 0 for any.\n",
        )
    code, text = run_command("worker", "--host", "0.0.0.0", "--port", "0")
    assert code == 1
    assert "0.0.0.0 can be reached from other machines, so it needs a token" in text
    assert text.count("\n") == 1
    code, text = run_command("worker", "--store", "rocks")
    assert (code, "'rocks' is not a store" in text) == (2, True)
    (tmp_path / "file").write_text("")
    code, text = run_command("worker", "--store", "rocksdb", "--state-path", str(tmp_path / "file" / "state"))
    assert (code, text.count("\n"), "Local state cannot be kept in" in text) == (1, 1, True)


# ------------------------------------------------------------------------------------------------------ the handle


def test_a_handle_says_which_stages_there_are_and_when_it_is_over(rows: Any, tmp_path: Path) -> None:
    query = writer_of(counted(rows.stage("counts")), tmp_path / "ck", **{"anabranch.workers": 1}).start()
    try:
        query.processAllAvailable()
        with pytest.raises(UnsupportedError, match=r"no stateful stage 'nope'. Stateful stages: 1 \('counts'\)"):
            query.state("nope")
        with pytest.raises(UnsupportedError, match=r"state variables \['aggregates'\]"):
            query.state("counts", "nope")
        assert query.state(1).collect() == query.state("counts", "aggregates").collect()
    finally:
        query.stop()
    with pytest.raises(UnsupportedError, match="query has ended"):
        query.workers()
    with pytest.raises(UnsupportedError, match="query has ended"):
        query.state("counts")
