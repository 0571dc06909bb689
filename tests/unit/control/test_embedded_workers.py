"""Workers as child processes: ready when start returns, gone after stop, with an error that shows the log."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from anabranch.control.membership import fork_server as nursery_module
from anabranch.control.membership import launcher
from anabranch.control.membership.fork_server import Child, ForkServer
from anabranch.control.membership.launcher import EmbeddedWorkers, WorkerAddress
from anabranch.core.errors import WorkerError
from anabranch.core.ids import WorkerId
from anabranch.core.requests import Health
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of workers that fail are left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


def make(**options: Any) -> EmbeddedWorkers:
    defaults: dict[str, Any] = {"store": "memory", "state_path": "", "credentials": Credentials("t")}
    return EmbeddedWorkers(**{**defaults, "start_timeout_s": 60.0, **options})


class MarkedForkServer(ForkServer):
    """A fork server whose process can be told from others of this machine."""

    def __init__(self, *arguments: str) -> None:
        self._mark = f"-Xtest={uuid.uuid4().hex}"
        super().__init__([sys.executable, self._mark, *(arguments or ("-m", "anabranch.worker.server.fork_server"))])

    def processes(self) -> list[psutil.Process]:
        """The process that forks: one, or none."""
        children = psutil.Process().children()
        return [child for child in children if child.is_running() and self._mark in command_of(child)]

    @property
    def process(self) -> psutil.Process:
        (process,) = self.processes()
        return process

    def children(self) -> list[psutil.Process]:
        return list(self.process.children())


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def scripted(program: str) -> MarkedForkServer:
    """Starts another program in place of the worker."""
    serving = "import socket, sys; from anabranch.worker.server.fork_server import serve; "
    serving += f"serve(socket.socket(fileno=int(sys.argv[1])), lambda options: exec({program!r}))"
    return MarkedForkServer("-c", serving)


class SlowForkServer(MarkedForkServer):
    """Starts a worker, and hands it over when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.has_started = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()

    def start(self, options: Mapping[str, Any], timeout_s: float, log: Path | None = None) -> Child:
        child = super().start(options, timeout_s, log)
        self.has_started.set()
        assert self.may_return.wait(60)
        return child


def kill(workers: EmbeddedWorkers, worker: WorkerAddress) -> None:
    """End a worker, and see that this is noticed."""
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: workers.exited() == {worker.worker}, "the end of the worker is noticed")


def test_workers_are_ready_when_they_are_started_and_gone_when_they_are_stopped(tmp_path: Path) -> None:
    workers = make(store="rocksdb", state_path=str(tmp_path / "state"), credentials=Credentials("secret"))
    started = workers.start(2)
    try:
        assert [worker.worker for worker in started] == ["worker-1", "worker-2"]
        for worker in started:
            client = WorkerClient(worker.address, timeout_s=20, credentials=Credentials("secret"))
            health = client.call(Health())
            client.close()
            assert (health.worker, health.pid, health.store) == (worker.worker, worker.pid, "rocksdb")
            assert "secret" not in " ".join(psutil.Process(worker.pid).cmdline())
        assert len(list((tmp_path / "state").iterdir())) == 2
    finally:
        workers.stop()
    assert not any(psutil.pid_exists(worker.pid) for worker in started)
    assert list((tmp_path / "state").iterdir()) == []
    workers.stop()


def test_a_worker_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    fork_server = scripted(
        "from anabranch.core.errors import WorkerError; raise WorkerError('no room on this machine')"
    )
    workers = make(fork_server=fork_server, log_path=str(tmp_path))
    with pytest.raises(WorkerError, match=r"failed to start\. Its log, .*, ends: Error: no room on this mac") as caught:
        workers.start(2)
    assert fork_server.children() == []
    workers.stop()
    # What the error names is there, for those who want to see all of it.
    (named,) = re.findall(r"Its log, (.*), ends: ", str(caught.value))
    assert Path(named).read_text() == "Error: no room on this machine\n"
    assert Path(named).is_relative_to(tmp_path)
    fork_server.close()


READY = """print('{"worker": "worker-1", "address": "a:1", "pid": 0}', flush=True)"""


@pytest.mark.parametrize(
    ("written", "is_kept"),
    [
        ("", False),
        ("12:00 WARNING peers LostWorkerError: it is tried again", False),
        ("12:00 ERROR service a request failed", True),
        ("Traceback (most recent call last)", True),
        ("Error: no room", True),
    ],
)
def test_the_logs_of_workers_are_kept_if_they_say_what_failed(tmp_path: Path, written: str, is_kept: bool) -> None:
    program = f"import sys; sys.stderr.write('{written}\\n'); {READY}; sys.stdin.read()"
    fork_server = scripted(program if written else f"import sys; {READY}; sys.stdin.read()")
    workers = make(fork_server=fork_server, log_path=str(tmp_path))
    workers.start(1)
    (log,) = tmp_path.rglob("*.log")
    assert log.name == "worker-1.log"
    workers.stop()
    assert log.exists() == is_kept
    assert bool(list(tmp_path.iterdir())) == is_kept
    fork_server.close()


def test_the_log_of_a_worker_that_is_lost_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = "import sys; sys.stderr.write('short of memory'); sys.stderr.flush()"
    fork_server = scripted(f"{program}; {READY}; sys.stdin.read()")
    workers = make(fork_server=fork_server, log_path=str(tmp_path))
    workers.start(1)
    (log,) = tmp_path.rglob("*.log")
    workers.kill(WorkerId("worker-1"))
    workers.stop()
    assert f"the log of the state worker worker-1, which is gone, is {log}" in caplog.text
    assert log.read_text() == "short of memory"
    fork_server.close()


def test_a_worker_knows_where_its_log_is(tmp_path: Path) -> None:
    """So that what it answers can name it."""
    name = nursery_module.LOG_VARIABLE
    program = f"import os, sys; sys.stderr.write(os.environ[{name!r}]); sys.stderr.flush()"
    fork_server = scripted(f"{program}; {READY}; sys.stdin.read()")
    workers = make(fork_server=fork_server, log_path=str(tmp_path))
    workers.start(1)
    (log,) = tmp_path.rglob("*.log")
    assert log.read_text() == str(log)
    workers.stop()
    fork_server.close()


def test_a_worker_that_says_nothing_in_time_is_killed() -> None:
    fork_server = scripted("import sys, threading; sys.stderr.write('still loading'); threading.Event().wait(60)")
    other = fork_server.start({}, 60)  # so that only the worker itself is waited for
    with pytest.raises(WorkerError, match=r"did not start within 1 s. Raise anabranch\.startTimeout.*still loading"):
        make(fork_server=fork_server, start_timeout_s=1.0).start(1)
    assert [child.pid for child in fork_server.children()] == [other.pid]
    other.send_signal(signal.SIGKILL)
    other.bury()
    fork_server.close()


def test_a_worker_that_does_not_stop_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "_STOP_TIMEOUT_S", 0.2)
    ready = '{"worker": "w", "address": "a:1", "pid": 0}'
    fork_server = scripted(f"import threading; print('{ready}', flush=True); threading.Event().wait(60)")
    workers = make(fork_server=fork_server)
    assert workers.start(1)[0].address == "a:1"
    workers.stop()
    assert fork_server.children() == []
    assert "does not stop; killing it" in caplog.text
    fork_server.close()


def test_only_the_end_of_a_long_log_is_shown() -> None:
    fork_server = scripted(
        "import os, sys; sys.stderr.write('start' + 'x' * 9000 + 'the end'); sys.stderr.flush(); os._exit(1)"
    )
    with pytest.raises(WorkerError) as caught:
        make(fork_server=fork_server).start(1)
    assert str(caught.value).endswith("the end")
    assert "start" not in str(caught.value).split(", ends: ")[1]
    assert len(str(caught.value)) < 2400
    fork_server.close()


def test_a_nursery_that_cannot_start_shows_its_log() -> None:
    fork_server = ForkServer([sys.executable, "-c", "import sys; sys.exit('no such package')"])
    with pytest.raises(WorkerError, match="no such package"):
        make(fork_server=fork_server).start(1)
    fork_server.close()


def test_a_nursery_that_does_not_answer_is_given_up() -> None:
    fork_server = MarkedForkServer("-c", "import threading; threading.Event().wait(60)")
    with pytest.raises(WorkerError, match=r"did not start within 1 s"):
        make(fork_server=fork_server, start_timeout_s=1.0).start(1)
    assert fork_server.processes() == []


def test_workers_outlive_their_nursery_and_new_ones_get_another() -> None:
    fork_server = MarkedForkServer()
    workers = make(fork_server=fork_server)
    try:
        (first,) = workers.start(1)
        fork_server.process.kill()
        wait_until(lambda: not fork_server.processes(), "the fork server has ended")
        assert workers.exited() == frozenset()
        (second,) = workers.start(1)
        kill(workers, first)
        assert psutil.pid_exists(second.pid)
    finally:
        workers.stop()
    assert not psutil.pid_exists(second.pid)
    fork_server.close()


def test_a_nursery_that_is_killed_while_it_is_asked_gets_a_successor(tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    killed = f"import os, signal, socket, sys; from pathlib import Path; first = Path({str(tmp_path / 'first')!r})\n"
    killed += "if first.exists():\n    socket.socket(fileno=int(sys.argv[1])).recv(1); first.unlink()\n"
    killed += "    os.kill(os.getpid(), signal.SIGKILL)\n"
    killed += "import runpy; runpy.run_module('anabranch.worker.server.fork_server', run_name='__main__')"
    fork_server = MarkedForkServer("-c", killed)
    workers = make(fork_server=fork_server)
    try:
        (worker,) = workers.start(1)
        assert [child.pid for child in fork_server.children()] == [worker.pid]
    finally:
        workers.stop()
    fork_server.close()


def test_a_worker_ends_with_the_driver_even_when_that_is_killed() -> None:
    program = "import threading; from anabranch.control.membership.launcher import Credentials, EmbeddedWorkers; "
    program += (
        "workers = EmbeddedWorkers(store='memory', state_path='', credentials=Credentials(), start_timeout_s=60); "
    )
    program += "print(workers.start(1)[0].pid, flush=True); threading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        worker = psutil.Process(int(driver.stdout.readline()))
        fork_server = worker.parent()
        driver.kill()
    gone, alive = psutil.wait_procs([worker, fork_server], timeout=20)
    assert alive == []
    assert len(gone) == 2


def test_a_nursery_has_one_thread_so_that_it_can_be_forked() -> None:
    """Only jemalloc, which knows what to do about forks, has another one."""
    fork_server = MarkedForkServer()
    child = fork_server.start({"nonsense": 1}, 60)
    threads = Path(f"/proc/{fork_server.process.pid}/task").glob("*/comm")
    assert len([name for name in (thread.read_text() for thread in threads) if "jemalloc" not in name]) == 1
    child.bury()
    fork_server.close()


def test_a_worker_has_the_environment_of_the_driver_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server = scripted(
        "import json, os; print(json.dumps({'value': os.environ.get('SECRET_OF_A_STORE')}), flush=True)"
    )
    first = fork_server.start({}, 60)
    assert first.first_line(60) == {"value": None}
    monkeypatch.setenv("SECRET_OF_A_STORE", "x" * 300_000)
    second = fork_server.start({}, 60)
    assert second.first_line(60) == {"value": "x" * 300_000}
    for child in (first, second):
        child.bury()
    fork_server.close()


def test_a_nursery_that_stands_still_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery_module, "_BURY_TIMEOUT_S", 0.2)
    fork_server = MarkedForkServer()
    workers = make(fork_server=fork_server)
    try:
        (first,) = workers.start(1)
        fork_server.process.suspend()
        kill(workers, first)
        (second,) = workers.start(1)
        assert psutil.pid_exists(second.pid)
    finally:
        workers.stop()
    fork_server.close()


def test_a_lost_worker_is_found_while_another_one_starts() -> None:
    fork_server = SlowForkServer()
    workers = make(fork_server=fork_server)
    try:
        (first,) = workers.start(1)
        fork_server.has_started.clear()
        fork_server.may_return.clear()
        with ThreadPoolExecutor() as pool:
            starting = pool.submit(workers.start, 1)
            try:
                assert fork_server.has_started.wait(60)
                os.kill(first.pid, signal.SIGKILL)
                wait_until(lambda: pool.submit(workers.exited).result(10) == {first.worker}, "the loss is noticed")
            finally:
                fork_server.may_return.set()
            assert [worker.worker for worker in starting.result(60)] == ["worker-2"]
    finally:
        workers.stop()
    fork_server.close()


def test_a_worker_that_starts_while_all_are_stopped_is_killed() -> None:
    fork_server = SlowForkServer()
    workers = make(fork_server=fork_server)
    fork_server.may_return.clear()
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(workers.start, 1)
        try:
            assert fork_server.has_started.wait(60)
            pool.submit(workers.stop).result(10)
            assert len(fork_server.children()) == 1
        finally:
            fork_server.may_return.set()
        with pytest.raises(WorkerError, match="is being stopped, and starts no more workers"):
            starting.result(60)
    assert fork_server.children() == []
    fork_server.close()


def test_a_worker_that_is_waited_for_while_all_are_stopped_is_not_taken_for_broken(tmp_path: Path) -> None:
    waiting = tmp_path / "waiting"
    fork_server = scripted(f"import pathlib, sys; pathlib.Path({str(waiting)!r}).touch(); sys.stdin.read()")
    workers = make(fork_server=fork_server)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(workers.start, 1)
        wait_until(lambda: waiting.exists() or starting.done(), "the worker runs, and is waited for")
        pool.submit(workers.stop).result(30)
        with pytest.raises(WorkerError, match="is being stopped, and starts no more workers"):
            starting.result(60)
    assert fork_server.children() == []
    fork_server.close()


def test_a_nursery_that_starts_a_worker_does_not_hide_that_another_one_has_ended() -> None:
    fork_server = scripted("import sys; sys.stdin.read()")
    first = fork_server.start({}, 60)
    second = fork_server.start({}, 60)  # by now the nursery has closed what is the first one's
    process = fork_server.process
    process.suspend()
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(fork_server.start, {}, 60)
        try:
            # So long that it has asked the fork server, which does not answer.
            with pytest.raises(TimeoutError):
                starting.result(0.3)
            first.send_signal(signal.SIGKILL)
            assert pool.submit(first.wait, 10).result(20)
            assert first.has_ended()
            assert not starting.done()
        finally:
            process.resume()
        third = starting.result(60)
    assert [child.pid for child in fork_server.children()] == [second.pid, third.pid]
    for child in (first, second, third):
        child.end_input()
        child.bury()
    assert fork_server.children() == []
    fork_server.close()
