"""The HTTP API does what it is asked, and tells whoever asks wrongly what to do. The server is real, the job small."""

import json
import logging
import threading
import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.control.http.app import CALLS_AT_ONCE
from anabranch.control.http.endpoints import ENDPOINTS
from anabranch.control.http.requests import BODY_BYTES_MAX
from anabranch.control.http.server import ControlServer
from anabranch.core.errors import (
    AnabranchError,
    CheckpointError,
    EpochError,
    FencedError,
    LostWorkerError,
    SettingsError,
    UnsupportedError,
    WorkerError,
)
from anabranch.core.reports import as_json
from anabranch.wire.credentials import Credentials
from support.http_asking import ask, send_bytes
from support.http_job import MemoryJob


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[MemoryJob, ControlServer]]:
    job = MemoryJob()
    server = ControlServer(job, host="127.0.0.1", port=0, credentials=Credentials(""), strict_port=True)
    yield job, server
    server.close()


@pytest.fixture
def server(shared: tuple[MemoryJob, ControlServer]) -> ControlServer:
    return shared[1]


@pytest.fixture
def job(shared: tuple[MemoryJob, ControlServer]) -> MemoryJob:
    """The job of all tests here: each makes it a new one."""
    shared[0].__init__()  # type: ignore[misc]
    return shared[0]


def test_the_index_shows_the_job_and_the_way_to_everything_else(job: MemoryJob, server: ControlServer) -> None:
    answer = ask(server.url, "GET", "/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["job"] == as_json(job.job())
    assert set(answer.json["links"].values()) == {endpoint.path for endpoint in ENDPOINTS}


def test_what_the_job_says_is_answered(job: MemoryJob, server: ControlServer) -> None:
    assert ask(server.url, "GET", "/job").json == as_json(job.job())
    assert ask(server.url, "GET", "/stages").json == as_json(job.stages())
    assert ask(server.url, "GET", "/workers").json == as_json(job.workers())
    assert ask(server.url, "GET", "/route").json == as_json(job.route())
    assert ask(server.url, "GET", "/migrations").json == []
    assert ask(server.url, "GET", "/health").json == {"status": "ok"}


def test_as_many_epochs_are_shown_as_are_asked_for(job: MemoryJob, server: ControlServer) -> None:
    assert ask(server.url, "GET", "/epochs").json == as_json(job.epochs(20))
    assert ask(server.url, "GET", "/epochs?limit=3").json == as_json(job.epochs(3))


def test_a_rescale_reaches_the_job(job: MemoryJob, server: ControlServer) -> None:
    answer = ask(server.url, "POST", "/rescale", {"workers": 4, "parallelism": 8, "stage": 3})
    assert (answer.status, answer.json["state"], answer.json["workers"]) == (200, "migrating", 4)
    assert job.asked == [("rescale", 4, 8, 3)]
    assert [each.parallelism for each in job.stages()] == [2, 8]
    assert len(ask(server.url, "GET", "/workers").json) == 4
    assert ask(server.url, "GET", "/migrations").json[0]["groupsPending"] > 0


def test_what_is_left_out_of_a_rescale_stays_as_it_is(job: MemoryJob, server: ControlServer) -> None:
    assert ask(server.url, "POST", "/rescale", {"workers": 3}).status == 200
    assert ask(server.url, "POST", "/rescale", {"parallelism": 5, "stage": "clicks"}).status == 200
    assert job.asked == [("rescale", 3, None, None), ("rescale", None, 5, "clicks")]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(("stage", "meant"), [("3", 3), ("sessions", "sessions"), ("%73essions", "sessions")])
def test_a_stage_gets_more_capacity_by_one_short_request(
    job: MemoryJob, server: ControlServer, method: str, stage: str, meant: int | str
) -> None:
    answer = ask(server.url, method, f"/scale?stage={stage}", headers={"host": f"localhost:{server.port}"})
    assert answer.status == 200
    assert job.asked[0] == ("scale_out", meant)
    assert len(job.workers()) == 3


def test_a_worker_is_added_without_a_stage_but_not_by_a_get(job: MemoryJob, server: ControlServer) -> None:
    assert "stage is missing: number or name" in ask(server.url, "GET", "/scale").error
    assert job.asked == []
    assert ask(server.url, "POST", "/scale").status == 200
    assert job.asked[0] == ("scale_out", None)
    assert [each.parallelism for each in job.stages()] == [2, 2]


def test_head_does_not_scale(job: MemoryJob, server: ControlServer) -> None:
    assert ask(server.url, "HEAD", "/scale?stage=3").status == 405
    assert job.asked == []
    assert ask(server.url, "HEAD", "/job").status == 200


def test_workers_join_and_leave(job: MemoryJob, server: ControlServer) -> None:
    joined = ask(server.url, "POST", "/workers", {"address": "10.0.0.5:7077"})
    assert (joined.status, joined.json["address"]) == (200, "10.0.0.5:7077")
    assert ask(server.url, "POST", "/workers", {"address": "[::1]:7077"}).status == 200
    assert ask(server.url, "POST", "/workers/worker-1/drain").json["what"] == "drain worker-1"
    assert job.workers()[0].state == "draining"
    assert "worker-9" in ask(server.url, "POST", "/workers/worker-9/drain").error


def test_a_savepoint_goes_where_it_is_told(job: MemoryJob, server: ControlServer) -> None:
    path = "s3://bucket/vor dem Umbau/ß"
    assert ask(server.url, "POST", "/savepoint", {"path": path}).json == {"epoch": 41, "path": path}
    assert job.savepoints == [path]


def test_stop_is_answered_before_it_happens(job: MemoryJob, server: ControlServer) -> None:
    may_stop = threading.Event()
    job.on_stop = lambda: (may_stop.wait(10), None)[1]
    answer = ask(server.url, "POST", "/stop")
    assert (answer.status, answer.json) == (202, {"stopping": True})
    assert job.stopped.wait(10)
    may_stop.set()


BAD_BODIES: list[tuple[str, bytes, str]] = [
    ("/rescale", b"", "Say what to change: workers or parallelism"),
    ("/rescale", b"{}", "Say what to change: workers or parallelism"),
    ("/rescale", b'{"stage": 3}', "Say what to change: workers or parallelism"),
    ("/rescale", b'{"worker": 4}', "Did you mean workers?"),
    ("/rescale", b'{"x": 4}', "Valid ones: workers, parallelism, stage."),
    ("/rescale", b'{"workers": true}', "workers is True; it must be a whole number from 1 to 1024, such as 4."),
    ("/rescale", b'{"workers": 4.0}', "workers is 4.0"),
    ("/rescale", b'{"workers": "4"}', "workers is '4'"),
    ("/rescale", b'{"workers": null}', "workers is None"),
    ("/rescale", b'{"workers": 0}', "workers is 0"),
    ("/rescale", b'{"workers": -1}', "workers is -1"),
    ("/rescale", b'{"workers": 1025}', "workers is 1025"),
    ("/rescale", b'{"workers": NaN}', "workers is nan"),
    ("/rescale", b'{"workers": 4, "parallelism": -8}', "parallelism is -8"),
    ("/rescale", b'{"workers": 4, "stage": true}', "a whole number from 0 to 100000 or the name of a stage"),
    ("/rescale", b'{"workers": 4, "stage": -1}', "stage is -1"),
    ("/rescale", b'{"workers": 4, "stage": ""}', "stage is ''"),
    ("/rescale", b'{"workers": 4, "stage": [3]}', "stage is [3]"),
    ("/rescale", b'{"workers": 4, "workers": 5}', "'workers' is given 2 times"),
    ("/rescale", b"workers=4", "The body is not JSON"),
    ("/rescale", b'{"workers": 4', "The body is not JSON"),
    ("/rescale", b'{"workers": ' + b"9" * 5000 + b"}", "The body is not JSON"),
    ("/rescale", b"[" * 60_000, "The body is not JSON"),
    ("/rescale", b"\xff\xfe\xff", "The body is not JSON"),
    ("/rescale", b"[4]", "must be a JSON object"),
    ("/rescale?workers=4", b"", "'workers' is not a parameter of the query. Leave out everything from the ? on."),
    ("/workers", b"{}", "address is missing"),
    ("/workers", b'{"address": "10.0.0.5"}', "it must be host:port, such as '10.0.0.5:7077'"),
    ("/workers", b'{"address": "10.0.0.5:0"}', "it must be host:port"),
    ("/workers", b'{"address": "10.0.0.5:65536"}', "it must be host:port"),
    ("/workers", b'{"address": "a/b:7077"}', "it must be host:port"),
    ("/workers", b'{"address": ":7077"}', "it must be host:port"),
    ("/workers", b'{"adress": "h:1"}', "Did you mean address?"),
    ("/workers/worker-1/drain", b'{"wait": true}', "Send no body"),
    ("/savepoint", b"{}", "path is missing"),
    ("/savepoint", b'{"path": ""}', "path is ''"),
    ("/savepoint", b'{"path": "a\\u0000b"}', "path is 'a\\x00b'"),
    ("/savepoint", b'{"path": "\\ud800"}', "path is '\\ud800'"),
    ("/stop", b'{"now": true}', "Send no body"),
    ("/scale?stage=", b"", "stage is ''"),
    ("/scale?stage=-1", b"", "stage is -1"),
    ("/scale?stage=3&stage=4", b"", "stage is given 2 times"),
    ("/scale?satge=3", b"", "Did you mean stage?"),
    ("/scale?stage=3", b'{"stage": 3}', "give values in the address: /scale?stage=3"),
    ("/scale?stage=7", b"", "There is no stateful stage 7"),
]


@pytest.mark.parametrize(("path", "body", "advice"), BAD_BODIES, ids=[f"{p} {b[:30]!r}" for p, b, _ in BAD_BODIES])
def test_a_wrong_change_is_refused_with_advice(
    job: MemoryJob, server: ControlServer, path: str, body: bytes, advice: str
) -> None:
    answer = ask(server.url, "POST", path, raw=body)
    assert answer.status == 400
    assert advice in answer.error
    assert not job.stopped.is_set()
    assert len(job.workers()) == 2


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "ten", "", "1e2", "9" * 5000, "٣"])
def test_a_wrong_limit_is_refused(server: ControlServer, limit: str) -> None:
    answer = ask(server.url, "GET", f"/epochs?limit={quote(limit)}")
    assert answer.status == 400
    assert "whole number from 1 to 1000" in answer.error


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/jobs", "Did you mean /job?"),
        ("/job/", "Did you mean /job?"),
        ("/rescal", "/rescale"),
        ("/%00%00%00%00%00", "Valid paths: /, /job"),
    ],
)
def test_an_unknown_path_is_told_the_nearest(server: ControlServer, path: str, advice: str) -> None:
    answer = ask(server.url, "GET", path)
    assert answer.status == 404
    assert advice in answer.error


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/job", "GET"),
        ("GET", "/rescale", "POST"),
        ("DELETE", "/workers", "GET, POST"),
        ("PUT", "/scale", "GET, POST"),
        ("OPTIONS", "/rescale", "POST"),
        ("GET", "/stop", "POST"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(server: ControlServer, method: str, path: str, allowed: str) -> None:
    answer = ask(server.url, method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert allowed.replace(", ", " or ") in answer.error


def test_a_body_has_a_limit_whether_announced_or_not(job: MemoryJob, server: ControlServer) -> None:
    fits = b'{"workers": 3}' + b" " * (BODY_BYTES_MAX - 14)
    assert ask(server.url, "POST", "/rescale", raw=fits).status == 200
    answer = ask(server.url, "POST", "/rescale", raw=fits + b" ")
    assert answer.status == 413
    assert "64 KiB" in answer.error
    head = f"POST /rescale HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n"
    announced = b"Content-Length: 65537\r\n\r\n"
    assert b" 413 " in send_bytes(server.port, head.encode() + announced)
    chunks = b"10000\r\n" + b" " * 65536 + b"\r\n1\r\n \r\n0\r\n\r\n"
    assert b" 413 " in send_bytes(server.port, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert len(job.workers()) == 3


def test_a_body_that_does_not_come_is_not_waited_for(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.control.http.requests.BODY_TIMEOUT_S", 0.05)
    head = f"POST /rescale HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\nContent-Length: 9\r\n\r\n"
    assert b" 408 " in send_bytes(server.port, head.encode() + b"{")


def test_what_is_no_http_gets_a_sentence_too(server: ControlServer) -> None:
    head, _, body = send_bytes(server.port, b"\x16\x03\x01 this is no HTTP\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert "not an HTTP request" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (SettingsError("Set this."), 400),
        (UnsupportedError("Change this."), 400),
        (EpochError("Start again."), 409),
        (CheckpointError("Choose another place."), 409),
        (FencedError("Stop this one."), 409),
        (WorkerError("See its log."), 503),
        (LostWorkerError("Start it."), 503),
    ],
)
def test_an_error_of_the_job_is_told_with_its_text(
    job: MemoryJob, server: ControlServer, fault: AnabranchError, status: int
) -> None:
    job.fault = fault
    answer = ask(server.url, "POST", "/rescale", {"workers": 3})
    assert (answer.status, answer.error) == (status, str(fault))


@pytest.mark.parametrize("fault", [KeyError("secret"), StopIteration("secret"), SystemExit("secret")])
def test_an_unexpected_error_is_told_to_the_log_only(
    job: MemoryJob, server: ControlServer, caplog: pytest.LogCaptureFixture, fault: BaseException
) -> None:
    job.fault = fault
    answer = ask(server.url, "POST", "/rescale", {"workers": 3})
    assert answer.status == 500
    assert answer.error == "POST /rescale failed. The log of the driver says why."
    logged = [record.exc_info for record in caplog.records if record.exc_info]
    assert any("secret" in "".join(traceback.format_exception(*each)) for each in logged)
    assert ask(server.url, "GET", "/job").status == 200


def test_numbers_of_numpy_are_numbers_and_what_is_no_json_is_an_error(
    server: ControlServer, job: MemoryJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "route", lambda: {"version": np.int64(3), "share": np.float64(0.5)})
    assert ask(server.url, "GET", "/route").json == {"version": 3, "share": 0.5}
    for bad in (float("nan"), object()):
        monkeypatch.setattr(job, "route", lambda bad=bad: {"version": bad})
        assert ask(server.url, "GET", "/route").status == 500


@pytest.mark.usefixtures("job")
def test_changes_are_logged_with_who_asked(server: ControlServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    ask(server.url, "GET", "/job")
    assert caplog.text == ""
    ask(server.url, "POST", "/rescale", {"workers": 3})
    assert "127.0.0.1 asks for rescale {'workers': 3}" in caplog.text


def test_a_job_that_is_busy_turns_requests_away_but_stays_healthy(job: MemoryJob, server: ControlServer) -> None:
    may_end = threading.Event()
    all_in = threading.Semaphore(0)

    def take_long() -> None:
        all_in.release()
        may_end.wait(20)

    job.on_savepoint = take_long
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(server.url, "POST", "/savepoint", {"path": "p"}).status))
        for _ in range(CALLS_AT_ONCE)
    ]
    for thread in threads:
        thread.start()
    assert all(all_in.acquire(timeout=10) for _ in threads)
    refused = ask(server.url, "GET", "/job")
    assert refused.status == 503
    assert "Ask again" in refused.error
    assert ask(server.url, "GET", "/health").status == 200
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert answers == [200] * CALLS_AT_ONCE
    assert ask(server.url, "GET", "/job").status == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)
BODIES = JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(("workers", "parallelism", "stage"), JSON))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES)
def test_whatever_is_sent_either_fits_the_description_or_is_refused_with_a_sentence(
    job: MemoryJob, server: ControlServer, body: Any
) -> None:
    before = len(job.asked)
    answer = ask(server.url, "POST", "/rescale", body)
    if answer.status == 400:
        assert answer.error
        return
    assert answer.status == 200
    _, workers, parallelism, stage = job.asked[before]
    assert workers is not None or parallelism is not None
    assert all(value is None or (type(value) is int and value > 0) for value in (workers, parallelism))
    assert stage is None or type(stage) in (int, str)
