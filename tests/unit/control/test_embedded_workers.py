"""Workers as child processes: ready when start returns, gone after stop, with an error that shows the log."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from anabranch.control import launcher
from anabranch.control.launcher import EmbeddedWorkers
from anabranch.core.errors import WorkerError
from anabranch.wire.client import WorkerClient
from anabranch.wire.messages import Health


def make(**options: Any) -> EmbeddedWorkers:
    return EmbeddedWorkers(**{"store": "memory", "state_path": "", "token": "", "start_timeout_s": 60.0, **options})


def scripted(monkeypatch: pytest.MonkeyPatch, program: str) -> list[int]:
    """Start another program in place of the worker; the list gets its pids."""
    pids: list[int] = []
    popen = subprocess.Popen

    def start(_command: Any, **options: Any) -> Any:
        process = popen([sys.executable, "-c", program], **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    return pids


def test_workers_are_ready_when_they_are_started_and_gone_when_they_are_stopped(tmp_path: Path) -> None:
    workers = make(store="rocksdb", state_path=str(tmp_path / "state"), token="secret")
    started = workers.start(2)
    try:
        assert [worker.worker for worker in started] == ["worker-1", "worker-2"]
        for worker in started:
            client = WorkerClient(worker.address, timeout_s=20, token="secret")
            health, _ = client.call(Health())
            client.close()
            assert (health["worker"], health["pid"], health["store"]) == (worker.worker, worker.pid, "rocksdb")
            assert "secret" not in " ".join(psutil.Process(worker.pid).cmdline())
        assert len(list((tmp_path / "state").iterdir())) == 2
    finally:
        workers.stop()
    assert not any(psutil.pid_exists(worker.pid) for worker in started)
    assert list((tmp_path / "state").iterdir()) == []
    workers.stop()


def test_a_worker_that_ends_at_once_shows_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = scripted(monkeypatch, "import sys; sys.exit('no room on this machine')")
    with pytest.raises(WorkerError, match=r"failed to start\. Its log ends: no room on this machine"):
        make().start(2)
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_says_nothing_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, threading; sys.stderr.write('still loading'); sys.stderr.flush(); threading.Event().wait(60)"
    pids = scripted(monkeypatch, program)
    with pytest.raises(WorkerError, match=r"did not start within 1 s. Raise anabranch\.startTimeout.*still loading"):
        make(start_timeout_s=1.0).start(1)
    assert not psutil.pid_exists(pids[0])


def test_a_worker_that_does_not_stop_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "_STOP_TIMEOUT_S", 0.2)
    ready = '{"worker": "w", "address": "a:1", "pid": 0}'
    pids = scripted(monkeypatch, f"import threading; print('{ready}', flush=True); threading.Event().wait(60)")
    workers = make()
    assert workers.start(1)[0].address == "a:1"
    workers.stop()
    assert not psutil.pid_exists(pids[0])
    assert "does not stop; killing it" in caplog.text


def test_only_the_end_of_a_long_log_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "import sys; sys.stderr.write('start' + 'x' * 9000 + 'the end'); sys.exit(1)")
    with pytest.raises(WorkerError) as caught:
        make().start(1)
    assert str(caught.value).endswith("the end")
    assert "start" not in str(caught.value).split("Its log ends")[1]
    assert len(str(caught.value)) < 2200
