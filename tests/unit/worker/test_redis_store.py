"""The store in Redis: what several workers share, what is left behind, and a Redis that forgets."""

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import redis
from redis.cluster import key_slot

from anabranch.core.errors import WorkerError
from anabranch.core.schemas import HASH, OP, POSITION, Layout, Op, VariableKind, VariableSpec
from anabranch.worker.state.rows import Changes, Keys, Rows, VariableCodec
from anabranch.worker.stores import redis_connection as connections
from anabranch.worker.stores import redis_rows
from anabranch.worker.stores.redis import RedisStore
from anabranch.worker.stores.redis_connection import RedisConnection, connect, delete_prefix
from support.redis_server import RedisServer, new_prefix, running_redis, running_redis_cluster

KEY_GROUPS = 16
ALL = range(KEY_GROUPS)
VALUE = Layout(pa.schema([("k", pa.int64())]), VariableSpec("v", VariableKind.VALUE, pa.schema([("x", pa.string())])))
LIST = Layout(pa.schema([("k", pa.string())]), VariableSpec("v", VariableKind.LIST, pa.schema([("x", pa.int64())])))


@pytest.fixture(scope="module")
def cluster_connection() -> Iterator[RedisConnection]:
    with running_redis_cluster() as url:
        connection = connect(url)
        yield connection
        connection.close()


@pytest.fixture(params=["server", "cluster"])
def connection(request: pytest.FixtureRequest) -> RedisConnection:
    name = "redis_connection" if request.param == "server" else "cluster_connection"
    connection: RedisConnection = request.getfixturevalue(name)
    return connection


@pytest.fixture(params=[VALUE, LIST], ids=["value", "list"])
def layout(request: pytest.FixtureRequest) -> Layout:
    layout: Layout = request.param
    return layout


Open = Callable[..., RedisStore]


@pytest.fixture
def prefix() -> str:
    return new_prefix()


@pytest.fixture
def open_worker(connection: RedisConnection, layout: Layout, prefix: str) -> Iterator[Open]:
    """Opens the store of another worker on the same state."""
    yield lambda: RedisStore(VariableCodec(layout).shape(KEY_GROUPS), connection, prefix)
    delete_prefix(connection, prefix)


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of commands in each round trip to Redis."""
    seen: list[int] = []
    for kind in (redis.client.Pipeline, redis.cluster.ClusterPipeline):

        def execute(pipeline: Any, *arguments: Any, known: Any = kind.execute, **named: Any) -> Any:
            seen.append(len(pipeline))
            return known(pipeline, *arguments, **named)

        monkeypatch.setattr(kind, "execute", execute)
    return seen


def changes(layout: Layout, numbers: range, value: int, op: int = Op.PUT) -> Changes:
    """One entry per number; key n has the hash n, so the key group n modulo 16."""
    count = len(numbers)
    columns = {
        HASH: pa.array(numbers, pa.int64()),
        OP: pa.array([op] * count, pa.int8()),
        "k": pa.array(numbers, pa.int64()).cast(layout.key.field("k").type),
        POSITION: pa.array([0] * count, pa.int64()),
        "x": pa.array([value] * count, pa.int64()).cast(layout.value.field("x").type),
    }
    table = pa.table({name: columns[name] for name in layout.changes.names}, schema=layout.changes)
    return VariableCodec(layout).encode_changes(table)


def keys(layout: Layout, numbers: range) -> Keys:
    return changes(layout, numbers, 0).keys_of(np.arange(len(numbers)))


def read(store: RedisStore, layout: Layout, numbers: range) -> dict[int, int]:
    answer = VariableCodec(layout).decode_answers(store.read(keys(layout, numbers)))
    return {numbers[row["_index"]]: int(row["x"]) for row in answer.to_pylist()}


def contents(snapshot: Iterator[Rows], layout: Layout) -> dict[int, int]:
    rows = [row for part in snapshot for row in VariableCodec(layout).decode_rows(part).to_pylist()]
    assert len({row["k"] for row in rows}) == len(rows)
    return {row[HASH]: int(row["x"]) for row in rows}


def names(connection: RedisConnection, prefix: str) -> set[bytes]:
    return {name for piece in connection.keys(prefix) for name in piece}


# ------------------------------------------------------------------------------------------ several workers


def test_a_new_owner_goes_on_with_what_the_old_one_left(open_worker: Open, layout: Layout) -> None:
    old, new = open_worker(), open_worker()
    assert old.use(ALL, "a") == set(ALL)
    old.apply(changes(layout, range(400), 1))
    old.hand_over(range(4))
    assert new.use(range(4), "a") == frozenset()
    mine = {n: 1 for n in range(400) if n % KEY_GROUPS < 4}
    assert contents(new.snapshot(None), layout) == mine
    assert (old.rows(), new.rows()) == (300, 100)
    new.apply(changes(layout, range(16, 20), 0, Op.DELETE))
    new.apply(changes(layout, range(0, 4), 2))
    assert read(new, layout, range(16, 20)) == {}
    assert read(new, layout, range(0, 4)) == dict.fromkeys(range(4), 2)
    assert (old.rows(), new.rows()) == (300, 96)


def test_key_groups_that_are_not_in_use_are_refused(open_worker: Open, layout: Layout) -> None:
    store = open_worker()
    store.use([1, 2], "a")
    for refused in (
        lambda: store.read(keys(layout, range(1, 4))),
        lambda: store.apply(changes(layout, range(1, 4), 1)),
        lambda: store.snapshot([1, 2, 3]),
    ):
        with pytest.raises(WorkerError, match="Key group 3 is not in use"):
            refused()
    assert store.rows() == 0
    store.hand_over([2])
    with pytest.raises(WorkerError, match="Key group 2 is not in use"):
        store.read(keys(layout, range(2, 3)))
    store.drop_groups([1, 7])
    with pytest.raises(WorkerError, match="Key group 1 is not in use"):
        store.read(keys(layout, range(1, 2)))
    with pytest.raises(WorkerError, match="no key group 16"):
        store.use([16], "a")


def test_a_new_incarnation_starts_empty_and_the_torn_one_can_be_removed(
    open_worker: Open, connection: RedisConnection, layout: Layout, prefix: str
) -> None:
    killed, heir = open_worker(), open_worker()
    killed.use(ALL, "a")
    killed.apply(changes(layout, range(64), 1))
    assert heir.use(ALL, "b") == set(ALL)
    assert heir.rows() == 0
    heir.apply(changes(layout, range(32), 2))
    delete_prefix(connection, f"{prefix}:a")
    assert contents(heir.snapshot(None), layout) == dict.fromkeys(range(32), 2)
    with pytest.raises(WorkerError, match="no longer has the state"):
        killed.rows()


def test_what_a_store_used_under_another_incarnation_is_removed(
    open_worker: Open, connection: RedisConnection, layout: Layout, prefix: str
) -> None:
    store = open_worker()
    store.use(ALL, "a")
    store.apply(changes(layout, range(64), 1))
    snapshot = store.snapshot(None)
    assert store.use(range(8), "b") == set(range(8))
    assert store.use(range(8, 16), "a") == frozenset()
    assert store.rows() == 32
    assert contents(snapshot, layout) == dict.fromkeys(range(64), 1)
    left = {int(name.split(b"{")[1].split(b"}")[0]) for name in names(connection, prefix) if b":a:{" in name}
    assert left == set(range(8, 16))


def test_a_snapshot_stays_as_it_was_while_another_worker_goes_on(open_worker: Open, layout: Layout) -> None:
    old, new = open_worker(), open_worker()
    old.use(ALL, "a")
    old.apply(changes(layout, range(400), 1))
    snapshot = old.snapshot(range(8))
    old.hand_over(range(4))
    new.use(range(4), "a")
    new.apply(changes(layout, range(400)[:4], 2))
    old.apply(changes(layout, range(5, 6), 3))
    old.drop_groups([6])
    assert contents(snapshot, layout) == {n: 1 for n in range(400) if n % KEY_GROUPS < 8}


def test_only_what_changes_is_kept_for_a_snapshot_and_only_while_there_is_one(
    open_worker: Open, connection: RedisConnection, layout: Layout, prefix: str, trips: list[int]
) -> None:
    store = open_worker()
    store.use(ALL, "a")
    store.apply(changes(layout, range(160), 1))
    snapshot = store.snapshot(None)
    trips.clear()
    store.apply(changes(layout, range(2), 2))
    assert len(trips) > 1, "the key groups are read before they change"
    del snapshot
    trips.clear()
    store.apply(changes(layout, range(2), 3))
    assert len(trips) == 1
    snapshot = store.snapshot(None)
    store.apply(changes(layout, range(2), 4))
    delete_prefix(connection, prefix)
    # All rows of two key groups; the others were left in Redis.
    assert len(next(snapshot)) == 20
    with pytest.raises(WorkerError, match="no longer has the state"):
        next(snapshot)


# ------------------------------------------------------------------------------------------ what is in Redis


def test_all_of_a_key_group_is_in_one_slot_under_its_prefix_and_incarnation(
    open_worker: Open, connection: RedisConnection, layout: Layout, prefix: str
) -> None:
    store = open_worker()
    store.use(ALL, "a-1.b")
    store.apply(changes(layout, range(100), 1))
    found = names(connection, prefix)
    for group in ALL:
        start = f"{prefix}:a-1.b:{{{group}}}:".encode()
        of_group = {name for name in found if name.startswith(start)}
        assert len({key_slot(name) for name in of_group}) == 1
        found -= of_group
    assert not found


def test_only_what_is_dropped_leaves_redis(
    open_worker: Open, connection: RedisConnection, layout: Layout, prefix: str
) -> None:
    store = open_worker()
    store.use(ALL, "a")
    assert store.size_bytes() > 0
    store.apply(changes(layout, range(1600), 1))
    before, size = names(connection, prefix), store.size_bytes()
    assert 1600 * 10 < size < 1600 * 400
    store.drop_groups(range(8))
    after = names(connection, prefix)
    assert 0 < len(after) < len(before)
    assert size / 4 < store.size_bytes() < size / 4 * 3
    store.hand_over(range(8, 12))
    assert names(connection, prefix) == after
    store.destroy()
    left = names(connection, prefix)
    assert left == {name for name in after if any(b"{%d}" % group in name for group in range(8, 12))}
    store.destroy()
    again = open_worker()
    again.use(range(8, 12), "a")
    again.hand_over(range(8, 12))
    assert names(connection, prefix) == left


@pytest.mark.parametrize("op", [Op.DELETE, Op.CLEAR])
def test_keys_without_entries_take_no_room(
    open_worker: Open, connection: RedisConnection, layout: Layout, op: int, prefix: str
) -> None:
    store = open_worker()
    store.use(ALL, "a")
    empty = names(connection, prefix)
    store.apply(changes(layout, range(100), 1))
    store.apply(changes(layout, range(100), 0, op))
    assert names(connection, prefix) == empty
    assert store.rows() == 0


def test_delete_prefix_removes_a_job_and_no_other(connection: RedisConnection) -> None:
    shape, prefix = VariableCodec(LIST).shape(KEY_GROUPS), new_prefix() + "[1]*"
    prefixes = [prefix, f"{prefix}:v", f"{prefix}0", f"x{prefix}"]
    stores = [RedisStore(shape, connection, name) for name in prefixes]
    for store in stores:
        store.use(ALL, "a")
        store.apply(changes(LIST, range(1000), 1))
    delete_prefix(connection, prefix)
    assert [bool(names(connection, name)) for name in prefixes] == [False, False, True, True]
    assert [store.rows() for store in stores[2:]] == [1000, 1000]
    for store in stores[2:]:
        store.destroy()


@pytest.mark.parametrize("count", [1, 2000])
def test_a_batch_is_one_round_trip(open_worker: Open, layout: Layout, count: int, trips: list[int]) -> None:
    store = open_worker()
    store.use(ALL, "a")
    store.apply(changes(layout, range(2 * count), 1))
    trips.clear()
    store.apply(changes(layout, range(count), 2))
    store.read(keys(layout, range(count)))
    assert trips == [min(count, KEY_GROUPS)] * 2


def test_a_list_longer_than_a_command_is_cleared_once(redis_connection: RedisConnection) -> None:
    store = RedisStore(VariableCodec(LIST).shape(1), redis_connection, new_prefix())
    store.use([0], "a")
    count = 5000

    def longer(positions: range, clears: bool) -> Changes:
        rows = [(7, Op.PUT, "k", position, position) for position in positions]
        if clears:
            rows.insert(len(rows) // 2, (7, Op.CLEAR, "k", None, None))
        table = pa.table(list(zip(*rows, strict=True)), schema=LIST.changes)
        return VariableCodec(LIST).encode_changes(table)

    for _ in range(2):
        store.apply(longer(range(count), clears=False))
        assert store.rows() == count
    for _ in range(2):
        store.apply(longer(range(100, 100 + count), clears=True))
        assert store.rows() == count
    entries = store.read(Keys(np.array([7]), longer(range(1), clears=False).keys))
    positions = VariableCodec(LIST).decode_answers(entries).column(POSITION).to_pylist()
    assert sorted(positions) == list(range(100, 100 + count))
    store.destroy()


def test_what_an_answer_has_no_room_for_is_asked_for_again(
    open_worker: Open, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_worker()
    store.use(ALL, "a")
    store.apply(changes(layout, range(0, 16_000, 2), 123_456))
    whole = contents(store.snapshot(None), layout)
    monkeypatch.setattr(redis_rows, "_ANSWER_BYTES", 1000)
    assert read(store, layout, range(16_000)) == whole == dict.fromkeys(range(0, 16_000, 2), 123_456)
    assert contents(store.snapshot(None), layout) == whole


# ------------------------------------------------------------------------------------- a Redis that misbehaves


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def opened(server: RedisServer, layout: Layout, timeout_s: float = 10.0) -> RedisStore:
    connection = connect(server.url, timeout_s=timeout_s, patience_s=0.0)
    store = RedisStore(VariableCodec(layout).shape(KEY_GROUPS), connection, "job")
    store.use(ALL, "a")
    store.apply(changes(layout, range(100), 1))
    return store


def test_a_redis_that_was_restarted_is_noticed_and_can_be_filled_again(server: RedisServer, layout: Layout) -> None:
    store = opened(server, layout)
    begun, unread = store.snapshot(None), store.snapshot(None)
    server.kill()
    with pytest.raises(WorkerError, match=rf"127.0.0.1:{server.port}/0 cannot be reached.* try again"):
        store.read(keys(layout, range(1)))
    server.start()
    for lost in (
        lambda: store.read(keys(layout, range(1))),
        lambda: store.apply(changes(layout, range(100), 2)),
        lambda: store.snapshot(None),
        store.rows,
    ):
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"no longer has the state .* start it again"):
                lost()
    with pytest.raises(WorkerError, match="no longer has the state"):
        next(begun)
    assert store.use(ALL, "b") == set(ALL)
    with pytest.raises(WorkerError, match="no longer has the state"):
        next(unread)
    store.apply(changes(layout, range(100), 2))
    assert contents(store.snapshot(None), layout) == dict.fromkeys(range(100), 2)


def test_a_redis_that_went_back_in_time_is_noticed(server: RedisServer, layout: Layout) -> None:
    store, client = opened(server, layout), server.client()
    saved = {name: client.dump(name) for name in client.keys("*")}
    store.apply(changes(layout, range(3, 4), 2))
    for name, content in saved.items():
        client.restore(name, 0, content, replace=True)
    with pytest.raises(WorkerError, match="state of 1 key groups, of 3 for one"):
        store.read(keys(layout, range(16)))
    assert read(store, layout, range(4, 16)) == dict.fromkeys(range(4, 16), 1)
    client.close()


def test_a_change_that_arrives_late_does_not_undo_newer_ones(
    server: RedisServer, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server, layout)
    sent: list[tuple[RedisConnection, Any]] = []
    run = RedisConnection.run
    monkeypatch.setattr(
        RedisConnection, "run", lambda self, commands: sent.append((self, commands)) or run(self, commands)
    )
    store.apply(changes(layout, range(100), 2))
    store.apply(changes(layout, range(100), 3))
    run(*sent[0])
    assert read(store, layout, range(100)) == dict.fromkeys(range(100), 3)
    assert store.rows() == 100
    store.apply(changes(layout, range(100), 4))
    assert read(store, layout, range(100)) == dict.fromkeys(range(100), 4)


def test_scripts_that_redis_has_forgotten_are_sent_again(server: RedisServer, layout: Layout) -> None:
    store = opened(server, layout)
    with server.client() as client:
        client.script_flush()
        store.apply(changes(layout, range(50), 2))
        client.script_flush()
        assert read(store, layout, range(100)) == {n: 2 if n < 50 else 1 for n in range(100)}
    assert store.rows() == 100


def test_a_redis_without_memory_says_so_and_its_key_groups_are_filled_again(
    server: RedisServer, layout: Layout
) -> None:
    store = opened(server, layout)
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
        with pytest.raises(WorkerError, match=r"out of memory .* maxmemory; then try again"):
            store.apply(changes(layout, range(200), 2))
        assert read(store, layout, range(200)) == dict.fromkeys(range(100), 1)
        client.config_set("maxmemory", "0")
    assert store.is_lost
    with pytest.raises(WorkerError, match="or a change failed"):
        store.apply(changes(layout, range(200), 2))
    assert store.use(ALL, "b") == set(ALL)
    assert not store.is_lost
    store.apply(changes(layout, range(200), 2))
    assert store.rows() == 200


def test_a_redis_that_does_not_answer_ends_in_time(server: RedisServer) -> None:
    store = opened(server, VALUE, timeout_s=0.2)
    with server.client() as client:
        client.client_pause(20_000, all=True)
    with pytest.raises(WorkerError, match=r"did not answer within 0.2 s .* trying again may help"):
        store.read(keys(VALUE, range(1)))


def test_destroying_without_redis_is_no_error(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(server, VALUE)
    server.kill()
    store.destroy()
    assert "left behind in Redis" in caplog.text
    store.destroy()


def test_connecting_refuses_a_redis_that_would_lose_state(server: RedisServer) -> None:
    with server.client() as client:
        for policy in ("allkeys-lru", "allkeys-random"):
            client.config_set("maxmemory-policy", policy)
            with pytest.raises(WorkerError, match=f"{policy}.*noeviction"):
                connect(server.url)
        client.config_set("maxmemory-policy", "volatile-lru")
        connect(server.url).close()
        client.replicaof("127.0.0.1", "1")
        with pytest.raises(WorkerError, match=r"is a replica .* Name the primary"):
            connect(server.url)


def test_connecting_to_nothing_says_where(server: RedisServer) -> None:
    server.kill()
    for scheme in ("redis", "rediss", "redis+cluster"):
        with pytest.raises(WorkerError, match=f"127.0.0.1:{server.port} cannot be reached"):
            connect(f"{scheme}://127.0.0.1:{server.port}")


def test_a_server_that_is_no_cluster_is_not_taken_for_one(server: RedisServer) -> None:
    with pytest.raises(WorkerError, match="scheme"):
        connect(f"redis+cluster://127.0.0.1:{server.port}")


PASSWORD = "p:a/s s@w%d"


def test_a_password_is_used_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis(password=PASSWORD) as server:
        place = f"127.0.0.1:{server.port}"
        connection = connect(f"redis://:p%3Aa%2Fs%20s%40w%25d@{place}/0")
        assert PASSWORD not in connection.address
        connection.close()
        for wrong in (f"redis://:secret@{place}", f"redis://secret-user:secret@{place}/0", f"redis://{place}"):
            with pytest.raises(WorkerError, match="refuses the user or password") as caught:
                connect(wrong)
            assert "secret" not in everything_about(caught.value)
    assert "secret" not in caplog.text


def everything_about(error: BaseException) -> str:
    """Also what is logged with its traceback."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "url",
    [
        "redis://:sec/ret@host:1/0",
        "redis://:sec#ret@host:1/0",
        "redis://host:sec/0",
        "http://:secret@host:1/0",
        "redis://:secret@",
        "redis://:secret@host:1/sec",
        "redis+cluster://:secret@host:1/3",
        "redis://:sec[ret@host:1/0",
        "",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(connections.SettingsError, match="Redis") as caught:
        RedisConnection(url)
    assert "sec" not in everything_about(caught.value)


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b"])
def test_prefixes_that_would_break_hash_tags_are_refused(redis_connection: RedisConnection, prefix: str) -> None:
    with pytest.raises(WorkerError, match="braces"):
        RedisStore(VariableCodec(VALUE).shape(1), redis_connection, prefix)


@pytest.mark.parametrize("incarnation", ["", "a:b", "{1}", "a*"])
def test_incarnations_that_would_be_mistaken_are_refused(redis_connection: RedisConnection, incarnation: str) -> None:
    store = RedisStore(VariableCodec(VALUE).shape(1), redis_connection, new_prefix())
    with pytest.raises(WorkerError, match="no incarnation"):
        store.use([0], incarnation)


def test_pieces_of_commands_are_bounded(
    redis_connection: RedisConnection, trips: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_PIPELINE_BYTES", 20)
    monkeypatch.setattr(connections, "_PIPELINE_COMMANDS", 3)
    texts = [b"x" * size for size in (0, 0, 0, 0, 16, 2, 50, 1, 1)]
    # The name of the command counts, and one that is too long goes by itself.
    assert redis_connection.run([("ECHO", text) for text in texts]) == texts
    assert trips == [3, 1, 1, 1, 1, 2]
