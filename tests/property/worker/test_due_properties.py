"""Rows that are due are found by the index exactly as a look at all rows finds them, whatever happens to the state."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.core.errors import EpochError
from anabranch.core.eventtime import EventTime
from anabranch.core.schemas import POSITION, Layout, Op, VariableKind, VariableSpec
from anabranch.worker.state import due_index as due
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores.redis_connection import RedisConnection
from support.redis_server import WholeStore
from support.stores import open_store

GROUPS = 4
TIMES = (-(2**63), -5, 0, 1, 2, 3, 7, 2**63 - 1)
TIME = pa.schema([("at", pa.int64())])
WINDOW = pa.struct([("start", pa.timestamp("us", "UTC")), ("end", pa.timestamp("us", "UTC"))])
NOTHING = pa.schema([])


def layout_of(where: str, kind: VariableKind, key_type: pa.DataType) -> tuple[Layout, EventTime]:
    """A variable whose rows have their time in the key, in the map key, or in the value."""
    key, map_key, value = [("k", key_type)], pa.schema([("m", pa.int64())]), [("n", pa.int64())]
    event_time = EventTime("at", "")
    if where == "key":
        key, event_time = [*key, ("window", WINDOW)], EventTime("window", "end")
    elif where == "map key":
        kind, map_key, value = VariableKind.MAP, TIME, []
    else:
        value = [*value, ("at", pa.int64())]
    map_key = map_key if kind is VariableKind.MAP else NOTHING
    return Layout(pa.schema(key), VariableSpec("v", kind, pa.schema(value), map_key)), event_time


class Timed:
    """A variable in one of the stores, some of whose rows are due at some time."""

    def __init__(self, draw: st.DrawFn, directory: Path, connection: RedisConnection) -> None:
        where = draw(st.sampled_from(["key", "map key", "value", "value"]))
        key_type = draw(st.sampled_from([pa.int64(), pa.string()]))
        self.draw = draw
        self.layout, self.event_time = layout_of(where, draw(st.sampled_from(list(VariableKind))), key_type)
        store = draw(st.sampled_from(["memory", "memory", "rocksdb", "redis"]))
        self.groups = frozenset(range(GROUPS))
        self.state = VariableState(
            self.layout,
            GROUPS,
            WholeStore(self.layout, GROUPS, connection)
            if store == "redis"
            else open_store(store, self.layout, GROUPS, directory / "db"),
        )
        self.epoch = 0

    def key(self) -> dict[str, Any]:
        number = self.draw(st.integers(0, 7))
        text = self.layout.key.field("k").type == pa.string()
        # Two keys share each hash.
        key = {"_hash": number // 2 * 7919 - 9000, "k": "abcdefgh"[number] * number if text else number}
        if "window" in self.layout.key.names:
            end = self.draw(st.sampled_from([-5, 0, 1, 2, 3, 7]))
            key["window"] = {"start": end - 1, "end": end}
        return key

    def changes(self, *, puts_only: bool = False) -> pa.Table:
        """Of each key perhaps a CLEAR, and at most one change of each entry."""
        rows: dict[str, dict[str, Any]] = {}
        for _ in range(self.draw(st.integers(0, 8))):
            row = self.key()
            row["_op"] = self.draw(st.sampled_from([Op.PUT] if puts_only else [Op.PUT, Op.PUT, Op.DELETE, Op.CLEAR]))
            entry = str((row["k"], row.get("window")))
            if row["_op"] != Op.CLEAR:
                for name in self.layout.subkey.names:
                    row[name] = self.draw(st.integers(0, 2) if name in (POSITION, "m") else st.sampled_from(TIMES))
                    entry += str(row[name])
                if row["_op"] == Op.PUT:
                    row["n"] = self.draw(st.integers(0, 3))
                    if "at" in self.layout.value.names:
                        row["at"] = self.draw(st.sampled_from([*TIMES, None]))
            elif self.layout.variable.kind is not VariableKind.VALUE:
                entry += "clear"
            rows[entry] = row
        columns = [
            pa.array([row.get(field.name) for row in rows.values()], field.type) for field in self.layout.changes
        ]
        return pa.table(columns, schema=self.layout.changes)

    def oracle(self, epoch: int, groups: Any, up_to: int) -> Counter[str]:
        rows = pa.Table.from_batches(list(self.state.scan(epoch, groups)), schema=self.layout.rows)
        return counted(rows.filter(self.event_time.is_over(rows, up_to)))

    def ask(self) -> None:
        """Every epoch that can be read, for some of the key groups."""
        groups = self.draw(st.sets(st.integers(0, GROUPS - 1))) & self.groups
        up_to = self.draw(st.sampled_from(TIMES))
        for epoch in range(self.state.oldest or 0, self.epoch + 1):
            found = pa.Table.from_batches(self.state.due(epoch, groups, self.event_time, up_to))
            assert counted(found) == self.oracle(epoch, groups, up_to)

    def ask_for_keys(self) -> None:
        """All rows of the keys that have something due."""
        up_to = self.draw(st.sampled_from(TIMES))
        since = self.draw(st.sampled_from(TIMES))
        found = pa.Table.from_batches(
            self.state.due(self.epoch, self.groups, self.event_time, up_to, since=since, whole_keys=True)
        )
        everything = pa.Table.from_batches(list(self.state.scan(self.epoch, self.groups)), schema=self.layout.rows)
        keys = self.layout.key.names
        times = self.event_time.of(everything).to_pylist()
        of_key = [str(row) for row in everything.select(keys).to_pylist()]
        needed = {key for key, at in zip(of_key, times, strict=True) if at is not None and since <= at <= up_to}
        # Entries whose rows are gone may bring more keys, but never some of a key's rows.
        got = Counter(str(row) for row in found.select(keys).to_pylist())
        assert needed <= got.keys()
        assert all(count == of_key.count(key) for key, count in got.items())

    def change(self) -> None:
        self.epoch += 1
        self.state.add_layer(self.epoch, self.changes())

    def fold(self) -> None:
        self.state.fold(self.draw(st.integers(self.state.oldest or 0, self.epoch)))

    def roll_back(self) -> None:
        epoch = self.draw(st.integers(self.state.oldest or 0, self.epoch))
        self.state.drop_layers_after(epoch)
        self.epoch = epoch

    def load(self) -> None:
        self.state.load(self.changes(puts_only=True))

    def drop(self) -> None:
        self.state.drop_groups(self.draw(st.sets(st.integers(0, GROUPS - 1), max_size=1)))

    def go_unnoticed(self) -> None:
        """Rows get into the store behind the index's back, as those of a shared store do."""
        table = self.changes(puts_only=True)
        self.state._store.apply(self.state._codec.encode_changes(table))
        groups = table.column("_hash").to_numpy() % GROUPS
        self.state.expect_unnoticed(set(groups.tolist()))


def counted(rows: pa.Table) -> Counter[str]:
    return Counter(str(row) for row in rows.to_pylist())


@pytest.fixture(autouse=True)
def _few_stale_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that all entries are looked at often."""
    monkeypatch.setattr(due, "_STALE_MIN", 3)
    monkeypatch.setattr(due, "_CHECKED_ROWS", 2)


STEPS = ["change", "change", "change", "ask", "ask", "fold", "fold", "roll_back", "load", "drop", "ask_for_keys"]


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_due_is_what_a_look_at_all_rows_finds(data: st.DataObject, redis_connection: RedisConnection) -> None:
    with tempfile.TemporaryDirectory() as directory:
        timed = Timed(data.draw, Path(directory), redis_connection)
        for step in data.draw(st.lists(st.sampled_from([*STEPS, "go_unnoticed"]), min_size=4, max_size=25)):
            getattr(timed, step)()
        for up_to in TIMES:
            found = pa.Table.from_batches(timed.state.due(timed.epoch, range(GROUPS), timed.event_time, up_to))
            assert counted(found) == timed.oracle(timed.epoch, range(GROUPS), up_to)
        timed.state.close()


def test_an_epoch_that_was_merged_is_refused() -> None:
    layout, event_time = layout_of("value", VariableKind.VALUE, pa.int64())
    state = VariableState(layout, GROUPS, open_store("memory", layout, GROUPS, None))
    rows = pa.table([[7], pa.array([Op.PUT], pa.int8()), [1], [1], [5]], schema=layout.changes)
    state.add_layer(1, rows)
    state.fold(1)
    with pytest.raises(EpochError, match="no longer held"):
        state.due(0, range(GROUPS), event_time, 9)


def test_the_index_does_not_grow_with_changes_that_are_over() -> None:
    layout, event_time = layout_of("value", VariableKind.VALUE, pa.int64())
    state = VariableState(layout, GROUPS, open_store("memory", layout, GROUPS, None))
    keys = np.arange(100)
    for epoch in range(50):
        ops = np.full(100, Op.PUT, np.int8)
        state.add_layer(epoch, pa.table([keys * 7919, ops, keys, keys, keys + epoch * 1000], schema=layout.changes))
        assert pa.Table.from_batches(state.due(epoch, range(GROUPS), event_time, epoch - 1)).num_rows == 0
        state.fold(epoch)
    index = state._due
    assert index is not None
    assert len(index) <= 400
    assert len(index._runs) < 10
    assert pa.Table.from_batches(state.due(50, range(GROUPS), event_time, 49_049)).num_rows == 50
