"""The process of the demonstration: a quiet Spark, and an end on request that loses no epoch."""

from __future__ import annotations

import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from anabranch.core.errors import AnabranchError, SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_JAVA_MAJOR_MIN = 17
_MASTER = re.compile(r"local(\[(\d+|\*)(,\d+)?\])?|local-cluster\[\d+,\d+,\d+\]|spark://.+|k8s://.+|yarn")
_JAVA_VERSION = re.compile(r'version "(\d+)')
_JAVA_ADVICE = "Install it (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or set JAVA_HOME."


def check_master(master: str) -> None:
    if _MASTER.fullmatch(master.replace(" ", "")) is None:
        raise SettingsError(
            f"--master is '{master}', which is no Spark master. Give something like 'local[2]' or spark://host:7077."
        )


def check_java() -> None:
    """Refuse a missing or old Java in a sentence; Spark's own message about it is a stack trace."""
    needed = f"Java {_JAVA_MAJOR_MIN} or newer is needed"
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    if java is None:
        where = f"in JAVA_HOME, which is {home}" if home else "on the path"
        raise AnabranchError(f"{needed}, and there is none {where}. {_JAVA_ADVICE}")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = _JAVA_VERSION.search(said)
    if found is not None and int(found[1]) < _JAVA_MAJOR_MIN:
        raise AnabranchError(f"{needed}, but {java} is Java {found[1]}. {_JAVA_ADVICE}")


@contextmanager
def open_spark(master: str, *, parallelism: int, log: Path) -> Iterator[SparkSession]:
    """Start Spark, with everything that it and its tasks say going to a log file."""
    with tempfile.TemporaryDirectory(prefix="anabranch-demo-") as folder:
        try:
            with _errors_to(log):
                spark = _start(master, parallelism, Path(folder))
        except Exception as error:
            reason = str(getattr(error, "java_exception", error)).splitlines()[0]
            raise AnabranchError(f"Spark could not be started: {reason}. See {log}.") from error
        try:
            with _messages_to(log):
                yield spark
        finally:
            spark.stop()


def _start(master: str, parallelism: int, folder: Path) -> SparkSession:
    from pyspark.sql import SparkSession

    from anabranch.engine.spark import python_daemon

    builder = (
        SparkSession.builder.master(master)
        .appName("anabranch-demo")
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .config("spark.log.level", "ERROR")
        # Over TCP every Python task waits some 40 ms for a delayed acknowledgement.
        .config("spark.python.unix.domain.socket.enabled", True)
        .config("spark.python.daemon.module", python_daemon.MODULE)
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", parallelism)
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.driver.extraJavaOptions", f'-Duser.timezone=UTC "-Dderby.system.home={folder}"')
    )
    if master.startswith("local"):
        # Tasks import this package, so they run in the Python that has it.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        builder = (
            builder.config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.local.dir", str(folder / "local"))
        )
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


@contextmanager
def _messages_to(path: Path) -> Iterator[None]:
    """Write what this package logs to a file: on the terminal it would run into the view."""
    ours = logging.getLogger("anabranch")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    former = ours.propagate
    ours.addHandler(handler)
    ours.propagate = False
    try:
        yield
    finally:
        ours.propagate = former
        ours.removeHandler(handler)
        handler.close()


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """Write the errors of processes started meanwhile to a file: they keep the descriptor that they inherit."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class StopRequest:
    """A request to end the run, which a signal handler may make."""

    def __init__(self) -> None:
        # Of all that can wake a waiting thread, this alone may be used in a signal handler.
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True
        self._asked.put(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the end is asked for, up to a limit; return whether it is."""
        if not self.is_asked:
            try:
                self._asked.get(timeout=timeout_s)
            except queue.Empty:
                return False
        return True


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM ask for the end, and the second insist on it.

    To be entered after Spark has started: its own handler cancels the jobs of the epoch that is running.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt
        stop.ask()

    former = [signal.signal(number, handle) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, former, strict=True):
            signal.signal(number, handler)


@contextmanager
def children_without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C, which a terminal sends to all that run in it, from processes and threads started meanwhile.

    State workers must outlive it until the last epoch is committed; they end when this process ends them.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
