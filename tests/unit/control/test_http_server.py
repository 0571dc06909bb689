"""The server of the HTTP API as a thread of the driver: where it listens, and that it leaves no trace."""

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from anabranch.control.http.server import ControlServer
from anabranch.core.errors import SettingsError
from anabranch.wire.credentials import Credentials
from support.http_asking import Answer, ask
from support.http_job import MemoryJob

Start = Callable[..., ControlServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers, and closes them after the test."""
    servers: list[ControlServer] = []

    def begin(
        job: MemoryJob | None = None, *, host: str = "127.0.0.1", port: int = 0, token: str = "", strict: bool = True
    ) -> ControlServer:
        servers.append(
            ControlServer(job or MemoryJob(), host=host, port=port, credentials=Credentials(token), strict_port=strict)
        )
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def http_threads() -> list[str]:
    """The threads of servers. Those of single calls, which end with their call, are given a moment to do so."""
    for thread in threading.enumerate():
        if thread.name.startswith("anabranch-http-"):
            thread.join(10)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("anabranch-http", "AnyIO"))]


def test_the_url_leads_to_the_server(start: Start) -> None:
    server = start()
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert ask(server.url, "GET", "/health").status == 200
    named = start(host="localhost")
    assert named.url == f"http://localhost:{named.port}"
    assert ask(named.url, "GET", "/health").status == 200


@pytest.mark.parametrize("host", ["::1", "::"])
def test_ipv6_is_served_and_knows_this_machine(start: Start, host: str) -> None:
    try:
        server = start(host=host, token="t")
    except SettingsError:
        pytest.skip("this machine has no IPv6")
    assert ask(f"http://[::1]:{server.port}", "GET", "/job").status == 200
    if host == "::":
        assert urlsplit(server.url).hostname == socket.gethostname().lower()
        assert ask(f"http://127.0.0.1:{server.port}", "GET", "/job").status == 200


def test_a_busy_port_is_an_error_that_names_it(start: Start) -> None:
    taken = start().port
    with pytest.raises(SettingsError, match=rf"Port {taken} on 127\.0\.0\.1 is in use\. .*controlPort.* or 0 for any"):
        start(port=taken)


def test_a_busy_port_can_be_replaced_by_a_free_one(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    taken = start().port
    server = start(port=taken, strict=False)
    assert server.port != taken
    assert f"port {taken} on 127.0.0.1 is in use" in caplog.text
    assert server.url in caplog.text
    assert ask(server.url, "GET", "/health").status == 200


def test_a_port_can_be_used_again_at_once(start: Start) -> None:
    first = start()
    assert ask(first.url, "GET", "/health").status == 200
    first.close()
    assert start(port=first.port).port == first.port


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist_is_an_error(start: Start, port: int) -> None:
    with pytest.raises(SettingsError, match=f"Port {port} does not exist"):
        start(port=port)


@pytest.mark.parametrize("host", ["", "no such host", "192.0.2.1"])
def test_an_address_of_another_machine_is_an_error(start: Start, host: str) -> None:
    with pytest.raises(SettingsError, match=r"Set anabranch\.controlHost"):
        start(host=host, token="t")


@pytest.mark.parametrize("token", ["", " "])
def test_off_loopback_a_token_is_needed(start: Start, token: str) -> None:
    with pytest.raises(SettingsError, match="needs a token"):
        start(host="0.0.0.0", token=token)


def test_signals_and_logging_are_left_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> object:
        names = ["", *(name for name in ("uvicorn", "uvicorn.access", "uvicorn.error", "asyncio"))]
        loggers = [logging.getLogger(name) for name in names]
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return handlers, logging.getLevelName(5), [(a.level, a.propagate, list(a.handlers)) for a in loggers]

    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    # An earlier test may have used another server of the same make.
    monkeypatch.delitem(logging._levelToName, 5, raising=False)
    before = state()
    server = start()
    ask(server.url, "GET", "/job")
    assert state() == before
    server.close()
    assert state() == before


def test_requests_are_not_logged(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    assert ask(server.url, "GET", "/job").status == 200
    assert caplog.records == []


def test_closing_is_prompt_final_and_leaves_no_thread(start: Start) -> None:
    server = start()
    # A client that keeps its connection, and one that has not said anything yet.
    with (
        socket.create_connection(("127.0.0.1", server.port)) as kept,
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200")
        begun_s = time.monotonic()
        server.close()
        assert time.monotonic() - begun_s < 2
    assert http_threads() == []
    with pytest.raises(ConnectionRefusedError):
        ask(server.url, "GET", "/health")
    server.close()


def test_closing_does_not_wait_for_what_is_under_way(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    job, begun, may_end = MemoryJob(), threading.Event(), threading.Event()
    job.on_savepoint = lambda: (begun.set(), may_end.wait(20), None)[2]
    server = start(job)
    answers: list[Answer] = []
    client = threading.Thread(target=lambda: answers.append(ask(server.url, "POST", "/savepoint", {"path": "p"})))
    client.start()
    # And a client that stops in the middle of a body.
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
        slow.sendall(b"POST /rescale HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        assert begun.wait(10)
        begun_s = time.monotonic()
        server.close()
        assert time.monotonic() - begun_s < 2
        assert slow.recv(65536).startswith(b"HTTP/1.1 503")
    client.join(10)
    assert answers[0].status == 503
    assert "stopping" in answers[0].error
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    may_end.set()
    assert http_threads() == []
    assert job.savepoints == ["p"]


def test_a_job_that_is_stopped_by_a_request_closes_the_server_itself(start: Start) -> None:
    job, closed = MemoryJob(), threading.Event()
    server = start(job)
    job.on_stop = lambda: (server.close(), closed.set(), None)[2]
    assert ask(server.url, "POST", "/stop").status == 202
    assert closed.wait(10)
    with pytest.raises(ConnectionRefusedError):
        ask(server.url, "GET", "/health")


def test_a_stop_that_fails_is_logged_and_can_be_asked_for_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    job, tried = MemoryJob(), threading.Semaphore(0)

    def fail() -> None:
        tried.release()
        raise RuntimeError("not today")

    job.on_stop = fail
    server = start(job)
    for _ in range(2):
        assert ask(server.url, "POST", "/stop").status == 202
        assert tried.acquire(timeout=10)
        http_threads()
    assert caplog.text.count("the job could not be stopped") == 2
    assert "not today" in caplog.text


def test_a_server_can_be_closed_by_several_threads(start: Start) -> None:
    server = start()
    threads = [threading.Thread(target=server.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert http_threads() == []
