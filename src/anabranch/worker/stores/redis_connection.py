"""The way to a Redis server or cluster: commands in bounded pieces, and errors that say what to do."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from uuid import uuid4

import redis
from redis.backoff import ExponentialBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from anabranch.core.errors import SettingsError, WorkerError

logger = logging.getLogger(__name__)

#: A command as Redis takes it: its name, then its arguments.
Command = Sequence[bytes | str | int]

#: How each scheme is spoken: as which scheme redis-py knows it, and whether it leads to a cluster.
_SCHEMES = {
    "redis": ("redis", False),
    "rediss": ("rediss", False),
    "redis+cluster": ("redis", True),
    "rediss+cluster": ("rediss", True),
}
_EXAMPLES = "redis://host:6379/0, rediss://user:password@host:6379/0 or redis+cluster://host:6379"
_CONNECT_TIMEOUT_S = 5.0
_RETRIES = 2
#: How long a Redis that cannot be reached is tried again, and how often: it may be starting anew. Shorter than callers
#: of a worker wait for its answer.
PATIENCE_S = 15.0
_RETRY_S = 0.25
#: Bounds of what is sent before the answers are read: the rest follows when these are there.
_PIPELINE_COMMANDS = 1 << 11
_PIPELINE_BYTES = 8 << 20
_SCAN_KEYS = 1000


class RedisConnection:
    """A server or cluster by its URL. Any thread may call any method; all stores of a process share one."""

    def __init__(self, url: str, *, timeout_s: float = 10.0, patience_s: float = PATIENCE_S) -> None:
        parts = _parsed(url)
        scheme, self._is_cluster = _SCHEMES[parts.scheme]
        #: Where it is, with neither user nor password.
        self.address = f"{parts.hostname}:{parts.port or 6379}{'' if self._is_cluster else parts.path}"
        self._timeout_s = timeout_s
        self._outage = _Outage(patience_s)
        #: What no message may show.
        self._secrets = [secret for secret in {parts.password, unquote(parts.password or "")} if secret]
        #: The scripts in use, by their digest: a server forgets them when it starts.
        self._scripts: dict[bytes, str] = {}
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": min(timeout_s, _CONNECT_TIMEOUT_S),
            # Whatever is sent may be sent again: every command of a store does the same twice as once.
            "retry": Retry(ExponentialBackoff(cap=1.0, base=0.05), _RETRIES),
        }
        plain_url = urlunsplit(parts._replace(scheme=scheme))
        self._client: Any
        with self._errors():
            if self._is_cluster:
                self._client = RedisCluster.from_url(plain_url, **options)
            else:
                self._client = redis.Redis.from_url(plain_url, **options)

    def script(self, text: str) -> bytes:
        """The digest by which EVALSHA runs this script."""
        digest = sha1(text.encode(), usedforsecurity=False).hexdigest().encode()
        self._scripts[digest] = text
        return digest

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to these commands, in their order, sent in bounded pieces.

        Each must do the same twice as once, because a piece is sent again when the connection fails. While Redis
        cannot be reached, it is tried again for a while.
        """
        answers: list[Any] = []
        for piece in _pieces(commands):
            with self._errors():
                answers += self._run_patiently(piece)
        return answers

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """What this thread runs meanwhile fails at once if Redis cannot be reached."""
        self._outage.of_thread.fails_at_once = True
        try:
            yield
        finally:
            self._outage.of_thread.fails_at_once = False

    def check(self) -> None:
        """Make sure that state can be kept here; an error says what is wrong."""
        name = f"anabranch:check:{uuid4().hex}"
        with self._errors():
            for node in self._nodes():
                node.ping()
            self._client.set(name, b"", ex=60)
            self._client.unlink(name)
            self._load_scripts()
        self._check_eviction()

    def keys(self, prefix: str) -> Iterator[list[bytes]]:
        """The keys that begin with the prefix and a colon, in bounded pieces; some may come twice."""
        pattern = re.sub(r"([\\*?\[\]^])", r"\\\1", prefix) + ":*"
        with self._errors():
            nodes = self._nodes()
        for node in nodes:
            cursor = -1
            while cursor:
                with self._errors():
                    cursor, found = node.scan(max(cursor, 0), match=pattern, count=_SCAN_KEYS)
                if found:
                    yield found

    def close(self) -> None:
        """Let go of all connections."""
        with self._errors():
            self._client.close()

    def _run_patiently(self, piece: Sequence[Command]) -> list[Any]:
        while True:
            try:
                answers = self._run_piece(piece)
            except (RedisError, RedisClusterException, OSError) as error:
                if not _is_away(error) or not self._outage.may_wait():
                    raise
                logger.warning("Redis at %s cannot be reached, and is tried again", self.address)
                self._outage.wait()
            else:
                self._outage.end()
                return answers

    def _run_piece(self, piece: Sequence[Command]) -> list[Any]:
        answers = self._answers(piece)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            self._load_scripts()
            answers = self._answers(piece)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _answers(self, piece: Sequence[Command]) -> list[Any]:
        pipeline = self._client.pipeline() if self._is_cluster else self._client.pipeline(transaction=False)
        with pipeline:
            for command in piece:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def _load_scripts(self) -> None:
        for node in self._nodes():
            for text in self._scripts.values():
                node.script_load(text)

    def _nodes(self) -> list[Any]:
        """A client for each server that takes writes."""
        if not self._is_cluster:
            return [self._client]
        return [self._client.get_redis_connection(node) for node in self._client.get_primaries()]

    def _check_eviction(self) -> None:
        try:
            policies = {str(node.info("memory").get("maxmemory_policy", "")) for node in self._nodes()}
        except NoPermissionError:
            logger.warning("Redis at %s does not tell its maxmemory-policy; it must not evict keys", self.address)
            return
        except (RedisError, RedisClusterException) as error:
            raise self._error(error) from None
        for policy in policies:
            if policy.startswith("allkeys"):
                raise WorkerError(
                    f"Redis at {self.address} throws away state when its memory is full (maxmemory-policy {policy}). "
                    "Set maxmemory-policy to noeviction, or use another Redis."
                )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, RedisClusterException, OSError) as error:
            # Without its cause: redis-py may quote what must not be shown.
            raise self._error(error) from None

    def _error(self, error: Exception) -> WorkerError:
        text = " ".join(str(error).split())
        for secret in self._secrets:
            text = text.replace(secret, "***")
        where = f"Redis at {self.address}"
        refused = isinstance(error, AuthenticationError | AuthorizationError) or "NOAUTH" in text or "WRONGPASS" in text
        if refused:
            return WorkerError(f"{where} refuses the user or password ({text}). Correct them in the URL of the store.")
        if isinstance(error, NoPermissionError):
            return WorkerError(f"{where} does not permit what a store does ({text}). Give the user more rights.")
        if isinstance(error, OutOfMemoryError):
            return WorkerError(
                f"{where} is out of memory ({text}). Give it more, or raise its maxmemory; then try again."
            )
        if isinstance(error, ReadOnlyError):
            return WorkerError(f"{where} is a replica and takes no writes ({text}). Name the primary in the URL.")
        if isinstance(error, RedisTimeoutError | TimeoutError):
            return WorkerError(
                f"{where} did not answer within {self._timeout_s:g} s ({text}). Check the network and its load; trying "
                "again may help."
            )
        if isinstance(error, redis.ConnectionError | RedisClusterException | OSError):
            return WorkerError(
                f"{where} cannot be reached ({text}). Check that it runs, and that the URL has the right "
                "scheme, host and port; then try again."
            )
        return WorkerError(f"{where} refused a command ({text}). Check its version (6.2 or newer) and its log.")


class _Outage:
    """How long Redis has been away, as far as any thread has noticed: who comes late waits for less."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: float | None = None
        self._last_s = 0.0
        self._over = threading.Event()
        self.of_thread = threading.local()

    def may_wait(self) -> bool:
        """Notes that Redis is away; returns whether to try again."""
        now_s = time.monotonic()
        # An outage that no thread has met for long may have been over since.
        if self._since_s is None or now_s - self._last_s > self._patience_s:
            self._since_s = now_s
        self._last_s = now_s
        self._over.clear()
        is_patient = not getattr(self.of_thread, "fails_at_once", False)
        return is_patient and now_s - self._since_s < self._patience_s

    def wait(self) -> None:
        """Wait until it is time to try again, or another thread has reached Redis."""
        self._over.wait(_RETRY_S)

    def end(self) -> None:
        self._since_s = None
        self._over.set()


def connect(url: str, *, timeout_s: float = 10.0, patience_s: float = PATIENCE_S) -> RedisConnection:
    """A connection that has been checked: Redis answers, takes writes and does not throw keys away."""
    connection = RedisConnection(url, timeout_s=timeout_s, patience_s=patience_s)
    connection.check()
    return connection


def delete_prefix(connection: RedisConnection, prefix: str) -> None:
    """Remove every key that begins with the prefix and a colon: what is left of a job."""
    for keys in connection.keys(prefix):
        connection.run([("UNLINK", key) for key in keys])


def _parsed(url: str) -> SplitResult:
    """The parts of a URL that is fit for use. No error shows it: the password may be anywhere in a misspelt one."""
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        raise SettingsError(
            "The URL of Redis cannot be read; write it like "
            f"{_EXAMPLES}, with / : @ # ? in a password written as %2F %3A %40 %23 %3F."
        ) from None
    if parts.scheme not in _SCHEMES or not parts.hostname or not port_is_fine:
        raise SettingsError(f"The URL of Redis needs a known scheme and a host; write it like {_EXAMPLES}.")
    database = parts.path.strip("/")
    if _SCHEMES[parts.scheme][1] and database not in ("", "0"):
        raise SettingsError("A Redis Cluster has no numbered databases; leave the number out of its URL.")
    if not re.fullmatch(r"\d*", database):
        raise SettingsError(f"The database of a Redis is a number; write the URL like {_EXAMPLES}.")
    return parts


def _is_away(error: Exception) -> bool:
    """Whether Redis may be starting anew. One that does not answer in time has been waited for already."""
    refusals = AuthenticationError | AuthorizationError | RedisTimeoutError | TimeoutError
    away = redis.ConnectionError | ClusterDownError | RedisClusterException | OSError
    return isinstance(error, away) and not isinstance(error, refusals)


def _pieces(commands: Sequence[Command]) -> Iterator[Sequence[Command]]:
    start = size = 0
    for end, command in enumerate(commands):
        bytes_ = sum(len(argument) for argument in command if not isinstance(argument, int))
        if end > start and (size + bytes_ > _PIPELINE_BYTES or end - start == _PIPELINE_COMMANDS):
            yield commands[start:end]
            start, size = end, 0
        size += bytes_
    if start < len(commands):
        yield commands[start:]
