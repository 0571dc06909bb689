"""The command ``anabranch worker``: which token it has, and what it warns of."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from anabranch.core.answers import WorkerHealth
from anabranch.core.errors import WorkerError
from anabranch.core.requests import Health
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials
from anabranch.wire.keyring import user_token


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """A worker's address, and what it has written to standard error when it has ended."""
    command = [sys.executable, "-m", "anabranch", "worker", *arguments]
    said: list[str] = []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"], said
    finally:
        process.kill()
        said.append(process.communicate(timeout=60)[1])


def ask(address: str, token: str) -> WorkerHealth:
    client = WorkerClient(address, timeout_s=20, credentials=Credentials(token))
    try:
        return client.call(Health())
    finally:
        client.close()


def refuses(address: str, *tokens: str) -> None:
    for token in tokens:
        with pytest.raises(WorkerError, match="asks for another token"):
            ask(address, token)


@pytest.fixture(autouse=True)
def _no_token_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_TOKEN", raising=False)


def test_a_worker_that_is_given_no_token_has_that_of_its_user() -> None:
    with running("--id", "w") as (address, said):
        assert ask(address, user_token()).worker == "w"
        refuses(address, "", "guess")
    assert said == [""]


def test_a_token_in_the_environment_is_used_and_not_warned_of() -> None:
    with running(ANABRANCH_TOKEN="geheim") as (address, said):
        assert ask(address, "geheim")
        refuses(address, user_token())
    assert said == [""]


def test_secrets_in_the_command_line_are_warned_of_and_not_repeated() -> None:
    with running("--token", "geheim", "--redis-url", "redis://:geheim@localhost:1/0") as (address, said):
        assert ask(address, "geheim")
    assert "can read --token in the command line of this process; set ANABRANCH_TOKEN instead" in said[0]
    assert "can read --redis-url in the command line" in said[0]
    assert "geheim" not in said[0]


def test_a_worker_that_others_can_reach_without_tls_says_what_they_can_read() -> None:
    with running("--host", "0.0.0.0", ANABRANCH_TOKEN="geheim") as (_, said):
        pass
    assert "without TLS: whoever listens in on the way reads the token and all state" in said[0]
