"""TLS between real servers and clients: workers, their peers, the HTTP API, commands, and workers that join."""

import http.client
import logging
import re
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.job_api import JobApi
from anabranch.control.http.server import ControlServer
from anabranch.control.membership.launcher import EmbeddedWorkers
from anabranch.core.answers import WorkerHealth
from anabranch.core.errors import LostWorkerError, SettingsError, WorkerError
from anabranch.core.ids import WorkerId
from anabranch.core.requests import Health
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials
from anabranch.worker.server.registration import join
from anabranch.worker.server.service import StateService
from anabranch.worker.stores.options import StoreOptions
from support import state_workers
from support.certificates import Authority
from support.http_asking import send_bytes
from support.http_job import MemoryJob
from support.keyed_state import KEYS
from support.state_workers import MakeDriver, changed


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path)


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path, "theirs")


@contextmanager
def serving(credentials: Credentials) -> Iterator[str]:
    service = StateService("127.0.0.1:0", worker=WorkerId("w"), stores=StoreOptions("memory"), credentials=credentials)
    try:
        yield f"127.0.0.1:{service.port}"
    finally:
        service.close()


def ask(address: str, credentials: Credentials) -> WorkerHealth:
    client = WorkerClient(address, timeout_s=20, credentials=credentials)
    try:
        return client.call(Health())
    finally:
        client.close()


def refusal(address: str, credentials: Credentials) -> str:
    """Why a worker cannot be asked: for the query it counts as lost, so that it goes on with the others."""
    with pytest.raises(LostWorkerError) as caught:
        ask(address, credentials)
    return str(caught.value)


# --------------------------------------------------------------------------------------------------- workers


def test_a_worker_with_a_certificate_is_asked_by_whoever_trusts_its_authority(
    ours: Authority, theirs: Authority
) -> None:
    alone = replace(ours.credentials("t"), authority="")
    checking = ours.credentials("t", is_mutual=False)
    with serving(alone) as address:
        assert ask(address, checking).worker == "w"
        assert "certificate" in refusal(address, theirs.credentials("t", is_mutual=False))
        assert "certificate" in refusal(address, replace(alone))  # this machine trusts others
        assert "If it speaks TLS, set anabranch.tlsAuthority" in refusal(address, Credentials("t"))
        with pytest.raises(WorkerError, match="asks for another token"):
            ask(address, replace(checking, token="guess"))
        assert ask(address, checking).worker == "w"


def test_a_worker_with_an_authority_asks_for_certificates(ours: Authority, theirs: Authority) -> None:
    both = ours.credentials("t")
    with serving(both) as address:
        assert ask(address, both).worker == "w"
        for certificate in [("", ""), theirs.sign(), ours.sign("old", days=-1)]:
            said = refusal(address, Credentials("t", *certificate, ours.path))
            assert "broke off the TLS handshake. If it asks for certificates" in said
        assert ask(address, both).worker == "w"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"days": -1}, "certificate has expired"),
        ({"names": ("other.example",)}, "Peer name 127.0.0.1 is not in peer certificate"),
    ],
)
def test_a_worker_whose_certificate_does_not_hold_is_not_asked(
    ours: Authority, made: dict[str, Any], reason: str
) -> None:
    with serving(Credentials("t", *ours.sign("bad", **made))) as address:
        said = refusal(address, ours.credentials("t"))
    assert f"by TLS: {reason}. Give the worker a certificate" in said


def test_a_worker_without_tls_is_not_asked_by_those_who_expect_it(ours: Authority) -> None:
    with serving(Credentials("t")) as address:
        assert "does not speak TLS. Start it with --tls-certificate" in refusal(address, ours.credentials("t"))


def test_state_moves_between_workers_that_speak_tls(
    ours: Authority, make: MakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_workers, "CREDENTIALS", ours.credentials("secret"))
    driver = make("a", "b")
    driver.give("b")
    driver.run_epoch(changed(driver, KEYS[::3]), drain_rows=-1)
    driver.wait_until_all_has_arrived()
    assert driver.scan_all() == driver.model
    assert driver.workers["a"].local.asked["fetch_groups"] > 0
    assert not state_workers.fell_back(caplog)


def test_a_peer_with_a_foreign_certificate_gets_nothing_and_the_checkpoint_takes_its_place(
    ours: Authority,
    theirs: Authority,
    make: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(state_workers, "CREDENTIALS", ours.credentials("secret"))
    driver = make("a", "b")
    foreign = Credentials("secret", *theirs.sign("peer"), ours.path)
    driver.workers["b"].local._credentials = foreign
    driver.workers["b"].local._jobs._jobs[state_workers.JOB]._credentials = foreign
    driver.give("b")
    driver.run_epoch(changed(driver, KEYS[::3]), drain_rows=-1)
    driver.wait_until_all_has_arrived()
    assert driver.scan_all() == driver.model
    assert driver.workers["a"].local.asked["fetch_groups"] == driver.workers["a"].local.asked["fetch_keys"] == 0
    assert state_workers.fell_back(caplog)


def test_workers_that_the_driver_starts_speak_tls(ours: Authority) -> None:
    credentials = ours.credentials("t")
    workers = EmbeddedWorkers(store="memory", state_path="", credentials=credentials, start_timeout_s=60)
    try:
        (started,) = workers.start(1)
        assert ask(started.address, credentials).worker == "worker-1"
        assert "cannot be reached" in refusal(started.address, Credentials("t"))
    finally:
        workers.stop()


# ---------------------------------------------------------------------------------------------- the HTTP API

MakeServer = Callable[..., ControlServer]


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MakeServer]:
    """Servers, of which no client knows but by what it is given."""
    servers: list[ControlServer] = []

    def make(credentials: Credentials, job: MemoryJob | None = None, host: str = "127.0.0.1") -> ControlServer:
        server = ControlServer(job or MemoryJob(), host=host, port=0, credentials=credentials, strict_port=True)
        servers.append(server)
        monkeypatch.setenv("HOME", str(tmp_path / f"home-{len(servers)}"))
        return server

    yield make
    for server in servers:
        server.close()


def test_the_api_speaks_tls_to_whoever_trusts_its_authority(
    ours: Authority, theirs: Authority, control: MakeServer
) -> None:
    server = control(replace(ours.credentials("t"), authority=""))
    assert server.url == f"https://127.0.0.1:{server.port}"
    checking = ours.credentials("t", is_mutual=False)
    assert JobApi(server.url, checking).post("/rescale", {"workers": 3})["workers"] == 3
    assert JobApi(f"https://localhost:{server.port}", checking).get("/job")["workers"] == 3
    for wrong in (theirs.credentials("t", is_mutual=False), Credentials("t")):
        with pytest.raises(SettingsError, match=r"cannot be reached by TLS: .*certificate.* with --tls-authority"):
            JobApi(server.url, wrong).get("/job")
    with pytest.raises(SettingsError, match=r"token is wrong"):
        JobApi(server.url, replace(checking, token="guess")).get("/job")


def test_an_api_with_an_authority_asks_for_certificates(
    ours: Authority, theirs: Authority, control: MakeServer
) -> None:
    server = control(ours.credentials("t"))
    assert JobApi(server.url, ours.credentials("t")).get("/job")["id"] == "job-1"
    with pytest.raises(SettingsError, match=r"--tls-certificate"):
        JobApi(server.url, ours.credentials("t", is_mutual=False)).get("/job")
    strangers = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    strangers.load_verify_locations(ours.path)
    strangers.load_cert_chain(*theirs.sign())
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=strangers)
    # The server may notice only after the client has sent its request.
    with suppress(ssl.SSLError, ConnectionError):
        connection.request("GET", "/health")
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        connection.getresponse()
    connection.close()
    assert JobApi(server.url, ours.credentials("t")).get("/health") == {"status": "ok"}


@pytest.mark.parametrize(
    ("made", "reason"), [({"days": -1}, "certificate has expired"), ({"names": ("other.example",)}, "not valid for")]
)
def test_an_api_whose_certificate_does_not_hold_is_not_told_the_token(
    ours: Authority, control: MakeServer, made: dict[str, Any], reason: str
) -> None:
    job = MemoryJob()
    server = control(Credentials("t", *ours.sign("bad", **made)), job)
    with pytest.raises(SettingsError, match=f"by TLS: .*{reason}"):
        JobApi(server.url, ours.credentials("t")).post("/rescale", {"workers": 3})
    with pytest.raises(SettingsError, match=rf"cannot be joined by TLS: .*{reason}"):
        join(server.url, address="127.0.0.1:7077", credentials=ours.credentials("t"), timeout_s=5)
    assert job.asked == []


def test_what_is_no_tls_is_turned_away(ours: Authority, control: MakeServer) -> None:
    server = control(ours.credentials("t"))
    for data in (
        b"GET /job HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + b"\0" * 100,
        b"\xff" * 9999,
    ):
        with suppress(ConnectionError):
            assert b"job-1" not in send_bytes(server.port, data)
    with pytest.raises(SettingsError, match=r"What answers at .* is not a job|No job answers"):
        JobApi(f"http://127.0.0.1:{server.port}", Credentials("t")).get("/job")
    assert JobApi(server.url, ours.credentials("t")).get("/job")["id"] == "job-1"


def test_a_worker_joins_by_tls(ours: Authority, control: MakeServer) -> None:
    job = MemoryJob()
    server = control(ours.credentials("t"), job)
    for place in (server.url, f"localhost:{server.port}"):
        join(place, address="127.0.0.1:7077", credentials=ours.credentials("t"))
    assert job.asked == [("join", "127.0.0.1:7077")] * 2
    with pytest.raises((SettingsError, LostWorkerError), match=r"--tls-certificate"):
        join(server.url, address="127.0.0.1:7077", credentials=ours.credentials("t", is_mutual=False), timeout_s=1)


def test_a_command_of_the_same_user_finds_token_and_files(ours: Authority) -> None:
    server = ControlServer(MemoryJob(), host="127.0.0.1", port=0, credentials=ours.credentials("t"), strict_port=True)
    try:
        found = JobApi(f"http://localhost:{server.port}", Credentials())
        assert found.post("/rescale", {"workers": 3})["workers"] == 3
        assert found.token == "t"
    finally:
        server.close()


# ---------------------------------------------------------------------------------------------- what is warned of


def test_a_server_without_tls_that_others_can_reach_says_what_they_can_read(
    control: MakeServer, ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "anabranch")
    control(Credentials("t"))
    control(ours.credentials("t"), host="0.0.0.0")
    assert caplog.text == ""
    control(Credentials("t"), host="0.0.0.0")
    assert "without TLS: whoever listens in on the way reads the token" in caplog.text


def test_the_five_lines_of_the_documentation_make_files_that_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    lines = re.findall(r"^    ((?:openssl|printf|export ANABRANCH_TLS).*)$", page, re.MULTILINE)
    assert len(lines) == 5
    script = "\n".join(["set -e", *(line for line in lines if not line.startswith("export"))])
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    named = [str(tmp_path / name) for name in re.findall(r"PWD/([\w-]+\.pem)", lines[-1])]
    credentials = Credentials("t", *named)
    credentials.check()
    with serving(credentials) as address:
        assert ask(address, credentials).worker == "w"
        assert "cannot be reached" in refusal(address, replace(credentials, certificate="", key=""))
