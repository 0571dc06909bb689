"""What tests of the workers may ask for: a Redis, started once, a store of each kind, and real workers in a job."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.core.schemas import Layout
from anabranch.worker.stores import Store
from anabranch.worker.stores.redis_connection import RedisConnection, connect
from support.redis_server import WholeStore, running_redis
from support.state_workers import Driver, MakeDriver, making
from support.stores import open_store


@pytest.fixture(scope="session")
def redis_connection() -> Iterator[RedisConnection]:
    with running_redis() as server:
        connection = connect(server.url)
        yield connection
        connection.close()


@pytest.fixture(params=["memory", "rocksdb", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_kind(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[Layout, int], Store]:
    """Opens a store for all key groups of a variable."""

    def opened(layout: Layout, key_groups: int) -> Store:
        if kind == "redis":
            return WholeStore(layout, key_groups, request.getfixturevalue("redis_connection"))
        return open_store(kind, layout, key_groups, tmp_path / "db")

    return opened


@pytest.fixture(params=["memory", "rocksdb"])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeDriver]:
    with making(tmp_path) as make:
        yield make


@pytest.fixture
def two(make: MakeDriver) -> Driver:
    return make("a", "b")
