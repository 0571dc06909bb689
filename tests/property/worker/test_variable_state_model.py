"""All stores, under layers, rollbacks, folds and scans, are what a dict per epoch would be."""

import copy
import tempfile
import zlib
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.core.errors import EpochError
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, INDEX, OP, POSITION, Layout, Op, VariableKind, VariableSpec
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores.redis_connection import RedisConnection
from support import arrow_strategies as arrow
from support.redis_server import WholeStore
from support.stores import open_store

Row = dict[str, Any]
#: Of each key, by its frozen form, the entries: frozen value by frozen sub-key.
State = dict[Hashable, dict[Hashable, Hashable]]


class Twins:
    """A memory store, a RocksDB store, one in Redis and a dict per epoch, to which the same is done."""

    def __init__(
        self,
        draw: st.DrawFn,
        kind: VariableKind,
        types: list[pa.DataType],
        directory: Path,
        connection: RedisConnection,
    ) -> None:
        no_fields = pa.schema([])
        map_key = draw(arrow.schemas("m", min_size=1, max_size=2)) if kind is VariableKind.MAP else no_fields
        spec = VariableSpec("v", kind, draw(arrow.schemas("v")), map_key)
        self.draw, self.kind = draw, kind
        self.layout = Layout(pa.schema([(f"k{i}", t) for i, t in enumerate(types)]), spec)
        self.key_groups = draw(st.sampled_from([8, 7, 1]))
        #: Few hashes force keys together that only their bytes tell apart.
        self.hash_count = draw(st.sampled_from([3, 1, 2**64]))
        # Few keys, sub-keys and values, so that changes meet.
        self.keys = self.pool(self.layout.key, 6)
        self.subkeys = self.pool(self.layout.subkey, 4)
        if kind is VariableKind.LIST:
            self.subkeys = [{POSITION: position} for position in (0, 1, 255, 256, 400)]
        self.values = draw(st.lists(arrow.rows(self.layout.value), min_size=4, max_size=4))
        stores = [
            open_store("memory", self.layout, self.key_groups, None),
            open_store("rocksdb", self.layout, self.key_groups, directory / "db"),
            WholeStore(self.layout, self.key_groups, connection),
        ]
        self.states = [VariableState(self.layout, self.key_groups, store) for store in stores]
        self.versions: dict[int, State] = {-1: {}}

    def pool(self, schema: pa.Schema, size: int) -> list[Row]:
        drawn = self.draw(st.lists(arrow.rows(schema), min_size=size, max_size=size))
        return list({self.frozen(schema, row): row for row in drawn}.values())

    # ----------------------------------------------------------------------------------------------- actions

    def add_layer(self) -> None:
        newest = max(self.versions)
        epoch = newest + self.draw(st.integers(1, 2))
        rows = self.draw_changes()
        for state in self.states:
            state.add_layer(epoch, arrow.table(self.layout.changes, rows))
        self.versions[epoch] = self.applied(self.versions[newest], rows)

    def roll_back(self) -> None:
        epoch = self.draw(st.sampled_from(sorted(self.versions)))
        for state in self.states:
            state.drop_layers_after(epoch)
        self.versions = {e: version for e, version in self.versions.items() if e <= epoch}

    def fold(self) -> None:
        epoch = self.draw(st.sampled_from(sorted(self.versions)))
        for state in self.states:
            state.fold(epoch)
        self.versions = {e: version for e, version in self.versions.items() if e >= epoch}
        if epoch > -1:
            for state in self.states:
                with pytest.raises(EpochError, match="no longer held"):
                    state.read(self.layout.keys.empty_table(), epoch - 1)

    def fold_all_and_load(self) -> None:
        self.versions = {max(self.versions): self.versions[max(self.versions)]}
        rows = self.draw_changes()
        for state in self.states:
            state.fold(max(self.versions))
            state.load(arrow.table(self.layout.changes, rows))
        self.versions = {e: self.applied(version, rows) for e, version in self.versions.items()}
        expected = sum(map(len, self.versions[max(self.versions)].values()))
        assert [state.rows() for state in self.states] == [expected] * 3

    def drop_groups(self) -> None:
        groups = self.draw(st.sets(st.integers(0, self.key_groups - 1), max_size=3))
        for state in self.states:
            state.drop_groups(groups)
        lost = {self.key_of(key) for key in self.keys if self.group_of(key) in groups}
        for epoch, version in self.versions.items():
            self.versions[epoch] = {key: entries for key, entries in version.items() if key not in lost}

    # ---------------------------------------------------------------------------------------------- questions

    def check_reads(self) -> None:
        """Every key, some twice, as of every epoch."""
        wanted = [*self.keys, *self.keys[::2]]
        table = arrow.table(self.layout.keys, [self.with_hash(key) for key in wanted])
        for epoch, version in self.versions.items():
            expected = [version.get(self.key_of(key), {}) for key in wanted]
            for state in self.states:
                answer = state.read(table, epoch)
                answer.validate(full=True)
                assert answer.schema.equals(self.layout.answers)
                index = answer.column(INDEX).to_pylist()
                assert index == sorted(index)
                if self.kind is VariableKind.LIST:
                    order = list(zip(index, answer.column(POSITION).to_pylist(), strict=True))
                    assert order == sorted(order)
                found: list[dict[Hashable, Hashable]] = [{} for _ in wanted]
                for row in answer.to_pylist():
                    found[row[INDEX]][self.subkey_of(row)] = self.value_of(row)
                assert found == expected
                assert answer.num_rows == sum(map(len, found))

    def check_scan(self) -> None:
        epoch = self.draw(st.sampled_from(sorted(self.versions)))
        groups = self.draw(st.none() | st.sets(st.integers(0, self.key_groups - 1)))
        without = self.draw(st.none() | st.lists(st.sampled_from(self.keys), max_size=2))
        left_out = {self.key_of(key) for key in without or []}
        left_out |= {self.key_of(key) for key in self.keys if groups is not None and self.group_of(key) not in groups}
        expected = {
            (key, subkey): value
            for key, entries in self.versions[epoch].items()
            for subkey, value in entries.items()
            if key not in left_out
        }
        table = arrow.table(self.layout.keys, [self.with_hash(key) for key in without or []])
        for state in self.states:
            batches = list(state.scan(epoch, groups, None if without is None else table))
            assert all(batch.schema.equals(self.layout.rows) for batch in batches)
            rows = [row for batch in batches for row in batch.to_pylist()]
            assert all(row[HASH] == self.hash_of(row) for row in rows)
            found = {(self.key_of(row), self.subkey_of(row)): self.value_of(row) for row in rows}
            assert len(found) == len(rows)
            assert found == expected

    # ---------------------------------------------------------------------------------------------- the model

    def draw_changes(self) -> list[Row]:
        """Changes of some keys, in any order: at most one of each entry, and at most one CLEAR of a key."""
        entry = st.tuples(
            st.sampled_from(self.keys),
            st.sampled_from(self.subkeys),
            st.sampled_from(self.values),
            st.sampled_from([Op.PUT, Op.PUT, Op.DELETE]),
        )
        nothing = dict.fromkeys([*self.layout.subkey.names, *self.layout.value.names])
        rows: dict[Hashable, Row] = {}
        for key, subkey, value, op in self.draw(st.lists(entry, min_size=1, max_size=12)):
            rows[self.key_of(key), self.subkey_of(subkey)] = {**self.with_hash(key), **subkey, **value, OP: op}
        for key in self.draw(st.lists(st.sampled_from(self.keys), max_size=2)):
            rows[self.key_of(key)] = {**self.with_hash(key), **nothing, OP: Op.CLEAR}
        return self.draw(st.permutations(list(rows.values())))

    def applied(self, state: State, rows: Iterable[Row]) -> State:
        state = copy.deepcopy(state)
        for row in sorted(rows, key=lambda row: row[OP] != Op.CLEAR):
            entries = state.setdefault(self.key_of(row), {})
            if row[OP] == Op.CLEAR:
                entries.clear()
            elif row[OP] == Op.DELETE:
                entries.pop(self.subkey_of(row), None)
            else:
                entries[self.subkey_of(row)] = self.value_of(row)
        return {key: entries for key, entries in state.items() if entries}

    def key_of(self, row: Row) -> Hashable:
        return self.frozen(self.layout.key, row)

    def subkey_of(self, row: Row) -> Hashable:
        return self.frozen(self.layout.subkey, row)

    def value_of(self, row: Row) -> Hashable:
        return self.frozen(self.layout.value, row, exact=True)

    @staticmethod
    def frozen(schema: pa.Schema, row: Row, *, exact: bool = False) -> Hashable:
        """The values of a row as Arrow gives them back, because drawn ones may have another Python type."""
        back = [pa.array([row[f.name]], type=f.type).to_pylist()[0] for f in schema]
        return arrow.frozen(back, exact=exact)

    def hash_of(self, row: Row) -> int:
        digest = zlib.crc32(repr(self.key_of(row)).encode()) * 0x9E3779B97F4A7C15 % 2**64 % self.hash_count
        return digest - 2**64 if digest >= 2**63 else digest

    def group_of(self, row: Row) -> int:
        return int(key_groups_of(np.array([self.hash_of(row)]), self.key_groups)[0])

    def with_hash(self, key: Row) -> Row:
        return {HASH: self.hash_of(key), **key}


ACTIONS = [
    Twins.add_layer,
    Twins.fold,
    Twins.roll_back,
    Twins.add_layer,
    Twins.fold_all_and_load,
    Twins.add_layer,
    Twins.drop_groups,
]


KEYS = {
    "int64": [pa.int64()],
    "string": [pa.string()],
    "int32 and string": [pa.int32(), pa.large_string()],
    "double": [pa.float64()],
    "wide": [pa.decimal128(20, 3), pa.timestamp("us", tz="UTC"), pa.bool_(), pa.date32()],
    "struct": [pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.binary()), ("d", pa.float32())]))])],
    "list": [pa.list_(pa.string()), pa.int16()],
    "nothing": [],
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", VariableKind)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=10))
def test_all_stores_do_what_a_dict_per_epoch_does(
    redis_connection: RedisConnection, kind: VariableKind, key: str, data: st.DataObject, actions: list[Any]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        twins = Twins(data.draw, kind, KEYS[key], Path(directory), redis_connection)
        try:
            twins.add_layer()
            for action in actions:
                action(twins)
                twins.check_reads()
                twins.check_scan()
        finally:
            for state in twins.states:
                state.close()
