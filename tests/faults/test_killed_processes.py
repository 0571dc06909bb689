"""Real processes, killed: drivers and workers die at the worst moment, and a restart carries on as if none had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch
from support import counting_driver
from support.counting_driver import EpochFiles, counted, epochs_from

# Tasks cannot import a test: what it defines travels with them.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT_S = 120.0
KEYS = [f"k{number:02d}" for number in range(40)]
#: Each epoch changes other keys, and the last changes all: its rows show the whole state.
EPOCHS = [[(key, number) for key in KEYS[number % 4 :: 4]] for number in range(6)] + [[(key, 1000) for key in KEYS]]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s until {what}"
        pause.wait(0.02)


class Folder:
    """A job's input, checkpoint and output."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("input", "output"):
            (path / name).mkdir(parents=True)
        self._count = 0

    def add_epochs(self, upto: int) -> None:
        for rows in EPOCHS[self._count : upto]:
            columns = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate([pa.string(), pa.int64()])]
            unfinished = self.path / "input" / f".{self._count}"
            pq.write_table(pa.table(columns, names=["k", "v"]), unfinished)
            # The file source takes files in the order of their times.
            os.utime(unfinished, (1_700_000_000 + self._count, 1_700_000_000 + self._count))
            unfinished.rename(self.path / "input" / f"epoch-{self._count}.parquet")
            self._count += 1

    def writer(self, spark: SparkSession, **options: Any) -> Any:
        writer = counted(epochs_from(spark, self.path / "input")).foreachBatch(EpochFiles(self.path / "output", -1))
        return writer.options(checkpointLocation=str(self.path / "checkpoint"), **options)

    def finish(self, spark: SparkSession, **options: Any) -> None:
        """Run all epochs that are left, in this process."""
        self.add_epochs(len(EPOCHS))
        query = self.writer(spark, **options).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(WAIT_S)
        finally:
            query.stop()

    def has_epoch(self, epoch: int) -> bool:
        return (self.path / "output" / f"{epoch}.json").exists()

    def output(self) -> dict[int, list[Any]]:
        return {int(file.stem): json.loads(file.read_text()) for file in (self.path / "output").glob("*.json")}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "job")


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[Any]]:
    """What comes out in each epoch if nothing happens."""
    state: dict[str, tuple[int, int]] = {}
    epochs = {}
    for number, rows in enumerate(EPOCHS):
        for key, value in rows:
            count, total = state.get(key, (0, 0))
            state[key] = (count + 1, total + value)
        epochs[number] = sorted([key, *state[key]] for key in {key for key, _ in rows})
    return epochs


@contextmanager
def driver(folder: Folder, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A driver with a running query, and its workers. Whatever it leaves behind is killed in the end."""
    command = [sys.executable, counting_driver.__file__, str(folder.path), *arguments]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        workers = [psutil.Process(pid) for pid in json.loads(process.stdout.readline())]
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 2
        assert set(workers) <= set(family)
        yield process, workers
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        for left in family:
            if left.is_running():
                left.kill()


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_driver_takes_its_workers_with_it_and_its_successor_carries_on(
    spark: SparkSession, folder: Folder, undisturbed: dict[int, list[Any]]
) -> None:
    folder.add_epochs(2)
    with driver(folder) as (process, workers):
        wait_until(lambda: folder.has_epoch(1), "two epochs are out")
        folder.add_epochs(5)
        wait_until(lambda: folder.has_epoch(2), "the third epoch is out")
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, workers)), "the workers are gone", timeout_s=20)
    folder.finish(spark, **{"anabranch.workers": 3})
    assert folder.output() == undisturbed


# Drivers that end by themselves at this point and others, in test_driver_crash_points and test_sinks, take less time.
@pytest.mark.slow
def test_a_driver_killed_between_sink_and_commit_loses_and_doubles_nothing(
    spark: SparkSession, folder: Folder, undisturbed: dict[int, list[Any]]
) -> None:
    folder.add_epochs(1)
    with driver(folder, "--die-in-epoch", "3") as (process, workers):
        folder.add_epochs(5)
        assert process.wait(timeout=WAIT_S) == -signal.SIGKILL
        wait_until(lambda: all(map(is_gone, workers)), "the workers are gone", timeout_s=20)
    assert sorted(folder.output()) == [0, 1, 2, 3]
    assert not list((folder.path / "checkpoint" / "anabranch" / "manifests").glob("000000000003.*"))
    folder.finish(spark, **{"anabranch.workers": 3})
    assert folder.output() == undisturbed


def test_a_worker_killed_between_epochs_is_replaced_while_the_query_goes_on(
    spark: SparkSession, folder: Folder, undisturbed: dict[int, list[Any]]
) -> None:
    folder.add_epochs(2)
    query = folder.writer(spark).start()
    try:
        query.processAllAvailable()
        victim, other = query.workers()
        os.kill(victim["pid"], signal.SIGKILL)
        folder.add_epochs(3)
        query.processAllAvailable()
        (repair,) = repairs(query)
        assert repair["lost"] == [victim["id"]]
        assert repair["keyGroups"] == victim["keyGroups"]
        wait_until(lambda: len(query.status["anabranch"]["workers"]) == 2, "another worker has started")
        folder.add_epochs(4)
        query.processAllAvailable()
        workers = query.status["anabranch"]["workers"]
        assert len(workers) == 2
        assert other["id"] in workers
        assert victim["id"] not in workers
        folder.add_epochs(len(EPOCHS))
        query.processAllAvailable()
    finally:
        query.stop()
    assert folder.output() == undisturbed


def repairs(query: Any) -> list[dict[str, Any]]:
    """What was done about lost workers, by the reports of the epochs."""
    return [repair for progress in query.recentProgress for repair in progress["anabranch"].get("repairs", ())]


class KillsAWorker(StatefulProcessor):
    """Counts, and kills a worker while the state of a task is on its way to it."""

    def __init__(self, order: Path) -> None:
        self.order = order

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("tally", "n long, total long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: ARG002
        if self.order.exists():
            pid = int(self.order.read_text())
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        count, total = self.state.get() if self.state.exists() else (0, 0)
        for row in rows:
            count, total = count + 1, total + row.v
        self.state.update((count, total))
        yield Row(k=key[0], n=count, total=total)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("reachable", [True, False], ids=["started by the query", "started elsewhere"])
def test_an_epoch_that_loses_a_worker_is_run_again_with_the_others(
    spark: SparkSession, folder: Folder, undisturbed: dict[int, list[Any]], tmp_path: Path, reachable: bool
) -> None:
    found: dict[int, list[Any]] = {}

    def keep(rows: DataFrame, epoch: int) -> None:
        found[epoch] = sorted(map(list, rows.collect()))

    folder.add_epochs(3)
    with workers_elsewhere(0 if reachable else 2) as addresses:
        grouped = anabranch.stream(epochs_from(spark, folder.path / "input")).groupBy("k")
        processor = KillsAWorker(tmp_path / "order")
        stream = grouped.transformWithState(processor, "k string, n long, total long", "update", "none")
        writer = stream.writeStream.outputMode("update").foreachBatch(keep)
        options = {"checkpointLocation": str(tmp_path / "ck"), "anabranch.workerAddresses": ",".join(addresses)}
        query = writer.options(**options).start()
        try:
            query.processAllAvailable()
            victim = query.workers()[0]
            (tmp_path / "order").write_text(str(victim["pid"]))
            folder.add_epochs(4)
            query.processAllAvailable()
            (tmp_path / "order").unlink()
            assert [repair["lost"] for repair in repairs(query)] == [[victim["id"]]]
            folder.add_epochs(len(EPOCHS))
            query.processAllAvailable()
        finally:
            query.stop()
    assert found == undisturbed


def test_a_query_whose_workers_are_all_lost_and_were_started_elsewhere_says_so(
    spark: SparkSession, folder: Folder, undisturbed: dict[int, list[Any]]
) -> None:
    folder.add_epochs(2)
    with workers_elsewhere(2) as addresses:
        query = folder.writer(spark, **{"anabranch.workerAddresses": ",".join(addresses)}).start()
        try:
            query.processAllAvailable()
            for worker in query.workers():
                os.kill(worker["pid"], signal.SIGKILL)
            folder.add_epochs(3)
            with pytest.raises(anabranch.AnabranchError) as failure:
                query.processAllAvailable()
        finally:
            query.stop()
    assert "All workers of anabranch.workerAddresses are lost. Start them again" in str(failure.value)
    folder.finish(spark)
    assert folder.output() == undisturbed


@contextmanager
def workers_elsewhere(count: int) -> Iterator[list[str]]:
    """The addresses of workers that no query has started."""
    command = [sys.executable, "-m", "anabranch", "worker", "--port", "0", "--id"]
    processes = [subprocess.Popen([*command, f"else-{n}"], stdout=subprocess.PIPE) for n in range(count)]
    try:
        yield [json.loads(process.stdout.readline())["address"] for process in processes if process.stdout]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_asked_to_stop_ends_well(spark: SparkSession, folder: Folder, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "anabranch", "worker", "--port", "0", "--store", "rocksdb"]
    command += ["--state-path", str(folder.path / "state")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        folder.add_epochs(2)
        query = folder.writer(spark, **{"anabranch.workerAddresses": ready["address"]}).start()
        try:
            query.processAllAvailable()
            process.send_signal(how)
            folder.add_epochs(3)
            query.processAllAvailable()
            assert process.poll() is None, "there is no other worker that could take what it has"
        finally:
            query.stop()
        assert process.wait(timeout=30) == 0
        assert list((folder.path / "state").iterdir()) == []
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
