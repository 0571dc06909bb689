"""The commands about a running job: what they ask of the real HTTP API, and what they say to people and programs."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace

from anabranch import cli
from anabranch.cli import jobs as cli_control
from anabranch.cli.job_api import JobApi
from anabranch.control.http.server import ControlServer
from anabranch.core.errors import EpochError, LostWorkerError
from anabranch.core.membership_events import RescaleState
from anabranch.core.reports import JobReport, as_json
from anabranch.wire.credentials import Credentials
from support.http_job import MemoryJob
from support.sentences import says

Run = Callable[..., tuple[int, str, str]]

#: How people are told which job it is.
JOB = "Job job-1 with the checkpoint /checkpoints/one"


@pytest.fixture
def job() -> MemoryJob:
    return MemoryJob()


@pytest.fixture
def server(job: MemoryJob) -> Iterator[ControlServer]:
    server = ControlServer(job, host="127.0.0.1", port=0, credentials=Credentials(""), strict_port=True)
    yield server
    server.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: ControlServer) -> Run:
    """Runs a command line against the server, and gives its exit code, standard output and standard error."""
    app = typer.Typer(pretty_exceptions_enable=False)
    for command in (
        cli_control.status,
        cli_control.scale,
        cli_control.drain,
        cli_control.workers,
        cli_control.stop,
        cli_control.token,
    ):
        app.command()(command)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setenv("ANABRANCH_URL", server.url)
    monkeypatch.setattr(cli_control, "_LOOK_INTERVAL_S", 0.01)
    monkeypatch.delenv("ANABRANCH_TOKEN", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["anabranch", *arguments])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_status_shows_job_stages_and_workers(run: Run) -> None:
    code, out, err = run("status")
    assert (code, err) == (0, "")
    assert f"{JOB}: epoch 41 is committed, 2 workers, route version 0." in out
    assert [word in out for word in ("clicks", "sessions", "worker-2", "127.0.0.1:7001", "1,234,567", "89.0 MB")] == (
        [True] * 6
    )
    assert "rescale" not in out.lower()


def test_status_shows_what_is_under_way(run: Run, job: MemoryJob) -> None:
    job.rescale(4, None, None)
    _, out, _ = run("status")
    assert "Last rescale" in out
    assert "rescale to 4 workers" in out
    assert "Migrations under way" in out


def test_status_for_programs_is_what_the_api_says(run: Run, job: MemoryJob) -> None:
    _, out, _ = run("status", "--json")
    document = {"job": job.job(), "stages": job.stages(), "workers": job.workers(), "migrations": []}
    assert json.loads(out) == as_json(document)


def test_workers_are_listed(run: Run, job: MemoryJob) -> None:
    job.drain("worker-2")
    _, out, _ = run("workers")
    assert [line.split()[2] for line in out.splitlines() if line.strip().startswith("worker-")] == [
        "serving",
        "draining",
    ]
    assert json.loads(run("workers", "--json")[1]) == as_json(job.workers())


def test_a_job_that_has_a_name_is_called_by_it(run: Run, job: MemoryJob, monkeypatch: Any) -> None:
    report = replace(job.job(), name="click counts")
    monkeypatch.setattr(job, "job", lambda: report)
    code, out, _ = run("scale")
    assert (code, out.splitlines()[0]) == (0, "Job job-1 'click counts' with the checkpoint /checkpoints/one:")


def test_scale_alone_leaves_it_to_the_job_what_one_more_is(run: Run, job: MemoryJob) -> None:
    assert [run("scale")[0], run("scale")[0]] == [0, 0]
    assert [asked for asked in job.asked if asked[0] == "scale_out"] == [("scale_out", None)] * 2
    assert len(job.workers()) == 4


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["--workers", "4"], ("rescale", 4, None, None)),
        (["--parallelism", "8"], ("rescale", None, 8, None)),
        (["--workers", "4", "--parallelism", "8", "--stage", "3"], ("rescale", 4, 8, 3)),
        (["--parallelism", "8", "--stage", "clicks"], ("rescale", None, 8, "clicks")),
        (["--stage", "3"], ("scale_out", 3)),
        (["--stage", "sessions"], ("scale_out", "sessions")),
    ],
)
def test_scale_asks_for_what_it_is_told(
    run: Run, job: MemoryJob, arguments: list[str], asked: tuple[object, ...]
) -> None:
    code, out, _ = run("scale", *arguments, "--json")
    assert code == 0
    assert job.asked[0] == asked
    assert json.loads(out)["state"] == "migrating"


def test_scale_waits_if_it_is_told(run: Run) -> None:
    code, out, _ = run("scale", "--workers", "4", "--wait", "--json")
    assert code == 0
    assert json.loads(out) | {"state": "done", "groupsPending": 0} == json.loads(out)


def test_waiting_ends_when_another_rescale_takes_over(run: Run, job: MemoryJob, monkeypatch: Any) -> None:
    looks = job.job

    def meanwhile() -> JobReport:
        if job.asked:
            job.rescale(3, None, None)
        return looks()

    monkeypatch.setattr(job, "job", meanwhile)
    code, _, err = run("scale", "--workers", "4", "--wait")
    assert code == 1
    assert "Another rescale was asked for after rescale 0" in err


@pytest.mark.parametrize(("state", "verb"), [("failed", "failed"), ("replaced", "was replaced")])
def test_a_rescale_that_does_not_happen_is_an_error(
    run: Run, job: MemoryJob, monkeypatch: Any, state: str, verb: str
) -> None:
    waiting = replace(MemoryJob().rescale(4, None, None), number=7, state=RescaleState.WAITING)
    over = replace(waiting, state=RescaleState(state), message="No worker could be started. See the log.")
    document = replace(job.job(), rescale=over)
    monkeypatch.setattr(job, "job", lambda: document)
    monkeypatch.setattr(job, "rescale", lambda **_: waiting)
    code, _, err = run("scale", "--workers", "4", "--wait")
    assert (code, err) == (1, f"Error: Rescale 7 {verb}: No worker could be started. See the log.\n")


def test_drain_empties_a_worker(run: Run, job: MemoryJob) -> None:
    code, out, _ = run("drain", "worker-2", "--wait")
    assert (code, out.splitlines()[0]) == (0, f"{JOB}:")
    assert "drain worker-2" in out
    assert job.workers()[1].key_groups == 0


def test_an_error_of_the_job_is_one_sentence(run: Run, job: MemoryJob) -> None:
    assert run("drain", "a b/ü?")[0] == 1
    code, out, err = run("drain", "worker-9")
    assert (code, out) == (1, "")
    assert err == "Error: There is no worker 'worker-9'. Workers: worker-1, worker-2.\n"
    for fault in (EpochError("Start again."), LostWorkerError("Start it.")):
        job.fault = fault
        assert run("scale", "--workers", "3") == (1, "", f"Error: {fault}\n")


def test_stop_stops_the_job(run: Run, job: MemoryJob) -> None:
    code, out, _ = run("stop")
    assert (code, out) == (0, f"{JOB}: stops after the epoch that is running.\n")
    assert job.stopped.wait(10)


def test_the_token_of_a_job_of_the_same_user_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    job = MemoryJob()
    guarded = ControlServer(job, host="127.0.0.1", port=0, credentials=Credentials("geheim-ß"), strict_port=True)
    try:
        monkeypatch.setenv("ANABRANCH_URL", f"http://localhost:{guarded.port}")
        assert run("scale", "--workers", "3")[0] == 0
        assert job.asked == [("rescale", 3, None, None)]
        assert run("token") == (0, "geheim-ß\n", "")
        # Under its name, somebody else may answer.
        assert JobApi(f"http://localhost:{guarded.port}", Credentials())._url == f"http://127.0.0.1:{guarded.port}"
    finally:
        guarded.close()
    code, out, err = run("token")
    assert (code, out) == (1, "")
    assert "No job of this user on this machine answers there" in err


def test_the_curl_of_the_documentation_reaches_a_job_and_shows_no_token(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    (line,) = re.findall(r"^    (curl .*)$", page, re.MULTILINE)
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")
    scripts = {
        "curl": f'echo "$*" > {tmp_path}/shown\nexec {curl} "$@"',
        "anabranch": f'exec {sys.executable} -m anabranch "$@"',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job, secret = MemoryJob(), Credentials("geheim")
    server = ControlServer(job, host="127.0.0.1", port=0, credentials=secret, strict_port=True)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "ANABRANCH_URL": server.url}
    command = ["bash", "-c", line.replace(":9008", f":{server.port}")]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    finally:
        server.close()
    assert json.loads(done.stdout)["workers"] == 4, done.stderr
    assert str(server.port) in (tmp_path / "shown").read_text()
    assert "geheim" not in (tmp_path / "shown").read_text()


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:1?token=geheim",
        "http://x:geheim@localhost:1",
        "localhost:1?token=geheim",
        "x:geheim@localhost:1",
        "http://localhost:x#geheim",
    ],
)
def test_a_token_in_the_url_is_refused_and_not_shown(run: Run, url: str) -> None:
    code, out, err = run("status", "--url", url)
    assert (code, out) == (1, "")
    assert "has no token, user or password in it. Set ANABRANCH_TOKEN" in err
    assert "geheim" not in err


def test_the_token_comes_from_the_option_or_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = MemoryJob()
    guarded = ControlServer(job, host="127.0.0.1", port=0, credentials=Credentials("geheim-ß"), strict_port=True)
    try:
        monkeypatch.setenv("ANABRANCH_URL", guarded.url + "/")
        monkeypatch.setenv("HOME", str(tmp_path))  # that of another user
        code, _, err = run("scale", "--workers", "3")
        assert code == 1
        assert "ANABRANCH_TOKEN, or as the user who runs the job" in err
        assert run("scale", "--workers", "3", "--token", "wrong")[0] == 1
        assert job.asked == []
        assert run("scale", "--workers", "3", "--token", "geheim-ß")[0] == 0
        monkeypatch.setenv("ANABRANCH_TOKEN", "geheim-ß")
        assert run("scale", "--workers", "4")[0] == 0
    finally:
        guarded.close()


def test_a_proxy_of_the_environment_is_not_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert run("workers")[0] == 0


@pytest.mark.parametrize("command", [["status"], ["scale"], ["drain", "x"], ["workers"], ["stop"]])
def test_without_a_job_there_is_one_sentence_that_says_what_to_do(run: Run, command: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        code, out, err = run(*command, "--url", url)
    assert (code, out) == (1, "")
    assert says(err, f"Error: No job answers at {url} … Connection refused … Start the job … --url or ANABRANCH_URL"), (
        err
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["localhost:9008", "http://", "ftp://h", "http://h:x", "http://a b", "http://h\n"])
def test_what_is_no_url_is_an_error(run: Run, url: str) -> None:
    code, _, err = run("status", "--url", url)
    assert code == 1
    assert "such as http://localhost:9008" in err


@pytest.mark.parametrize("number", ["0", "-1", "x", "100000"])
def test_wrong_numbers_are_wrong_usage(run: Run, job: MemoryJob, number: str) -> None:
    assert run("scale", "--workers", number)[0] == 2
    assert job.asked == []


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b'HTTP/1.0 200 OK\r\n\r\n[{"id": 3}]',
        b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        b"220\n",
    ],
)
def test_what_is_no_job_is_not_taken_for_one(run: Run, answer: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        code, out, err = run("workers", "--url", f"http://127.0.0.1:{other.server_port}")
        thread.join()
    assert (code, out) == (1, "")
    assert err.startswith("Error: What answers at http://127.0.0.1:")
    assert err.endswith("is not a job. Name the HTTP API of the job with --url or ANABRANCH_URL.\n")
