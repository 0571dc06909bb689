"""Both stores, under layers, rollbacks, folds and scans, are what a dict per epoch would be."""

import copy
import tempfile
import zlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import arrow_strategies as arrow
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.core.errors import EpochError
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, INDEX, OP, POSITION, Layout, Op, VariableKind, VariableSpec
from anabranch.worker.layers import VariableState
from anabranch.worker.stores import open_store

Row = dict[str, Any]
#: Of each key, by its frozen form, the entries: frozen value by frozen sub-key.
State = dict[Hashable, dict[Hashable, Hashable]]


class VariableStateModel(RuleBasedStateMachine):
    """Does the same to a memory store, a RocksDB store and a dict, and compares all they can be asked."""

    @initialize(
        kind=st.sampled_from(VariableKind),
        key=arrow.schemas("k", max_size=2),
        map_key=arrow.schemas("m", min_size=1, max_size=2),
        value=arrow.schemas("v"),
        hash_count=st.sampled_from([1, 3, 2**64]),
        key_groups=st.sampled_from([1, 7, 8]),
        data=st.data(),
    )
    def start(
        self,
        kind: VariableKind,
        key: pa.Schema,
        map_key: pa.Schema,
        value: pa.Schema,
        hash_count: int,
        key_groups: int,
        data: st.DataObject,
    ) -> None:
        no_fields = pa.schema([])
        spec = VariableSpec("v", kind, value, map_key if kind is VariableKind.MAP else no_fields)
        self.layout = Layout(key, spec)
        self.kind = kind
        self.key_groups = key_groups
        #: Few hashes force keys together that only their bytes tell apart.
        self.hash_count = hash_count
        self.keys = data.draw(st.lists(arrow.rows(key), min_size=1, max_size=6, unique_by=self.freeze))
        self.directory = tempfile.TemporaryDirectory()
        self.states = [
            VariableState(self.layout, key_groups, open_store(store, self.layout, key_groups, folder))
            for store, folder in (("memory", None), ("rocksdb", Path(self.directory.name) / "db"))
        ]
        self.versions: dict[int, State] = {-1: {}}
        self.folded: int | None = None

    def teardown(self) -> None:
        if hasattr(self, "states"):
            for state in self.states:
                state.close()
            self.directory.cleanup()

    # ------------------------------------------------------------------------------------------------- rules

    @rule(data=st.data(), gap=st.integers(1, 2))
    def add_layer(self, data: st.DataObject, gap: int) -> None:
        epoch = max(self.versions) + gap
        rows = data.draw(self.changes())
        for state in self.states:
            state.add_layer(epoch, self.table(self.layout.changes, rows))
        self.versions[epoch] = self.applied(self.versions[max(self.versions)], rows)

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.versions)))
        for state in self.states:
            state.drop_layers_after(epoch)
        self.versions = {e: version for e, version in self.versions.items() if e <= epoch}

    @rule(data=st.data())
    def fold(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.versions)))
        for state in self.states:
            state.fold(epoch)
        if epoch >= 0:
            self.versions = {e: version for e, version in self.versions.items() if e >= epoch}
            self.folded = epoch

    @precondition(lambda self: len(self.versions) == 1)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        rows = data.draw(self.changes())
        for state in self.states:
            state.load(self.table(self.layout.changes, rows))
        self.versions = {e: self.applied(version, rows) for e, version in self.versions.items()}

    @rule(data=st.data())
    def drop_groups(self, data: st.DataObject) -> None:
        groups = data.draw(st.sets(st.integers(0, self.key_groups - 1), max_size=3))
        for state in self.states:
            state.drop_groups(groups)
        lost = {self.freeze(key) for key in self.keys if self.group_of(key) in groups}
        for epoch, version in self.versions.items():
            self.versions[epoch] = {key: entries for key, entries in version.items() if key not in lost}

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.versions)))
        wanted = data.draw(st.lists(st.sampled_from(self.keys), max_size=8))
        table = self.table(self.layout.keys, [self.with_hash(key) for key in wanted])
        for state in self.states:
            answer = state.read(table, epoch)
            assert answer.schema.equals(self.layout.answers)
            answer.validate(full=True)
            assert answer.column(INDEX).to_pylist() == sorted(answer.column(INDEX).to_pylist())
            found: list[dict[Hashable, Hashable]] = [{} for _ in wanted]
            for row in answer.to_pylist():
                found[row[INDEX]][self.subkey_of(row)] = self.value_of(row)
            assert found == [self.versions[epoch].get(self.freeze(key), {}) for key in wanted]
            assert answer.num_rows == sum(map(len, found))
            if self.kind is VariableKind.LIST:
                order = list(zip(answer.column(INDEX).to_pylist(), answer.column(POSITION).to_pylist(), strict=True))
                assert order == sorted(order)

    @rule(data=st.data())
    def scan(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.versions)))
        groups = data.draw(st.none() | st.sets(st.integers(0, self.key_groups - 1)))
        without = data.draw(st.none() | st.lists(st.sampled_from(self.keys), unique_by=self.freeze))
        left_out = {self.freeze(key) for key in without or []}
        left_out |= {self.freeze(key) for key in self.keys if groups is not None and self.group_of(key) not in groups}
        expected = {
            (key, subkey): value
            for key, entries in self.versions[epoch].items()
            for subkey, value in entries.items()
            if key not in left_out
        }
        table = None if without is None else self.table(self.layout.keys, [self.with_hash(key) for key in without])
        for state in self.states:
            batches = list(state.scan(epoch, groups, table))
            assert all(batch.schema.equals(self.layout.rows) for batch in batches)
            rows = [row for batch in batches for row in batch.to_pylist()]
            assert all(row[HASH] == self.hash_of(row) for row in rows)
            found = {(self.freeze(row), self.subkey_of(row)): self.value_of(row) for row in rows}
            assert len(found) == len(rows)
            assert found == expected

    @rule()
    def read_what_is_gone(self) -> None:
        if self.folded is not None:
            no_keys = self.layout.keys.empty_table()
            for state in self.states:
                with pytest.raises(EpochError, match="no longer held"):
                    state.read(no_keys, min(self.versions) - 1)

    @invariant()
    def counts_are_exact_once_folded(self) -> None:
        if hasattr(self, "versions") and len(self.versions) == 1:
            expected = sum(map(len, self.versions[max(self.versions)].values()))
            assert [state.rows() for state in self.states] == [expected, expected]

    # --------------------------------------------------------------------------------------------- the model

    def changes(self) -> st.SearchStrategy[list[Row]]:
        """Changes of some keys: at most one of each entry, and a CLEAR anywhere among them."""
        entry = st.tuples(
            st.sampled_from(self.keys),
            self.subkeys(),
            arrow.rows(self.layout.value),
            st.sampled_from([Op.PUT, Op.PUT, Op.DELETE]),
        ).map(lambda e: {**self.with_hash(e[0]), **e[1], **e[2], OP: e[3]})
        nothing = dict.fromkeys([*self.layout.subkey.names, *self.layout.value.names])
        clear = st.sampled_from(self.keys).map(lambda key: {**self.with_hash(key), **nothing, OP: Op.CLEAR})
        entries = st.lists(entry, max_size=12, unique_by=lambda row: (self.freeze(row), self.subkey_of(row)))
        clears = st.lists(clear, max_size=2, unique_by=self.freeze)
        return st.tuples(entries, clears).flatmap(lambda both: st.permutations([*both[0], *both[1]]))

    def subkeys(self) -> st.SearchStrategy[Row]:
        if self.kind is VariableKind.LIST:
            return st.integers(0, 400).map(lambda position: {POSITION: position})
        return arrow.rows(self.layout.subkey)

    def applied(self, state: State, rows: list[Row]) -> State:
        state = copy.deepcopy(state)
        for row in sorted(rows, key=lambda row: row[OP] != Op.CLEAR):
            entries = state.setdefault(self.freeze(row), {})
            if row[OP] == Op.CLEAR:
                entries.clear()
            elif row[OP] == Op.DELETE:
                entries.pop(self.subkey_of(row), None)
            else:
                entries[self.subkey_of(row)] = self.value_of(row)
        return {key: entries for key, entries in state.items() if entries}

    def freeze(self, row: Row) -> Hashable:
        return arrow.frozen(self.through_arrow(self.layout.key, row), exact=False)

    def subkey_of(self, row: Row) -> Hashable:
        return arrow.frozen(self.through_arrow(self.layout.subkey, row), exact=False)

    def value_of(self, row: Row) -> Hashable:
        return arrow.frozen(self.through_arrow(self.layout.value, row), exact=True)

    @staticmethod
    def through_arrow(schema: pa.Schema, row: Row) -> list[Any]:
        """The values of a row as Arrow gives them back: drawn ones may have another Python type."""
        return [pa.array([row[f.name]], type=f.type).to_pylist()[0] for f in schema]

    def hash_of(self, row: Row) -> int:
        digest = zlib.crc32(repr(self.freeze(row)).encode()) * 0x9E3779B97F4A7C15 % 2**64 % self.hash_count
        return digest - 2**64 if digest >= 2**63 else digest

    def group_of(self, row: Row) -> int:
        return int(key_groups_of(np.array([self.hash_of(row)]), self.key_groups)[0])

    def with_hash(self, key: Row) -> Row:
        return {HASH: self.hash_of(key), **key}

    @staticmethod
    def table(schema: pa.Schema, rows: list[Row]) -> pa.Table:
        return arrow.table(schema, rows)


TestVariableStateModel = VariableStateModel.TestCase
TestVariableStateModel.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
