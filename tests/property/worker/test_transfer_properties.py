"""State that arrives on demand and in the background is, at every moment, what state that was there all along is."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.checkpoint.datafiles import write_changes
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import StageNumber, WorkerId
from anabranch.core.schemas import HASH, INDEX, POSITION, Layout, Op, VariableKind, VariableSpec
from anabranch.core.state_files import ChangeFile
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.transfer.group_transfer import GroupTransfer
from anabranch.worker.transfer.sources import CheckpointSource
from support.stores import open_store

GROUPS = 8
KEYS = range(12)
KINDS = [VariableKind.VALUE, VariableKind.LIST, VariableKind.MAP]


def hash_of(key: int) -> int:
    """Some keys share a hash, some a key group, some a slot."""
    return (key // 2) * 0x9E3779B97F4A7C15 % 2**63 if key % 5 else key // 2


def layout_of(kind: VariableKind) -> Layout:
    map_key = pa.schema([("m", pa.int64())]) if kind is VariableKind.MAP else pa.schema([])
    return Layout(pa.schema([("k", pa.int64())]), VariableSpec("v", kind, pa.schema([("n", pa.int64())]), map_key))


@st.composite
def changes_of(draw: st.DrawFn, layout: Layout) -> pa.Table:
    """The changes of one epoch: for each key perhaps a CLEAR first, then different sub-keys."""
    rows: list[list[Any]] = []
    for key in draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=8)):
        subkeys = [[]] if layout.variable.kind is VariableKind.VALUE else [[0], [1], [2]]
        if draw(st.booleans()):
            rows.append([hash_of(key), int(Op.CLEAR), key, *([None] * len(subkeys[0])), None])
        for subkey in subkeys:
            op = draw(st.sampled_from([Op.PUT, Op.PUT, Op.DELETE, None]))
            if op is not None:
                value = draw(st.integers(0, 99)) if op is Op.PUT else None
                rows.append([hash_of(key), int(op), key, *subkey, value])
    columns = list(zip(*rows, strict=True)) or [()] * len(layout.changes)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, layout.changes, strict=True)], schema=layout.changes)


def entries(state: VariableState, epoch: int) -> list[tuple[Any, ...]]:
    rows = [row for batch in state.scan(epoch) for row in zip(*batch.to_pydict().values(), strict=True)]
    return sorted(rows)


class Pair:
    """The same state twice: there from the start, and arrived from files."""

    def __init__(self, layout: Layout, stores: str, folder: Path, epochs: list[pa.Table], groups: set[int]) -> None:
        self.layout = layout
        self.whole, self.arrived = (
            VariableState(layout, GROUPS, open_store(stores, layout, GROUPS, folder / name)) for name in ("a", "b")
        )
        storage = Storage(str(folder / "checkpoint"), durable=False)
        files = []
        for number, table in enumerate(epochs):
            path = f"anabranch/changes/{number}.parquet"
            written = write_changes(storage, path, layout, GROUPS, table)
            files.append(ChangeFile(StageNumber(1), "v", WorkerId("w"), path, *written))
            mine = [g in groups for g in (table.column(HASH).to_numpy() % GROUPS).tolist()]
            self.whole.load(table.filter(pa.array(mine, pa.bool_())))
        self.transfer = GroupTransfer(
            self.arrived,
            sorted(groups),
            GROUPS,
            lambda groups: CheckpointSource(storage, layout, GROUPS, groups, [], files),
        )

    def read(self, keys: list[int], epoch: int) -> None:
        table = pa.table(
            [pa.array([hash_of(key) for key in keys], pa.int64()), pa.array(keys, pa.int64())], schema=self.layout.keys
        )
        self.transfer.fetch(table.column(HASH).to_numpy(), table)
        whole, arrived = (state.read(table, epoch).to_pydict() for state in (self.whole, self.arrived))
        order = POSITION if POSITION in whole else INDEX
        assert sorted(zip(*whole.values(), strict=True)) == sorted(zip(*arrived.values(), strict=True)), order

    def write(self, epoch: int, changes: pa.Table) -> None:
        self.transfer.fetch(changes.column(HASH).to_numpy(), changes)
        for state in (self.whole, self.arrived):
            state.add_layer(epoch, changes)

    def check(self, epoch: int) -> None:
        """What has arrived is right, and after a drain of everything nothing is missing or doubled."""
        assert set(entries(self.arrived, epoch)) <= set(entries(self.whole, epoch))

    def drain(self, groups: list[int]) -> None:
        self.transfer.drain(groups)
        assert not set(groups) & set(self.transfer.pending)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), kind=st.sampled_from(KINDS), store=st.sampled_from(["memory", "memory", "rocksdb"]))
def test_arrived_state_is_what_it_would_have_been(data: st.DataObject, kind: VariableKind, store: str) -> None:
    layout = layout_of(kind)
    epochs = data.draw(st.lists(changes_of(layout), max_size=3))
    groups = data.draw(st.sets(st.integers(0, GROUPS - 1), min_size=1))
    mine = [key for key in KEYS if hash_of(key) % GROUPS in groups]
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(layout, store, Path(folder), epochs, groups)
        epoch = 0
        for action in data.draw(st.lists(st.sampled_from(["read", "write", "drain", "fold", "roll back"]), max_size=8)):
            match action:
                case "read" if mine:
                    pair.read(data.draw(st.lists(st.sampled_from(mine), unique=True)), epoch)
                case "write":
                    changes = data.draw(changes_of(layout))
                    here = [key in mine for key in changes.column("k").to_pylist()]
                    epoch += 1
                    pair.write(epoch, changes.filter(pa.array(here, pa.bool_())))
                case "drain":
                    pair.drain(sorted(data.draw(st.sets(st.sampled_from(sorted(groups))))))
                case "fold":
                    for state in (pair.whole, pair.arrived):
                        state.fold(epoch)
                case "roll back" if epoch and (pair.whole.oldest or 0) < epoch:
                    epoch -= 1
                    for state in (pair.whole, pair.arrived):
                        state.drop_layers_after(epoch)
            pair.check(epoch)
        pair.drain(sorted(groups))
        assert entries(pair.arrived, epoch) == entries(pair.whole, epoch)
        for state in (pair.whole, pair.arrived):
            state.close()


def test_fetching_brings_the_wanted_keys_and_hardly_any_others(tmp_path: Path) -> None:
    layout = layout_of(VariableKind.VALUE)
    storage = Storage(str(tmp_path), durable=False)
    count = 20_000
    hashes = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, count)
    ops, keys, values = np.full(count, Op.PUT, np.int8), np.arange(count), np.ones(count, np.int64)
    rows = [pa.array(column) for column in (hashes, ops, keys, values)]
    table = pa.table(rows, schema=layout.changes)
    written = write_changes(storage, "anabranch/changes/x.parquet", layout, GROUPS, table)
    file = ChangeFile(StageNumber(1), "v", WorkerId("w"), "anabranch/changes/x.parquet", *written)
    state = VariableState(layout, GROUPS, open_store("memory", layout, GROUPS, None))
    transfer = GroupTransfer(
        state, range(GROUPS), GROUPS, lambda groups: CheckpointSource(storage, layout, GROUPS, groups, [], [file])
    )
    first = table.slice(0, 500)
    transfer.fetch(hashes[:500], first)
    assert 500 <= state.rows() < 1000
    transfer.fetch(hashes[:500], first)
    assert transfer.brought.fetched_rows == state.rows()
    transfer.drain(range(GROUPS))
    assert state.rows() == count
    assert transfer.brought.fetched_rows + transfer.brought.drained_rows == count
