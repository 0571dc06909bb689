"""Starts worker processes of this machine by forking one that has loaded all they need (``worker/server``)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from anabranch.core.errors import WorkerError
from anabranch.wire.descriptors import LOG_VARIABLE, receive, send

_SHOWN_LOG_BYTES = 2000
#: A fork server that has not done so much in that time is given up; another one takes its place when it is needed.
_BURY_TIMEOUT_S = 5.0
_COMMAND = (sys.executable, "-m", "anabranch.worker.server.fork_server")


class _KilledError(WorkerError):
    """The fork server was killed while it was asked for something."""


class ForkServer:
    """Forks processes for all queries of this driver, and ends with it, however it ends."""

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        #: What to run; the number of its end of a socket is added.
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log: IO[bytes] | None = None
        #: Processes that have ended and are not buried yet.
        self._ended: deque[int] = deque()

    def prepare(self) -> None:
        """Begin to load what will be needed, without waiting for it."""
        with self._lock:
            self._be_there()
        self._bury_ended()

    def start(self, options: Mapping[str, Any], timeout_s: float, log: Path | None = None) -> Child:
        """A new process. It ends when its standard input does. Without a name, its log goes with it."""
        try:
            return self._start(options, timeout_s, log)
        except _KilledError:
            # A process that it may have forked before has lost its input, and ends.
            return self._start(options, timeout_s, log)
        finally:
            self._bury_ended()

    def _start(self, options: Mapping[str, Any], timeout_s: float, path: Path | None) -> Child:
        with contextlib.ExitStack() as ours:
            stdin, keep = os.pipe()
            ours.callback(os.close, stdin)
            output, stdout = os.pipe()
            ours.callback(os.close, stdout)
            # Appended to, because it is one file for both sides, with one position.
            log: IO[bytes] = tempfile.TemporaryFile() if path is None else path.open("a+b")  # noqa: SIM115
            try:
                # The environment may have changed since the fork server began: credentials of a storage, for example.
                environment = {**os.environ, LOG_VARIABLE: "" if path is None else str(path)}
                request = {"start": options, "environment": environment}
                answer = self._ask(request, [stdin, stdout, log.fileno()], timeout_s)
                if "error" in answer:
                    raise WorkerError(f"A state worker could not be started: {answer['error']}.")
            except BaseException:
                os.close(keep)
                os.close(output)
                log.close()
                raise
        return Child(self, answer["pid"], keep, output, log, path)

    def bury(self, pid: int) -> None:
        """Forget a process that has ended; while another one is being started, that is left to whoever starts it."""
        self._ended.append(pid)
        self._bury_ended()

    def _bury_ended(self) -> None:
        # Who holds the lock comes here afterwards, so none is left.
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._bury(self._ended.popleft())
            finally:
                self._lock.release()

    def _bury(self, pid: int) -> None:
        """If the fork server has ended before the process, the system has done so."""
        if self._control is None or self._process is None or self._process.poll() is not None:
            return
        self._control.settimeout(_BURY_TIMEOUT_S)
        try:
            self._exchange({"bury": pid}, [])
        except (OSError, WorkerError):
            # It stands still, or is gone. What it still says must not be taken for the answer to something else.
            self._end()

    def close(self) -> None:
        """End. Processes that it has started go on."""
        with self._lock:
            self._end()

    def _ask(self, request: Mapping[str, Any], files: Sequence[int], timeout_s: float) -> dict[str, Any]:
        with self._lock:
            self._be_there()
            assert self._control is not None
            self._control.settimeout(timeout_s)
            try:
                return self._exchange(request, files)
            except TimeoutError:
                end = end_of(self._log)
                self._end()
                raise WorkerError(
                    f"A state worker did not start within {timeout_s:g} s. Raise anabranch.startTimeout if this "
                    f"machine is slow. Its log ends: {end}"
                ) from None
            except OSError as error:
                raise WorkerError(
                    f"A state worker failed to start: {error}. Its log ends: {end_of(self._log)}"
                ) from None

    def _exchange(self, request: Mapping[str, Any], files: Sequence[int]) -> dict[str, Any]:
        assert self._control is not None
        assert self._process is not None
        try:
            send(self._control, request, files)
            received = receive(self._control)
        except ConnectionError:
            received = None
        if received is None:
            error = _KilledError if self._process.wait() < 0 else WorkerError
            raise error(f"A state worker failed to start. Its log ends: {end_of(self._log)}")
        return received[0]

    def _be_there(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._control, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        with theirs:
            # What starts threads while it is loaded cannot be forked.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [*self._command, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=environment,
            )

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()
        self._process = self._control = self._log = None
        self._ended.clear()  # the system buries them now, and may give their numbers to others


class Child:
    """A process that a fork server has started. Its output is open as long as it lives."""

    def __init__(
        self, fork_server: ForkServer, pid: int, stdin: int, stdout: int, log: IO[bytes], log_path: Path | None = None
    ) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._lock = threading.Lock()
        self._stdin: int | None = stdin
        self._stdout = stdout
        self._log = log
        self._log_path = log_path
        self._said = b""
        self._has_ended = False

    def first_line(self, timeout_s: float | None) -> dict[str, Any]:
        """What it says when it is ready; TimeoutError if it says nothing, ValueError if it ends or says nonsense."""
        with self._lock:
            while not self._said.endswith(b"\n"):
                if not self._read(timeout_s):
                    raise TimeoutError
                if self._has_ended:
                    break
        said = json.loads(self._said)
        if not isinstance(said, dict):
            raise ValueError(f"It said {said!r}.")
        return said

    def has_ended(self) -> bool:
        """As far as is known without waiting for anybody who waits for it."""
        if self._lock.acquire(blocking=False):
            try:
                self._read(0)
            finally:
                self._lock.release()
        return self._has_ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, for so long at most; whether it has come."""
        with self._lock:
            while not self._has_ended and self._read(timeout_s):
                pass
            return self._has_ended

    def end_input(self) -> None:
        """Let it end by itself."""
        stdin, self._stdin = self._stdin, None
        if stdin is not None:
            os.close(stdin)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def bury(self) -> None:
        """Wait for its end, and let go of all that belongs to it."""
        self.wait()
        self.end_input()
        self._log.close()

    def end_of_log(self) -> str:
        return end_of(self._log)

    def about_log(self) -> str:
        """Where the log is, and how it ends: for the end of an error's text."""
        where = "" if self._log_path is None else f", {self._log_path},"
        return f"Its log{where} ends: {self.end_of_log()}"

    def _read(self, timeout_s: float | None) -> bool:
        """Look whether it has said something or has ended; False if neither happens in time."""
        if self._has_ended:
            return True
        poll = select.poll()  # unlike select, it takes any number of open files
        poll.register(self._stdout, select.POLLIN)
        if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
            return False
        part = os.read(self._stdout, 1 << 12)
        self._said += part
        if not part:
            self._has_ended = True
            os.close(self._stdout)
            self._fork_server.bury(self.pid)
        return True


def end_of(log: IO[bytes] | None) -> str:
    """The last lines of a log."""
    if log is None:
        return "(empty)"
    log.seek(0, 2)
    log.seek(max(0, log.tell() - _SHOWN_LOG_BYTES))
    return log.read().decode(errors="replace").strip() or "(empty)"


#: Shared by all queries of this process.
FORK_SERVER = ForkServer()
atexit.register(FORK_SERVER.close)
