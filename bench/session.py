"""A Spark for one benchmark, and the directory that holds its checkpoints: both are gone afterwards."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from anabranch.engine.spark.files import FILE_MANAGER, FILE_SYSTEM_BASED

CORES = 2
DRIVER_MEMORY = "4g"
ROOT = Path(__file__).resolve().parents[1]

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_SETTINGS = {
    "spark.driver.memory": DRIVER_MEMORY,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # Spark's best durable state: RocksDB, of which only changes are uploaded.
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Without it Spark forks a process for each file of its own logs; Anabranch sets it for its queries anyway.
    FILE_MANAGER: FILE_SYSTEM_BASED,
    # A query that cannot be stopped fails the benchmark instead of holding it up for ever.
    "spark.sql.streaming.stopTimeout": "120s",
    # Every epoch is read back from the query's progress reports.
    "spark.sql.streaming.numRecentProgressUpdates": "10000",
}
_POLL_INTERVAL_S = 0.05
_QUIET_LIMIT_S = 30.0
_IDLE_LOOKS = 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_interrupted = threading.Event()


@dataclass
class Lab:
    """A Spark session and a directory of its own."""

    spark: SparkSession
    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def new_folder(self, name: str) -> str:
        """Return a fresh path, for a checkpoint or for files."""
        return str(self.folder / f"{name.replace(' ', '-')}-{next(self._numbers)}")

    @property
    def java(self) -> str:
        """The version of the Java that runs Spark."""
        jvm: Any = self.spark.sparkContext._jvm
        return str(jvm.System.getProperty("java.version"))

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Keep Spark from logging: stopping a query in the middle of an epoch fills pages with expected errors."""
        context = self.spark.sparkContext
        context.setLogLevel("OFF")
        try:
            yield
            self.wait_until_idle()
        finally:
            context.setLogLevel("ERROR")

    def wait_until_idle(self) -> None:
        """Wait for tasks that were told to stop: they would take time from whatever is measured next."""
        tracker = self.spark.sparkContext._jsc.sc().statusTracker()
        pause = threading.Event()
        idle_looks = 0
        for _ in range(int(_QUIET_LIMIT_S / _POLL_INTERVAL_S)):
            is_idle = all(info.numRunningTasks() == 0 for info in tracker.getExecutorInfos())
            # A job that is being cancelled may still start its last tasks.
            idle_looks = idle_looks + 1 if is_idle else 0
            if idle_looks == _IDLE_LOOKS:
                return
            pause.wait(_POLL_INTERVAL_S)


@contextmanager
def open_lab(*, parallelism: int) -> Iterator[Lab]:
    """Start Spark; stop its queries and itself whichever way the benchmark ends."""
    folder = Path(tempfile.mkdtemp(prefix="anabranch-bench-"))
    previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        spark = _start_spark(folder, parallelism)
        # Spark has put its own handler there.
        signal.signal(signal.SIGINT, _interrupt)
        try:
            yield Lab(spark, folder)
        finally:
            _stop_spark(spark)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        shutil.rmtree(folder, ignore_errors=True)


def was_interrupted() -> bool:
    """Return whether the benchmark has been told to end."""
    return _interrupted.is_set()


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if the benchmark has been told to end."""
    if was_interrupted():
        raise KeyboardInterrupt


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Leave at the next safe point: an exception in the middle of a call to the JVM would cut the line to it.

    The second time, leave at once. Then the JVM and the workers end because this process, their parent, does.
    """
    if _interrupted.is_set():
        raise KeyboardInterrupt
    _interrupted.set()


def _start_spark(folder: Path, parallelism: int) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # Python tasks import the processors from here, whatever the current directory is.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    builder = SparkSession.builder.master(f"local[{CORES}]").appName("anabranch-bench")
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    return (
        builder.config("spark.sql.shuffle.partitions", str(parallelism))
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.driver.extraJavaOptions", f'-Duser.timezone=UTC "-Dderby.system.home={folder}"')
        .getOrCreate()
    )


def _stop_spark(spark: SparkSession) -> None:
    try:
        spark.sparkContext.setLogLevel("OFF")
        for query in spark.streams.active:
            query.stop()
        spark.stop()
    except (Py4JError, OSError):
        # A signal to the whole group of processes ends the JVM as well.
        if not was_interrupted():
            raise
