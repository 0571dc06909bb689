"""State workers as child processes of the driver: started with the query, and gone with it, however it ends."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
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

    def __init__(self, *, store: str, state_path: str, token: str, start_timeout_s: float) -> None:
        self._store = store
        self._state_path = state_path
        self._token = token
        self._start_timeout_s = start_timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []

    def start(self, count: int) -> list[WorkerAddress]:
        """Start workers side by side and wait until all are ready."""
        launched = [self._launch(WorkerId(f"worker-{number}")) for number in range(1, count + 1)]
        try:
            with ThreadPoolExecutor(max_workers=count) as pool:
                return list(pool.map(lambda pair: self._wait_until_ready(*pair), launched))
        except WorkerError:
            self.stop()
            raise

    def stop(self) -> None:
        """End all workers, gently first."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.warning("state worker %d does not stop; killing it", process.pid)
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()
        self._processes, self._logs = [], []

    def _launch(self, worker: WorkerId) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        command = [sys.executable, "-m", "anabranch", "worker", "--id", worker, "--port", "0", "--store", self._store]
        command += ["--exit-with-parent"]
        if self._state_path:
            command += ["--state-path", str(Path(self._state_path).absolute())]
        log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        # The token goes through the environment: command lines can be read by every user of the machine.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self._environment()
        )
        self._processes.append(process)
        self._logs.append(log)
        return process, log

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "ANABRANCH_TOKEN": self._token, "OMP_NUM_THREADS": "1"}

    def _wait_until_ready(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> WorkerAddress:
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


def _end_of(log: IO[bytes]) -> str:
    log.seek(0, 2)
    log.seek(max(0, log.tell() - _SHOWN_LOG_BYTES))
    return log.read().decode(errors="replace").strip() or "(empty)"
