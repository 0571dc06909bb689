"""State workers as child processes of the driver: started with the query, and gone with it, however it ends."""

from __future__ import annotations

import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from anabranch.control.membership.fork_server import FORK_SERVER, Child, ForkServer
from anabranch.control.membership.worker_logs import WorkerLogs
from anabranch.core.errors import WorkerError
from anabranch.core.ids import WorkerId
from anabranch.wire.credentials import Credentials

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0


def prepare() -> None:
    """Workers will soon be started: whatever can be done for it meanwhile begins."""
    FORK_SERVER.prepare()


@dataclass(frozen=True)
class WorkerAddress:
    """A running worker."""

    worker: WorkerId
    address: str
    pid: int


class EmbeddedWorkers:
    """Worker processes on this machine. Each ends when its standard input does, so a killed driver leaves none."""

    def __init__(
        self,
        *,
        store: str,
        state_path: str,
        credentials: Credentials,
        start_timeout_s: float,
        redis_url: str = "",
        log_path: str = "",
        fork_server: ForkServer = FORK_SERVER,
    ) -> None:
        self._store = store
        self._redis_url = redis_url
        self._state_path = state_path
        self._credentials = credentials
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._fork_server = fork_server
        self._logs = WorkerLogs(log_path)
        self._processes: dict[WorkerId, Child] = {}
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
            processes = dict(self._processes)
        return frozenset(worker for worker, process in processes.items() if process.has_ended())

    def kill(self, worker: WorkerId) -> None:
        """Make sure that a worker is gone. One that was started elsewhere is left alone."""
        with self._lock:
            process = self._processes.pop(worker, None)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.bury()
            self._logs.note_lost(worker)

    def retire(self, worker: WorkerId) -> None:
        """Let a worker go that has nothing left. One that was started elsewhere is left alone."""
        with self._lock:
            process = self._processes.pop(worker, None)
        if process is not None:
            process.send_signal(signal.SIGTERM)
            threading.Thread(target=process.bury, daemon=True).start()

    def stop(self) -> None:
        """End all workers, gently first. None is started any more."""
        with self._lock:
            self._stopped = True
            processes, self._processes = self._processes, {}
        for process in processes.values():
            process.end_input()
        for worker, process in processes.items():
            if not process.wait(_STOP_TIMEOUT_S):
                logger.warning("state worker %d does not stop; killing it", process.pid)
                process.send_signal(signal.SIGKILL)
                self._logs.note_lost(worker)
            process.bury()
        self._logs.close()

    def _launch(self) -> WorkerId:
        with self._lock:
            self._refuse_if_stopped()
            self._started += 1
            worker = WorkerId(f"worker-{self._started}")
            log = self._logs.path_of(worker)
        options = {
            "host": "127.0.0.1",
            "port": 0,
            "store": self._store,
            "redis_url": self._redis_url,
            "state_path": str(Path(self._state_path).absolute()) if self._state_path else None,
            "credentials": asdict(self._credentials),
            "worker_id": worker,
            "exit_with_parent": True,
        }
        # This may take long, and who asks for lost workers must not wait for it.
        process = self._fork_server.start(options, self._start_timeout_s, log)
        try:
            with self._lock:
                self._refuse_if_stopped()
                self._processes[worker] = process
        except WorkerError:
            process.send_signal(signal.SIGKILL)
            process.bury()
            raise
        return worker

    def _wait_until_ready(self, worker: WorkerId) -> WorkerAddress:
        with self._lock:
            self._refuse_if_stopped()
            process = self._processes[worker]
        try:
            ready = process.first_line(self._start_timeout_s)
            return WorkerAddress(WorkerId(ready["worker"]), ready["address"], ready["pid"])
        except TimeoutError:
            raise WorkerError(
                f"A state worker did not start within {self._start_timeout_s:g} s. Raise anabranch.startTimeout if "
                f"this machine is slow. {process.about_log()}"
            ) from None
        except (ValueError, KeyError):
            self._refuse_if_stopped()  # then it has ended for that reason, and its log is closed
            raise WorkerError(f"A state worker failed to start. {process.about_log()}") from None

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise WorkerError("The query is being stopped, and starts no more workers. Start it again.")
