"""Tokens in files: programs of the same user find them, and nobody else does."""

import json
import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anabranch.wire import keyring
from anabranch.wire.credentials import Credentials
from anabranch.wire.keyring import Entry, announce, find, new_token, user_token

JOB = Entry("http", "127.0.0.1", 9008, Credentials("geheim-ß", "c.pem", "k.pem", "a.pem"))


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    return home


def the_file(home: Path) -> Path:
    (found,) = (home / ".anabranch").iterdir()
    return found


@pytest.mark.parametrize(
    "url",
    [
        "localhost:9008",
        "http://localhost:9008/",
        "127.0.0.1:9008",
        "[::1]:9008",
        f"https://{socket.gethostname()}:9008",
    ],
)
def test_a_job_of_this_machine_is_found_by_its_url(url: str) -> None:
    announced = announce(JOB)
    assert find(url) == JOB
    announced.remove()
    assert find(url) is None


@pytest.mark.parametrize(
    "url", ["localhost:9009", "localhost", "192.0.2.1:9008", "evil.example:9008", "localhost:x", ""]
)
def test_a_token_is_for_no_other_place(url: str) -> None:
    announce(JOB)
    assert find(url) is None


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:9008"), ("::", "http://[::1]:9008"), ("127.0.0.1", "http://127.0.0.1:9008")],
)
def test_the_token_goes_to_the_address_that_the_job_has_taken(host: str, url: str) -> None:
    announce(Entry("http", host, 9008, Credentials("t")))
    found = find("localhost:9008")
    assert found is not None
    assert found.url == url


def test_only_the_user_can_read_the_file_and_it_is_gone_with_the_job(home: Path) -> None:
    before = os.umask(0)
    try:
        announced = announce(JOB)
    finally:
        os.umask(before)
    assert stat.S_IMODE((home / ".anabranch").stat().st_mode) == 0o700
    assert stat.S_IMODE(the_file(home).stat().st_mode) == 0o600
    announced.remove()
    announced.remove()
    assert list((home / ".anabranch").iterdir()) == []


def test_a_folder_that_others_can_read_is_closed_to_them(home: Path) -> None:
    (home / ".anabranch").mkdir(mode=0o755)
    announce(JOB)
    assert stat.S_IMODE((home / ".anabranch").stat().st_mode) == 0o700
    assert find("localhost:9008") == JOB


def test_a_file_that_others_can_get_at_is_not_used(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    announce(JOB)
    the_file(home).chmod(0o644)
    assert find("localhost:9008") is None
    assert "is not used, because others than its user can get at it" in caplog.text


def test_a_file_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(JOB)
    other = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    assert find("localhost:9008") is None


def test_a_link_that_somebody_has_put_there_is_not_followed(home: Path, tmp_path: Path) -> None:
    announce(JOB)
    file = the_file(home)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert find("localhost:9008") is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": 1}', "\0", '{"pid": "x", "began": []}'])
def test_a_damaged_file_is_none(home: Path, content: str) -> None:
    announce(JOB)
    the_file(home).write_text(content)
    assert find("localhost:9008") is None


def test_what_a_killed_driver_has_left_is_not_used_and_removed_by_the_next(home: Path) -> None:
    announce(JOB)
    file = the_file(home)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": ended.pid}))
    assert find("localhost:9008") is None
    announce(Entry("http", "127.0.0.1", 9009, Credentials("t")))
    assert not file.exists()


def test_a_process_that_has_the_number_of_a_killed_driver_is_not_taken_for_it(home: Path) -> None:
    announce(JOB)
    file = the_file(home)
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "began": document["began"] - 3600}))
    assert find("localhost:9008") is None


def test_without_a_home_the_temporary_directory_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    announce(JOB)
    assert find("localhost:9008") == JOB
    assert stat.S_IMODE((tmp_path / "tmp" / f"anabranch-{os.geteuid()}").stat().st_mode) == 0o700
    assert user_token() == user_token()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    announce(JOB).remove()
    assert "commands about the job need --token" in caplog.text
    with pytest.raises(keyring.SettingsError, match=r"no place for a token.*Set anabranch\.token"):
        user_token()


def test_all_programs_of_a_user_have_one_token_however_many_ask_first(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: user_token(), range(32)))
    assert len(tokens) == 1
    assert len(tokens.pop()) > 40
    assert stat.S_IMODE(the_file(home).stat().st_mode) == 0o600


def test_a_program_that_is_overtaken_while_it_looks_takes_the_token_of_the_other(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, others = os.open, list[str]()

    def overtaken(path: Any, *arguments: Any, **named: Any) -> int:
        try:
            return opened(path, *arguments, **named)
        except FileNotFoundError:
            if not others:
                others.append("")
                others.append(user_token())
            raise

    monkeypatch.setattr(os, "open", overtaken)
    assert user_token() == others[-1]
    assert the_file(home).exists()


def test_no_two_tokens_are_alike() -> None:
    assert len({new_token() for _ in range(100)}) == 100


def test_secrets_are_not_shown() -> None:
    assert "geheim" not in repr(JOB)
    assert "geheim" not in repr(JOB.credentials)
