"""State workers as child processes of the driver: started with the query, and gone with it, however it ends."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from anabranch.core.errors import WorkerError
from anabranch.core.ids import WorkerId

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_SHOWN_LOG_BYTES = 2000


@dataclass(frozen=True)
class WorkerAddress:
    """A running worker."""

    worker: WorkerId
    address: str
    pid: int


class EmbeddedWorkers:
    """Worker processes on this machine. Each ends when its standard input does, so a killed driver leaves none."""

    def __init__(self, *, store: str, state_path: str, token: str, start_timeout_s: float, redis_url: str = "") -> None:
        self._store = store
        self._redis_url = redis_url
        self._state_path = state_path
        self._token = token
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._processes: dict[WorkerId, subprocess.Popen[bytes]] = {}
        self._logs: dict[WorkerId, IO[bytes]] = {}
        self._started = 0
        self._stopped = False

    def start(self, count: int) -> list[WorkerAddress]:
        """Start workers side by side and wait until all are ready; all of them, or none."""
        launched: list[WorkerId] = []
        try:
            launched.extend(self._launch() for _ in range(count))
            with ThreadPoolExecutor(max_workers=count) as pool:
                return list(pool.map(self._wait_until_ready, launched))
        except WorkerError:
            for worker in launched:
                self.kill(worker)
            raise

    def exited(self) -> frozenset[WorkerId]:
        """The workers whose processes have ended by themselves."""
        with self._lock:
            return frozenset(worker for worker, process in self._processes.items() if process.poll() is not None)

    def kill(self, worker: WorkerId) -> None:
        """Make sure that a worker is gone. One that was started elsewhere is left alone."""
        with self._lock:
            process, log = self._processes.pop(worker, None), self._logs.pop(worker, None)
        if process is not None and log is not None:
            process.kill()
            _bury(process, log)

    def retire(self, worker: WorkerId) -> None:
        """Let a worker go that has nothing left. One that was started elsewhere is left alone."""
        with self._lock:
            process, log = self._processes.pop(worker, None), self._logs.pop(worker, None)
        if process is not None and log is not None:
            process.terminate()
            threading.Thread(target=_bury, args=(process, log), daemon=True).start()

    def stop(self) -> None:
        """End all workers, gently first. None is started any more."""
        with self._lock:
            self._stopped = True
            processes, logs = self._processes, self._logs
            self._processes, self._logs = {}, {}
        for process in processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for worker, process in processes.items():
            try:
                process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.warning("state worker %d does not stop; killing it", process.pid)
                process.kill()
            _bury(process, logs[worker])

    def _launch(self) -> WorkerId:
        with self._lock:
            if self._stopped:
                raise WorkerError("The query is being stopped, and starts no more workers. Start it again.")
            self._started += 1
            worker = WorkerId(f"worker-{self._started}")
            command = [sys.executable, "-m", "anabranch", "worker", "--id", worker, "--port", "0"]
            command += ["--store", self._store, "--exit-with-parent"]
            if self._state_path:
                command += ["--state-path", str(Path(self._state_path).absolute())]
            log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
            # The token goes through the environment: command lines can be read by every user of the machine.
            self._processes[worker] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self._environment()
            )
            self._logs[worker] = log
        return worker

    def _environment(self) -> dict[str, str]:
        secrets = {"ANABRANCH_TOKEN": self._token, "ANABRANCH_REDIS_URL": self._redis_url}
        return {**os.environ, **{name: value for name, value in secrets.items() if value}, "OMP_NUM_THREADS": "1"}

    def _wait_until_ready(self, worker: WorkerId) -> WorkerAddress:
        process, log = self._processes[worker], self._logs[worker]
        assert process.stdout is not None
        with ThreadPoolExecutor(max_workers=1) as reader:
            line = reader.submit(process.stdout.readline)
            try:
                ready = json.loads(line.result(timeout=self._start_timeout_s))
                return WorkerAddress(WorkerId(ready["worker"]), ready["address"], ready["pid"])
            except TimeoutError:
                process.kill()
                raise WorkerError(
                    f"A state worker did not start within {self._start_timeout_s:g} s. Raise anabranch.startTimeout "
                    f"if this machine is slow. Its log ends: {_end_of(log)}"
                ) from None
            except (ValueError, KeyError):
                process.wait()
                raise WorkerError(f"A state worker failed to start. Its log ends: {_end_of(log)}") from None


def _bury(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    process.wait()
    for stream in (process.stdin, process.stdout, log):
        if stream is not None:
            stream.close()


def _end_of(log: IO[bytes]) -> str:
    log.seek(0, 2)
    log.seek(max(0, log.tell() - _SHOWN_LOG_BYTES))
    return log.read().decode(errors="replace").strip() or "(empty)"
