"""However key groups go from worker to worker, and work is cut into pieces, shared state is that of one dict."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.core.errors import WorkerError
from anabranch.core.schemas import HASH, INDEX, OP, Layout, Op, VariableKind, VariableSpec
from anabranch.worker.state.rows import Rows, VariableCodec
from anabranch.worker.stores import redis, redis_connection, redis_rows
from anabranch.worker.stores.redis import RedisStore
from anabranch.worker.stores.redis_connection import RedisConnection, delete_prefix
from support.redis_server import new_prefix

GROUPS = 4
KEYS = range(10)
SUBKEYS = ("", "b", "{}", "dd" * 20)
State = dict[tuple[int, str], str]


def layout_of(kind: VariableKind) -> Layout:
    map_key = pa.schema([("m", pa.string())]) if kind is VariableKind.MAP else pa.schema([])
    return Layout(pa.schema([("k", pa.string())]), VariableSpec("v", kind, pa.schema([("x", pa.string())]), map_key))


@pytest.fixture(params=["tiny", "usual"])
def _bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """How much goes into a command, an answer, a pipeline, a batch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tiny":
            patch.setattr(redis_rows, "_COMMAND_ROWS", 2)
            patch.setattr(redis_rows, "_COMMAND_BYTES", 60)
            patch.setattr(redis_rows, "_ANSWER_BYTES", 1)
            patch.setattr(redis_connection, "_PIPELINE_COMMANDS", 2)
            patch.setattr(redis, "_BATCH_ROWS", 3)
        yield


class Shared:
    """Workers on one Redis, each key group with one of them, and a dict to which the same is done."""

    def __init__(self, data: st.DataObject, kind: VariableKind, connection: RedisConnection) -> None:
        self.data, self.connection = data, connection
        self.layout = layout_of(kind)
        self.codec = VariableCodec(self.layout)
        self.subkeys = SUBKEYS if kind is VariableKind.MAP else ("",)
        self.prefix = new_prefix()
        self.workers = [RedisStore(self.codec.shape(GROUPS), connection, self.prefix) for _ in range(3)]
        self.owners = dict.fromkeys(range(GROUPS), 0)
        self.incarnations = 1
        self.state: State = {}
        #: Each with what it must have.
        self.snapshots: list[tuple[Iterator[Rows], State]] = []
        assert self.workers[0].use(range(GROUPS), "1") == set(range(GROUPS))
        self.names = dict.fromkeys(range(GROUPS), "1")

    def change(self) -> None:
        clears = self.data.draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=3))
        entry = st.tuples(st.sampled_from(KEYS), st.sampled_from(self.subkeys))
        value = st.sampled_from([None, "", "x", "long" * 30])
        puts = self.data.draw(st.dictionaries(entry, value, max_size=12))
        rows = [(key, Op.CLEAR, None, None) for key in clears]
        rows += [(key, Op.DELETE if new is None else Op.PUT, subkey, new) for (key, subkey), new in puts.items()]
        rows = self.data.draw(st.permutations(rows))
        for owner, worker in enumerate(self.workers):
            mine = [row for row in rows if self.owners[row[0] % GROUPS] == owner]
            for _ in range(self.data.draw(st.integers(1, 2))):
                worker.apply(self.codec.encode_changes(self.table(mine)))
        self.state = {entry: old for entry, old in self.state.items() if entry[0] not in clears}
        for entry_, new in puts.items():
            if new is None:
                self.state.pop(entry_, None)
            else:
                self.state[entry_] = new

    def move(self) -> None:
        groups, to = self.data.draw(st.sets(st.integers(0, GROUPS - 1))), self.data.draw(st.integers(0, 2))
        for group in groups:
            self.workers[self.owners[group]].hand_over([group])
            assert self.workers[to].use([group], self.names[group]) == frozenset()
            self.owners[group] = to

    def abandon(self) -> None:
        """A key group that is torn goes to a worker that starts it anew."""
        group, to = self.data.draw(st.integers(0, GROUPS - 1)), self.data.draw(st.integers(0, 2))
        self.incarnations += 1
        self.names[group] = str(self.incarnations)
        if self.owners[group] != to and self.data.draw(st.booleans()):
            self.workers[self.owners[group]].drop_groups([group])
        else:
            self.workers[self.owners[group]].hand_over([group])
        assert self.workers[to].use([group], self.names[group]) == {group}
        self.owners[group] = to
        self.state = {entry: value for entry, value in self.state.items() if entry[0] % GROUPS != group}

    def begin_snapshot(self) -> None:
        owner = self.data.draw(st.integers(0, 2))
        mine = {entry: value for entry, value in self.state.items() if self.owners[entry[0] % GROUPS] == owner}
        self.snapshots.append((self.workers[owner].snapshot(None), mine))

    def check(self) -> None:
        assert sum(worker.rows() for worker in self.workers) == len(self.state)
        for owner, worker in enumerate(self.workers):
            wanted = [key for key in (*KEYS, *KEYS[::3]) if self.owners[key % GROUPS] == owner]
            columns = {HASH: pa.array(wanted, pa.int64()), "k": pa.array(map(str, wanted), pa.string())}
            entries = worker.read(self.codec.encode_keys(pa.table(columns)))
            assert list(entries.index) == sorted(entries.index)
            answer = self.codec.decode_answers(entries).to_pylist()
            found = sorted((row[INDEX], row.get("m", ""), row["x"]) for row in answer)
            expected = [(i, m, x) for i, key in enumerate(wanted) for (k, m), x in self.state.items() if k == key]
            assert found == sorted(expected)

    def check_snapshots(self) -> None:
        for snapshot, expected in self.snapshots:
            parts = [self.codec.decode_rows(part).to_pylist() for part in snapshot]
            rows = [row for part in parts for row in part]
            assert all(row[HASH] == int(row["k"]) for row in rows)
            assert sorted((row[HASH], row.get("m", ""), row["x"]) for row in rows) == sorted(
                (key, subkey, value) for (key, subkey), value in expected.items()
            )
            assert all(0 < len(part) <= redis._BATCH_ROWS for part in parts)

    def table(self, rows: list[tuple[Any, ...]]) -> pa.Table:
        columns = {
            HASH: [key for key, *_ in rows],
            OP: [op for _, op, *_ in rows],
            "k": [str(key) for key, *_ in rows],
            "m": [subkey for _, _, subkey, _ in rows],
            "x": [value for *_, value in rows],
        }
        return pa.table({name: columns[name] for name in self.layout.changes.names}, schema=self.layout.changes)


ACTIONS = [Shared.change, Shared.move, Shared.begin_snapshot, Shared.change, Shared.abandon]


@pytest.mark.usefixtures("_bounds")
@pytest.mark.parametrize("kind", [VariableKind.VALUE, VariableKind.MAP])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), actions=st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=12))
def test_state_that_workers_share_is_that_of_one_dict(
    redis_connection: RedisConnection, kind: VariableKind, data: st.DataObject, actions: list[Any]
) -> None:
    shared = Shared(data, kind, redis_connection)
    shared.change()
    for action in actions:
        action(shared)
        shared.check()
    shared.check_snapshots()
    for worker in shared.workers:
        worker.destroy()
        with pytest.raises(WorkerError, match="not in use"):
            worker.read(shared.codec.encode_keys(pa.table({HASH: np.array([1]), "k": ["1"]})))
    delete_prefix(redis_connection, shared.prefix)
    assert not list(redis_connection.keys(shared.prefix))
