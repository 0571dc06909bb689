"""Who may ask for what: programs of this machine, whoever knows the token, and no web page."""

import logging
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from anabranch.control.http.access import Access, Asked, is_loopback
from anabranch.control.http.server import ControlServer
from anabranch.wire.credentials import Credentials
from support.http_asking import ask
from support.http_job import MemoryJob

NEAR, FAR = "127.0.0.1", "192.0.2.7"
TOKEN = "geheim-ß"
KNOWN = f"Bearer {TOKEN}".encode().decode("latin-1")
OWN_NAME = socket.gethostname()


def status(access: Access, client: str = NEAR, what: str = "read", **headers: str) -> int:
    """The status with which a request is refused; 200 if it is not. Underscores in names of headers are hyphens."""
    sent = {"host": "localhost:9008"} | {name.replace("_", "-"): value for name, value in headers.items()}
    kinds = {
        "read": {"by_get": True},
        "health": {"by_get": True, "is_public": True},
        "change": {"changes": True},
        "change by get": {"changes": True, "by_get": True},
    }
    refusal = access.refusal(Asked(client=client, headers=Headers(sent), **kinds[what]))
    assert refusal is None or refusal.sentence.endswith(".")
    return 200 if refusal is None else refusal.status


@pytest.fixture
def without() -> Access:
    return Access(token="", host="127.0.0.1")


@pytest.fixture
def with_token() -> Access:
    return Access(token=TOKEN, host="0.0.0.0")


ALL = ("read", "health", "change", "change by get")


def test_this_machine_may_do_everything_if_there_is_no_token(without: Access) -> None:
    assert [status(without, what=what) for what in ALL] == [200, 200, 200, 200]
    assert [status(without, what=what, authorization="Bearer x") for what in ALL] == [200, 200, 200, 200]


def test_with_a_token_this_machine_needs_it_for_changes_by_post_only(with_token: Access) -> None:
    assert [status(with_token, what=what) for what in ALL] == [200, 200, 401, 200]
    assert [status(with_token, what=what, authorization=KNOWN) for what in ALL] == [200, 200, 200, 200]


def test_other_machines_need_the_token_and_change_nothing_by_get(with_token: Access) -> None:
    assert [status(with_token, FAR, what, host="192.0.2.1:9008") for what in ALL] == [401, 200, 401, 401]
    known = {"authorization": KNOWN, "host": "192.0.2.1:9008"}
    assert [status(with_token, FAR, what, **known) for what in ALL] == [200, 200, 200, 403]


def test_without_a_token_other_machines_see_nothing(without: Access) -> None:
    assert [status(without, FAR, what, authorization="Bearer ") for what in ALL] == [401, 200, 401, 401]


@pytest.mark.parametrize("wrong", ["Bearer x", "Bearer ", "Bearer", f"Basic {KNOWN[7:]}", KNOWN[7:], f"{KNOWN}x"])
def test_a_wrong_token_is_refused_wherever_it_comes_from(with_token: Access, wrong: str) -> None:
    for client in (NEAR, FAR):
        assert [status(with_token, client, what, authorization=wrong) for what in ALL] == [401] * 4


def test_two_tokens_are_one_too_many(with_token: Access) -> None:
    pair = (b"authorization", KNOWN.encode("latin-1"))
    headers = Headers(raw=[(b"host", b"localhost"), pair, pair])
    refusal = with_token.refusal(Asked(client=FAR, headers=headers))
    assert refusal is not None
    assert refusal.status == 401


@given(st.text(min_size=1).filter(str.strip), st.text())
def test_only_the_token_itself_opens(token: str, guess: str) -> None:
    access = Access(token=token, host="0.0.0.0")
    sent = f"Bearer {guess}".encode(errors="replace").decode("latin-1")
    is_token = guess.strip() == token.strip() and guess.encode(errors="replace").decode() == guess
    found = status(access, FAR, authorization=sent)
    # Latin-1 has spaces of its own, which a guess may end in: never must a wrong one get in.
    assert found == 401 or is_token


@pytest.mark.parametrize("header", ["forwarded", "x_forwarded_for", "x_real_ip", "via"])
def test_a_proxy_on_this_machine_does_not_make_its_clients_trusted(without: Access, header: str) -> None:
    assert [status(without, what=what, **{header: NEAR}) for what in ALL] == [401, 200, 401, 401]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9008", "[::1]:9008", "10.1.2.3", OWN_NAME])
def test_the_job_goes_by_its_addresses_and_the_names_of_its_machine(without: Access, host: str) -> None:
    assert status(without, host=host) == 200
    assert status(without, what="change", host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9008", "localhost.evil.example", "127.0.0.1.evil.example", "", "1.2.3"]
)
def test_a_page_whose_name_leads_to_this_machine_gets_nothing(without: Access, host: str) -> None:
    assert [status(without, what=what, host=host) for what in ALL] == [403] * 4


def test_whoever_knows_the_token_may_use_any_name(with_token: Access) -> None:
    assert status(with_token, FAR, "change", host="driver.jobs.svc:9008", authorization=KNOWN) == 200


FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},
    {"origin": "http://localhost:9008.evil.example"},
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"origin": "http://localhost:9008", "sec_fetch_site": "cross-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_foreign_page_changes_nothing_even_with_the_token(
    without: Access, with_token: Access, headers: dict[str, str]
) -> None:
    for what in ("change", "change by get"):
        assert status(without, what=what, **headers) == 403
        assert status(with_token, what=what, authorization=KNOWN, **headers) == 403
    assert status(without, **headers) == 200


def test_pages_of_the_job_itself_and_typed_addresses_may_change_it(without: Access) -> None:
    own = {"origin": "http://localhost:9008", "sec_fetch_site": "same-origin"}
    assert status(without, what="change", **own) == 200
    assert status(without, what="change by get", sec_fetch_site="none") == 200


@pytest.mark.parametrize("host", ["0.0.0.0:9008", "[::ffff:127.0.0.1]:9008", "[::ffff:7f00:1]", "10.1.2.3", OWN_NAME])
def test_get_changes_nothing_under_names_for_which_browsers_do_not_say_who_asks(without: Access, host: str) -> None:
    assert status(without, what="change by get", host=host) == 403


def test_an_address_that_a_browser_fetches_ahead_changes_nothing(without: Access) -> None:
    assert status(without, what="change by get", sec_fetch_site="none", sec_purpose="prefetch") == 403


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_addresses_of_this_machine_are_known(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "::", "::ffff:10.0.0.1", "localhost", "", "testclient"])
def test_other_addresses_are_not_taken_for_this_machine(address: str) -> None:
    assert not is_loopback(address)


# ------------------------------------------------------------------------------------------ over real sockets


def outer_address() -> str | None:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


@pytest.fixture
def everywhere() -> Iterator[ControlServer]:
    server = ControlServer(MemoryJob(), host="0.0.0.0", port=0, credentials=Credentials(TOKEN), strict_port=True)
    yield server
    server.close()


def test_no_header_changes_who_asks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    caplog.set_level(logging.INFO, logger="anabranch")
    server = ControlServer(MemoryJob(), host="127.0.0.1", port=0, credentials=Credentials(TOKEN), strict_port=True)
    try:
        headers = {"authorization": KNOWN, "x-forwarded-for": "192.0.2.66"}
        assert ask(server.url, "POST", "/rescale", {"workers": 3}, headers).status == 200
    finally:
        server.close()
    assert "127.0.0.1 asks for rescale" in caplog.text


def test_the_rules_hold_for_real_clients(everywhere: ControlServer) -> None:
    near = f"http://127.0.0.1:{everywhere.port}"
    assert ask(near, "GET", "/job").status == 200
    assert ask(near, "GET", "/scale?stage=3").status == 200
    refused = ask(near, "POST", "/rescale", {"workers": 5})
    assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert "Authorization: Bearer TOKEN" in refused.error
    assert ask(near, "POST", "/rescale", {"workers": 5}, {"authorization": KNOWN}).status == 200
    assert ask(near, "GET", "/%73cale?stage=3", headers={"sec-fetch-site": "cross-site"}).status == 403
    assert ask(near, "GET", "/job", headers={"host": "evil.example"}).status == 403
    assert len(ask(near, "GET", "/workers").json) == 5


def test_the_rules_hold_for_clients_that_are_not_on_loopback(everywhere: ControlServer) -> None:
    own = outer_address()
    if own is None:
        pytest.skip("this machine has loopback only")
    far = f"http://{own}:{everywhere.port}"
    assert ask(far, "GET", "/health").status == 200
    for path in ("/", "/job", "/nothing", "/scale?stage=3", "/openapi.json"):
        assert ask(far, "GET", path).status == 401
        assert ask(far, "GET", path, headers={"x-forwarded-for": "127.0.0.1"}).status == 401
    assert ask(far, "POST", "/health").status == 401
    known = {"authorization": KNOWN}
    assert ask(far, "GET", "/job", headers=known).status == 200
    assert "Use POST" in ask(far, "GET", "/scale?stage=3", headers=known).error
    assert ask(far, "POST", "/scale?stage=3", headers=known).status == 200


@pytest.mark.parametrize("name", ["token", "TOKEN", "access_token", "anabranch.token"])
def test_a_token_in_the_address_is_refused_with_what_to_do(everywhere: ControlServer, name: str) -> None:
    near = f"http://127.0.0.1:{everywhere.port}"
    for method, path in [("GET", "/job?"), ("GET", "/scale?stage=3&"), ("POST", "/scale?stage=3&"), ("GET", "/x?")]:
        answer = ask(near, method, f"{path}{name}=geheim", headers={"authorization": KNOWN})
        assert answer.status == 400
        assert "does not belong into the address" in answer.error
        assert "geheim" not in answer.error
    assert len(ask(near, "GET", "/workers").json) == 2
