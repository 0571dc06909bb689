"""Secrets among the settings: used, and shown to nobody."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.api.test_setting_sources import session

from anabranch.api.settings import resolve_settings
from anabranch.api.start import _check_exposure as check_exposure
from anabranch.core.errors import SettingsError
from anabranch.core.settings import Settings
from anabranch.wire.credentials import Credentials
from anabranch.worker.server.process import WorkerOptions
from support.certificates import Authority

URL = "redis://ann:geheim@db:6379/0"


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANABRANCH_TOKEN", raising=False)


def test_settings_are_shown_without_their_secrets() -> None:
    settings = Settings(token="geheim", redis_url=URL, workers=3)
    assert "geheim" not in repr(settings)
    assert "workers=3" in repr(settings)
    assert "redis://ann:…@db:6379/0" in repr(settings)
    assert "token='…'" in repr(settings)
    assert "token=''" in repr(Settings())
    assert "geheim" not in repr(Settings(redis_password="geheim"))


def test_options_of_workers_are_shown_without_their_secrets() -> None:
    options = WorkerOptions("h", 1, "redis", URL, None, Credentials("geheim"), "w", exit_with_parent=False)
    assert "geheim" not in repr(options)


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("redis://db:6379/0", "redis://:p%2Fs%3A%40@db:6379/0"),
        ("rediss://ann@db", "rediss://ann:p%2Fs%3A%40@db"),
        ("redis+cluster://[::1]:7000", "redis+cluster://:p%2Fs%3A%40@[::1]:7000"),
    ],
)
def test_the_password_of_redis_has_a_setting_of_its_own(url: str, location: str) -> None:
    assert Settings(redis_url=url, redis_password="p/s:@").redis_location == location
    assert Settings(redis_url=url).redis_location == url


def test_a_password_in_both_places_is_refused_and_not_shown() -> None:
    with pytest.raises(SettingsError, match=r"anabranch\.redisPassword.*Leave one out") as caught:
        Settings(redis_url=URL, redis_password="other")
    assert "geheim" not in str(caught.value)


def test_a_password_where_spark_shows_it_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for spark in (session({"spark.anabranch.redisUrl": URL}), session({}, {"spark.anabranch.redisurl": URL})):
        with pytest.raises(SettingsError, match=r"Spark shows.*Set spark\.anabranch\.redisPassword") as caught:
            resolve_settings(spark, {})
        assert "geheim" not in str(caught.value)
    assert resolve_settings(session(), {"anabranch.redisUrl": URL}).redis_location == URL
    hidden = {"spark.anabranch.redisUrl": "redis://ann@db:6379/0", "spark.anabranch.redisPassword": "geheim"}
    assert resolve_settings(session(hidden), {}).redis_location == URL
    monkeypatch.setenv("ANABRANCH_REDIS_URL", URL)
    assert resolve_settings(session(), {}).redis_location == URL


@pytest.mark.parametrize(
    "text",
    [
        "token = 'geheim'",
        "[anabranch]\nredis_password = 'geheim'",
        f"redisUrl = '{URL}'",
        "'anabranch.token' = 'geheim'",
    ],
)
def test_a_file_with_secrets_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = tmp_path / "anabranch.toml"
    file.write_text(text)
    file.chmod(0o600)
    assert "geheim" in Credentials.of(found := resolve_settings(session(), {})).token + found.redis_location
    assert caplog.text == ""
    file.chmod(0o644)
    resolve_settings(session(), {})
    assert "other users of this machine can read the secrets in anabranch.toml: chmod 600 it" in caplog.text
    assert "geheim" not in caplog.text
    caplog.clear()
    file.write_text("workers = 3\nredisUrl = 'redis://db:6379/0'")
    resolve_settings(session(), {})
    assert caplog.text == ""


@pytest.fixture
def shown() -> Iterator[str]:
    """A token that stands in the command line of a process of ours, as Spark puts settings of its builder there."""
    token = "vor-aller-augen"
    command = [sys.executable, "-c", "input()", "--conf", f"spark.anabranch.token={token}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield token
        process.kill()


def test_a_token_in_a_command_line_is_warned_of(shown: str, caplog: pytest.LogCaptureFixture) -> None:
    def resolved(token: str, **options: Any) -> Settings:
        return resolve_settings(session({"spark.anabranch.token": token}), options)

    assert resolved("another one").token == "another one"
    assert caplog.text == ""
    assert resolved(shown).token == shown
    assert "all users of this machine can read spark.anabranch.token in the command line of" in caplog.text
    assert shown not in caplog.text


def test_workers_that_are_reached_without_tls_are_warned_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    near, far = ("localhost:1", "[::1]:2"), ("192.0.2.1:3", "worker.example:4")
    check_exposure(Settings(token="geheim", worker_addresses=near))
    ours = Authority.make(tmp_path)
    check_exposure(Settings(token="geheim", worker_addresses=far, tls_authority=ours.path))
    assert caplog.text == ""
    check_exposure(Settings(token="geheim", worker_addresses=near + far))
    assert "192.0.2.1:3, worker.example:4 are reached without TLS" in caplog.text
    assert "reads the token and all state" in caplog.text
    assert "geheim" not in caplog.text
