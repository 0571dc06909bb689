"""Credentials: what cannot work is found when a process starts, and said."""

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from anabranch.core.errors import SettingsError
from anabranch.core.settings import Settings
from anabranch.wire.credentials import Credentials, is_loopback_host
from support.certificates import Authority


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path)


def test_without_files_there_is_no_tls() -> None:
    Credentials("t").check()
    assert not Credentials("t").uses_tls
    assert Credentials("t").location("h:1") == "grpc://h:1"


def test_a_worker_of_this_machine_is_asked_where_it_listens_and_nobody_who_takes_its_port_elsewhere(
    ours: Authority,
) -> None:
    assert Credentials("t").location("localhost:1") == "grpc://127.0.0.1:1"
    assert Credentials("t").location("[::1]:1") == "grpc://[::1]:1"
    # By TLS nobody else can answer, and the certificate may have only the name.
    assert ours.credentials("t").location("localhost:1") == "grpc+tls://localhost:1"
    assert Credentials("t").location("localhost:1", serves=True) == "grpc://localhost:1"


def test_what_fits_together_is_accepted(ours: Authority) -> None:
    for credentials in (
        ours.credentials("t"),
        ours.credentials("t", is_mutual=False),
        replace(ours.credentials("t"), authority=""),
    ):
        credentials.check()
        assert credentials.uses_tls
        assert credentials.location("h:1") == "grpc+tls://h:1"
    assert not ours.credentials("t", is_mutual=False).serves_tls


def test_settings_name_the_files() -> None:
    texts = {"token": "t", "tlsCertificate": "c", "tlsKey": "k", "tlsAuthority": "a"}
    settings = Settings.from_texts(("here", {f"anabranch.{name}": value for name, value in texts.items()}))
    assert Credentials.of(settings) == Credentials("t", "c", "k", "a")


@pytest.mark.parametrize("missing", ["certificate", "key"])
def test_half_a_pair_is_refused(ours: Authority, missing: str) -> None:
    with pytest.raises(SettingsError, match=r"is set, but anabranch\.tls\w+ is not\. Set both"):
        replace(ours.credentials("t"), **{missing: ""}).check()


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_files_that_are_missing_or_no_pem_are_named(ours: Authority, tmp_path: Path, name: str) -> None:
    absent, text = str(tmp_path / "absent.pem"), tmp_path / "text.pem"
    text.write_text("hello")
    with pytest.raises(SettingsError, match=r"anabranch\.tls\w+ names .*absent\.pem.*No such file.*Name a PEM file"):
        replace(ours.credentials("t"), **{name: absent}).check()
    with pytest.raises(SettingsError, match=r"text\.pem.*PEM"):
        replace(ours.credentials("t"), **{name: str(text)}).check()


def test_a_key_of_another_certificate_is_refused(ours: Authority) -> None:
    with pytest.raises(SettingsError, match="the key does not belong to the certificate"):
        replace(ours.credentials("t"), key=ours.sign("other")[1]).check()


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(ours: Authority, tmp_path: Path) -> None:
    key, locked = ec.generate_private_key(ec.SECP256R1()), tmp_path / "locked.pem"
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))
    with pytest.raises(SettingsError, match="the key has no password"):
        replace(ours.credentials("t"), key=str(locked)).check()


def test_a_certificate_that_others_will_not_accept_is_refused(ours: Authority, tmp_path: Path) -> None:
    theirs = Authority.make(tmp_path, "theirs")
    for files, reason in [(ours.sign("old", days=-1), "has expired"), (theirs.sign(), "unable to get local issuer")]:
        with pytest.raises(SettingsError, match=rf"does not pass the check against .*tlsAuthority\): .*{reason}"):
            Credentials("t", *files, ours.path).check()


@pytest.mark.parametrize("token", ["x" * 5000, "a\nb", "a\0b"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(SettingsError, match=r"Set anabranch\.token to letters and digits") as caught:
        Credentials(token).check()
    assert token not in str(caught.value)


def test_hosts_of_this_machine_are_known() -> None:
    assert [is_loopback_host(h) for h in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")] == [True] * 5
    assert not any(is_loopback_host(h) for h in ("0.0.0.0", "10.0.0.1", "example.org", "", "localhost.evil.example"))
