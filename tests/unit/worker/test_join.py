"""A worker joins a running job over its real HTTP API, waits for one that is late, and says why it cannot."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from anabranch.control.http.server import ControlServer
from anabranch.core.errors import LostWorkerError, SettingsError, WorkerError
from anabranch.wire.credentials import Credentials
from anabranch.worker.server.registration import find_job, join, reachable_address
from support.http_job import MemoryJob

ADDRESS = "127.0.0.1:7077"


@pytest.fixture
def job() -> MemoryJob:
    return MemoryJob()


@pytest.fixture
def server(job: MemoryJob) -> Iterator[ControlServer]:
    server = ControlServer(job, host="127.0.0.1", port=0, credentials=Credentials("geheim-ß"), strict_port=True)
    yield server
    server.close()


def outer_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback only")
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "localhost:{}", "http://127.0.0.1:{}", "http://127.0.0.1:{}/"])
def test_a_worker_tells_the_job_where_it_is(job: MemoryJob, server: ControlServer, form: str) -> None:
    join(form.format(server.port), address=ADDRESS, credentials=Credentials("geheim-ß"))
    assert job.asked == [("join", ADDRESS)]


def test_a_worker_that_listens_everywhere_tells_the_address_that_leads_to_the_job(
    job: MemoryJob, server: ControlServer
) -> None:
    join(f"127.0.0.1:{server.port}", address="0.0.0.0:7077", credentials=Credentials("geheim-ß"))
    assert job.asked == [("join", "127.0.0.1:7077")]
    own = outer_address()
    assert reachable_address("0.0.0.0:7077", own, 9008) == f"{own}:7077"
    assert reachable_address("0.0.0.0:7077", "192.0.2.1", 9008) == f"{own}:7077"
    assert reachable_address("[::]:7077", "192.0.2.1", 9008) == f"{own}:7077"


@pytest.mark.parametrize("address", ["10.0.0.5:7077", "worker-3.workers:7077", "[2001:db8::1]:7077"])
def test_an_address_that_others_can_use_is_told_as_it_is(address: str) -> None:
    assert reachable_address(address, "192.0.2.1", 9008) == address


@pytest.mark.parametrize("address", ["127.0.0.1:7077", "localhost:7077"])
def test_a_worker_on_loopback_cannot_join_a_job_elsewhere(address: str) -> None:
    own = outer_address()
    with pytest.raises(SettingsError, match=r"cannot be reached by the job at 192\.0\.2\.1\. Start it with --host"):
        reachable_address(address, "192.0.2.1", 9008)
    # The same machine by another of its addresses.
    assert reachable_address(address, own, 9008) == address


def test_a_job_that_starts_later_is_waited_for(job: MemoryJob) -> None:
    port, servers = free_port(), []

    def start() -> None:
        servers.append(ControlServer(job, host="127.0.0.1", port=port, credentials=Credentials(""), strict_port=True))

    timer = threading.Timer(0.5, start)
    timer.start()
    try:
        join(f"127.0.0.1:{port}", address=ADDRESS, credentials=Credentials(""), timeout_s=20)
    finally:
        timer.join()
        servers[0].close()
    assert job.asked == [("join", ADDRESS)]


@pytest.mark.parametrize("fault", [LostWorkerError("It does not answer. Start it."), OSError("disk")])
def test_a_job_that_cannot_just_now_is_asked_again(job: MemoryJob, server: ControlServer, fault: Exception) -> None:
    job.fault = fault
    join(f"127.0.0.1:{server.port}", address=ADDRESS, credentials=Credentials("geheim-ß"))
    assert job.asked == [("join", ADDRESS)]


def test_a_job_that_stays_away_is_given_up() -> None:
    port, begun_s = free_port(), time.monotonic()
    with pytest.raises(LostWorkerError, match=rf"127.0.0.1:{port} could not be joined within 0.7 s: .*refused\. See"):
        join(f"127.0.0.1:{port}", address=ADDRESS, credentials=Credentials(""), timeout_s=0.7)
    assert 0.1 < time.monotonic() - begun_s < 5


def test_the_reason_of_the_job_is_told_when_it_is_given_up(job: MemoryJob, server: ControlServer) -> None:
    job.fault = LostWorkerError("It cannot be reached. Open the port.")
    with pytest.raises(LostWorkerError, match=r"within 0 s: It cannot be reached\. Open the port\. See whether"):
        join(f"127.0.0.1:{server.port}", address=ADDRESS, credentials=Credentials("geheim-ß"), timeout_s=0)


def test_a_worker_that_is_told_to_stop_no_longer_waits() -> None:
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    begun_s = time.monotonic()
    join(f"127.0.0.1:{free_port()}", address=ADDRESS, credentials=Credentials(""), timeout_s=60, stop=stop)
    timer.join()
    assert time.monotonic() - begun_s < 10


@pytest.mark.parametrize("token", ["", "wrong"])
def test_the_wrong_token_is_not_tried_twice(job: MemoryJob, server: ControlServer, token: str) -> None:
    with pytest.raises(SettingsError, match=r"The job refuses this worker: .*token.*--token or ANABRANCH_TOKEN"):
        join(f"127.0.0.1:{server.port}", address=ADDRESS, credentials=Credentials(token))
    assert job.asked == []


def test_a_refusal_for_good_is_told(job: MemoryJob, server: ControlServer) -> None:
    job.fault = SettingsError("Two workers have the same id. Start it with another --id.")
    with pytest.raises(WorkerError, match=r"refuses the worker at 127.0.0.1:7077: Two workers .* another --id\."):
        join(f"127.0.0.1:{server.port}", address=ADDRESS, credentials=Credentials("geheim-ß"))


@pytest.mark.parametrize(
    "control", ["", "localhost", ":9008", "localhost:0", "localhost:x", "ftp://h:1", "http://h:1/job", "http://a@h:1"]
)
def test_what_is_no_address_of_a_job_is_an_error(control: str) -> None:
    with pytest.raises(SettingsError, match=r"is not the address of a job\. Write --join HOST:PORT"):
        join(control, address=ADDRESS, credentials=Credentials(""), timeout_s=0)


@pytest.mark.parametrize(
    "control", ["localhost:1?token=geheim", "http://geheim@h:1", "h:1#geheim", "h?token=geheim", "x:geheim@h"]
)
def test_a_token_in_the_address_of_a_job_is_refused_and_not_shown(control: str) -> None:
    for attempt in (
        lambda: join(control, address=ADDRESS, credentials=Credentials(""), timeout_s=0),
        lambda: find(control, timeout_s=0),
        lambda: find(control, Credentials("t"), timeout_s=0),
    ):
        with pytest.raises(SettingsError, match=r"is not the address of a job\. Write --join HOST:PORT") as caught:
            attempt()
        assert "geheim" not in str(caught.value)


def test_another_web_server_is_not_taken_for_a_job() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(WorkerError, match=r"is not a job: it answered with 404"):
            join(f"127.0.0.1:{other.server_port}", address=ADDRESS, credentials=Credentials(""))
        thread.join()


def test_what_does_not_speak_http_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(LostWorkerError, match="does not speak HTTP"):
            join(f"127.0.0.1:{listener.getsockname()[1]}", address=ADDRESS, credentials=Credentials(""), timeout_s=0)
        thread.join()


# ------------------------------------------------------------------------------------------------- the token


def find(control: str, given: Credentials | None = None, timeout_s: float = 20) -> tuple[str, Credentials]:
    return find_job(control, given or Credentials(), threading.Event(), timeout_s=timeout_s)


def test_the_token_of_a_job_of_the_same_user_is_found(server: ControlServer) -> None:
    # Under the name, somebody else may answer.
    for control in (f"localhost:{server.port}", f"[::1]:{server.port}", f"{socket.gethostname()}:{server.port}"):
        place, found = find(control)
        assert (place, found.token) == (f"http://127.0.0.1:{server.port}", "geheim-ß")
    given = Credentials("given")
    assert find(server.url, given) == (server.url, given)


def test_a_token_that_is_given_goes_to_the_job_that_has_it_and_to_nobody_who_goes_by_its_name(
    server: ControlServer,
) -> None:
    given = Credentials("geheim-ß")
    with socket.socket(socket.AF_INET6) as impostor:
        try:
            impostor.bind(("::1", server.port))
            impostor.listen()
        except OSError:
            pytest.skip("this machine has no IPv6")
        for name in ("localhost", "[::1]", socket.gethostname()):
            assert find(f"{name}:{server.port}", given) == (f"http://127.0.0.1:{server.port}", given)
    assert find(f"192.0.2.1:{server.port}", given) == (f"192.0.2.1:{server.port}", given)


def test_the_token_of_a_job_that_starts_later_is_waited_for(job: MemoryJob) -> None:
    port, servers = free_port(), []

    def start() -> None:
        secret = Credentials("late")
        servers.append(ControlServer(job, host="127.0.0.1", port=port, credentials=secret, strict_port=True))

    timer = threading.Timer(0.5, start)
    timer.start()
    try:
        assert find(f"127.0.0.1:{port}")[1].token == "late"
    finally:
        timer.join()
        servers[0].close()


def test_a_job_of_another_user_is_not_waited_for(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SettingsError, match=r"No job of this user on this machine.*ANABRANCH_TOKEN.*query\.token"):
        find(server.url, timeout_s=3600)


def test_a_job_on_another_machine_needs_a_token_that_is_given() -> None:
    with pytest.raises(SettingsError, match=r"set ANABRANCH_TOKEN to it"):
        find("192.0.2.1:9008", timeout_s=3600)
