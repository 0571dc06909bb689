"""What tests of the stores may ask for: a Redis, started once."""

from collections.abc import Iterator

import pytest

from anabranch.worker.stores.redis_connection import RedisConnection, connect
from support.redis_server import running_redis


@pytest.fixture(scope="session")
def redis_connection() -> Iterator[RedisConnection]:
    with running_redis() as server:
        connection = connect(server.url)
        yield connection
        connection.close()
