"""Real Redis servers on free ports: one by itself, with a password or without, and a cluster of three. None saves."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
import redis

from anabranch.core.schemas import Layout
from anabranch.worker.state.rows import VariableCodec
from anabranch.worker.stores.redis import RedisStore
from anabranch.worker.stores.redis_connection import RedisConnection
from support.waiting import wait_until

_START_S = 20
#: A port may be taken between the moment it is found and that of its use.
_ATTEMPTS = 5


@dataclass
class RedisServer:
    """A server that can be killed and started again, as empty as the first time."""

    folder: Path
    arguments: tuple[str, ...]
    password: str | None = None
    port: int = 0

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self.password, socket_timeout=_START_S)

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--logfile", str(self.folder / "log"), *self.arguments]
        if self.password:
            command += ["--requirepass", self.password]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with self.client() as client:
            wait_until(lambda: self._answers(client))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self, client: redis.Redis) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise ChildProcessError((self.folder / "log").read_text())
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


@contextmanager
def running_redis(*arguments: str, password: str | None = None) -> Iterator[RedisServer]:
    """A server of its own, with further arguments of ``redis-server``."""
    if shutil.which("redis-server") is None:
        pytest.fail(
            "This test needs redis-server; install it (Debian, Ubuntu: apt-get install redis-server; macOS: brew "
            "install redis) and run it again.",
            pytrace=False,
        )
    with TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), arguments, password)
        try:
            for attempt in range(_ATTEMPTS):
                server.port = _free_port()
                try:
                    server.start()
                    break
                except ChildProcessError:
                    if attempt == _ATTEMPTS - 1:
                        raise
            yield server
        finally:
            server.kill()


@contextmanager
def running_redis_cluster() -> Iterator[str]:
    """The URL of a cluster of three servers."""
    with ExitStack() as stack:
        servers = []
        for _ in range(3):
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            servers.append(stack.enter_context(running_redis(*options)))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(command, check=True, capture_output=True, timeout=_START_S)
        for server in servers:
            with server.client() as client:
                wait_until(lambda client=client: client.cluster("INFO")["cluster_state"] == "ok")
        yield f"redis+cluster://{addresses[0]}"


def new_prefix() -> str:
    """What begins the names of Redis keys that no other test has."""
    return f"test:{uuid4().hex}"


class WholeStore(RedisStore):
    """Uses all key groups, also those that were dropped: like the stores that are not shared."""

    def __init__(self, layout: Layout, key_groups: int, connection: RedisConnection) -> None:
        super().__init__(VariableCodec(layout).shape(key_groups), connection, new_prefix())
        self.use(range(key_groups), "1")

    def drop_groups(self, groups: "list[int] | set[int] | range") -> None:  # type: ignore[override]
        super().drop_groups(groups)
        self.use(groups, "1")


def _free_port() -> int:
    """Also free 10000 above, where the servers of a cluster talk to each other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port
