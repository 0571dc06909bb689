"""The processes of a disturbed query: starting its drivers, telling its processes apart, and leaving none behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from anabranch.engine.spark import python_daemon as pythondaemon
from soak import crashpoints, failingstorage
from soak.places import Places

_ROOT = Path(__file__).resolve().parent.parent
#: In the environment of all processes of one query, which they hand down: tells whose they are.
_MARK = "SOAK_MARK"
#: The same for all that one driver has started, also if what has started it is gone.
_DRIVER_MARK = "SOAK_DRIVER"
#: What a fork server runs, and what is forked from it seems to run.
_NURSERY = "anabranch.worker.server.fork_server"
_LOWEST = 19
#: What Spark runs for a streaming source that is written in Python.
_SOURCE = "pyspark.sql.streaming.python_streaming_source_runner"
_LOOK_INTERVAL_S = 0.02
_REDIS_START_S = 20.0
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


class Driver:
    """A running driver and what it has started."""

    def __init__(
        self, places: Places, arguments: Sequence[str], environment: Mapping[str, str], crash: str | None = None
    ) -> None:
        self.places = places
        self.crash = crash
        command = [sys.executable, "-m", "soak.driver", str(places.root), *arguments]
        self._mark = uuid.uuid4().hex
        extra = {_DRIVER_MARK: self._mark} | ({} if crash is None else {crashpoints.VARIABLE: crash})
        with places.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=_ROOT, env={**environment, **extra}
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_ready(self) -> bool:
        return self.places.ready(self.pid).exists()

    def ended(self) -> int | None:
        return self.process.poll()

    def has_ended(self, *, within_s: float) -> bool:
        return wait_until(lambda: self.ended() is not None, within_s)

    def error(self) -> dict[str, str] | None:
        """Why the query ended, if it failed by itself."""
        path = self.places.error(self.pid)
        content: dict[str, str] | None = json.loads(path.read_text()) if path.exists() else None
        return content

    def family(self) -> list[psutil.Process]:
        """The driver's own process and all that it has started, the driver first."""
        return sorted(marked(_DRIVER_MARK, self._mark), key=lambda process: process.pid != self.pid)

    def workers(self) -> list[psutil.Process]:
        """Forked from a fork server, a child of the driver, which may be gone. Snapshots have the lowest priority."""
        forked = [process for process in self.family() if _runs(process, _NURSERY) and _parent(process) != self.pid]
        return [process for process in forked if _niceness(process) < _LOWEST]

    def nurseries(self) -> list[psutil.Process]:
        return [process for process in self.family() if _runs(process, _NURSERY) and _parent(process) == self.pid]

    def task_processes(self) -> list[psutil.Process]:
        """Spark's Python processes that run tasks: the daemon's children."""
        daemons = {process.pid for process in self.family() if _runs(process, pythondaemon.MODULE)}
        return [process for process in self.family() if _parent(process) in daemons]

    def source_processes(self) -> list[psutil.Process]:
        return [process for process in self.family() if _runs(process, _SOURCE)]

    def jvm(self) -> list[psutil.Process]:
        return [process for process in self.family() if _is_java(process)]


class Processes:
    """All processes of one query. Whatever is left of them in the end is killed."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "TZ": "UTC",
            _MARK: self._mark,
        }
        self._started: list[subprocess.Popen[bytes]] = []
        #: Where the Redis server of this query is; empty if it has none.
        self.redis_url = ""
        self._redis: subprocess.Popen[bytes] | None = None

    def let_storage_fail(self) -> None:
        """From now on, processes that are started have a storage that fails when it is told to."""
        paths = [str(failingstorage.SITE), str(_ROOT), self.environment.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.environment[failingstorage.VARIABLE] = str(self._places.storage)

    def start_driver(self, arguments: Sequence[str], crash: str | None = None) -> Driver:
        driver = Driver(self._places, arguments, self.environment, crash)
        self._started.append(driver.process)
        return driver

    def start_worker(self, name: str, store: str, *, port: int = 0, join: str = "") -> dict[str, Any]:
        """A state worker that no driver has started; what it says about itself."""
        command = [sys.executable, "-m", "anabranch", "worker", "--id", name, "--port", str(port), "--store", store]
        command += ["--redis-url", self.redis_url] if self.redis_url else []
        command += ["--join", join] if join else []
        with self._places.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=self.environment)
        self._started.append(process)
        assert process.stdout is not None
        ready: dict[str, Any] = json.loads(process.stdout.readline())
        process.stdout.close()
        return ready

    def start_redis(self) -> None:
        """A Redis server of the query's own, which saves nothing."""
        if shutil.which("redis-server") is None:
            raise FileNotFoundError("This scenario needs redis-server. Install it, or choose another --seed.")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with self._places.log.open("ab") as log:
            self._redis = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._places.root)
        if not wait_until(lambda: _listens(port), _REDIS_START_S):
            raise TimeoutError(f"redis-server did not start; see {self._places.log}.")
        self.redis_url = f"redis://127.0.0.1:{port}/0"

    def left(self) -> list[psutil.Process]:
        """Everything that carries the mark of this query."""
        return marked(_MARK, self._mark)

    def end(self) -> None:
        for process in self.left():
            with suppress(*_GONE):
                process.kill()
        for started in self._started:
            started.wait()
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def marked(variable: str, mark: str) -> list[psutil.Process]:
    """All living processes with this in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(*_GONE, OSError):
            if process.environ().get(variable) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except _GONE:
        return False


def send(process: psutil.Process, number: int) -> bool:
    """False if the process is gone."""
    try:
        process.send_signal(number)
    except _GONE:
        return False
    return True


def wait_until(condition: Callable[[], Any], timeout_s: float) -> bool:
    """Whether the condition has come true in time."""
    end_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end_s:
            return False
        pause.wait(_LOOK_INTERVAL_S)
    return True


def _runs(process: psutil.Process, word: str) -> bool:
    try:
        return word in process.cmdline()
    except _GONE:
        return False


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except _GONE:
        return 0


def _niceness(process: psutil.Process) -> int:
    try:
        return int(process.nice())
    except _GONE:
        return _LOWEST


def _is_java(process: psutil.Process) -> bool:
    try:
        return bool(process.name() == "java")
    except _GONE:
        return False
