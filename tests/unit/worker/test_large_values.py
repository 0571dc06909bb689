"""State with large values: worked on in parts, held once, and let go of when it is not needed."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import rocksdict

from anabranch.core.ids import Attempt, Partition, StageAttempt, StageNumber
from anabranch.core.requests import Write
from anabranch.core.schemas import Layout, Op, VariableKind, VariableSpec
from anabranch.wire import frames
from anabranch.worker.server import staging
from anabranch.worker.server.staging import Staging
from anabranch.worker.state import allocation, codec, rows
from anabranch.worker.state.rows import VariableCodec
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores import Store, rocksdb
from anabranch.worker.stores.rocksdb import RocksStore

VALUES = pa.schema([("text", pa.string()), ("more", pa.list_(pa.binary())), ("n", pa.int64())])
LAYOUT = Layout(pa.schema([("k", pa.int64())]), VariableSpec("v", VariableKind.VALUE, VALUES))
GROUPS = 16
ROW_BYTES = 100_000


def changes_of(first: int, count: int, size: int = ROW_BYTES) -> pa.Table:
    """In one buffer, as a message comes."""
    numbers = np.arange(first, first + count)
    texts = [str(n).ljust(size // 2, "x") if n % 5 else None for n in numbers]
    lists = [[b"", bytes([n % 256]) * (size // 2)] for n in numbers]
    ops = np.full(count, Op.PUT, dtype=np.int8)
    table = pa.table([numbers * 7919, ops, numbers, texts, lists, numbers], schema=LAYOUT.changes)
    return frames.unpack(frames.pack({}, {"v": table}))[1]["v"]


def keys_of(count: int) -> pa.Table:
    numbers = np.arange(count)
    return pa.table([numbers * 7919, numbers], schema=LAYOUT.keys)


@pytest.fixture
def state(open_kind: Callable[[Layout, int], Store]) -> VariableState:
    return VariableState(LAYOUT, GROUPS, open_kind(LAYOUT, GROUPS))


def test_large_rows_are_read_and_scanned_in_batches_of_bounded_size(
    state: VariableState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MESSAGE_BYTES", 16 * ROW_BYTES)
    changes = pa.concat_tables([changes_of(0, 30), changes_of(30, 1, 9 * ROW_BYTES), changes_of(31, 29)])
    state.add_layer(0, changes)
    state.fold(0)
    state.add_layer(1, changes_of(7, 5))
    for found in (state.read_in_batches(keys_of(60), 1), state.scan(1)):
        batches = list(found)
        assert sum(batch.num_rows for batch in batches) == 60
        # Four batches make a message.
        assert all(batch.nbytes <= 4.2 * ROW_BYTES or batch.num_rows == 1 for batch in batches)
    answers = pa.Table.from_batches(state.read_in_batches(keys_of(60), 1))
    assert answers.select(VALUES.names).equals(changes.select(VALUES.names))
    state.close()


@pytest.mark.parametrize("size", [0, 3, 300, 3000, 100_000])
def test_rows_of_any_length_come_back_as_they_were(size: int) -> None:
    changes = changes_of(0, 20, size)
    encoded = VariableCodec(LAYOUT).encode_changes(changes)
    assert pa.table(VariableCodec(LAYOUT).value.decode(encoded.values), schema=VALUES).equals(
        changes.select(VALUES.names)
    )


def test_changes_that_are_encoded_are_not_held_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer is made of many messages, each is freed when it is part of the layer."""
    monkeypatch.setattr(codec, "PART_BYTES", 4 * ROW_BYTES)
    codec_of_rows, pool = VariableCodec(LAYOUT), pa.default_memory_pool()
    held: list[int] = []
    encode = VariableCodec._encode_batch

    def noting(self: VariableCodec, batch: pa.RecordBatch) -> rows.Changes:
        encoded = encode(self, batch)
        held.append(pool.bytes_allocated())
        return encoded

    monkeypatch.setattr(VariableCodec, "_encode_batch", noting)
    gc.collect()
    before = pool.bytes_allocated()
    batches = codec.batches_of(pa.concat_tables([changes_of(n, 4) for n in range(0, 40, 4)]))
    encoded = codec_of_rows.encode_batches(batches)
    assert len(encoded) == 40
    assert held[0] - before > 35 * ROW_BYTES
    assert held[-1] - before < 10 * ROW_BYTES
    # Nor do the hashes keep the message alive with which they came.
    assert pool.bytes_allocated() - before < ROW_BYTES


def test_staged_changes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", ROW_BYTES)
    staged, pool = Staging(), pa.default_memory_pool()
    attempt = StageAttempt(StageNumber(1), Partition(0), Attempt(0))
    run: dict[str, Any] = {"job": "0" * 32, "generation": 1, "epoch": 0, "run": 0}
    for chunk in (0, 1):
        write = Write(**run, **attempt._asdict(), chunk=chunk, last=chunk == 1)
        staged.add(write, {"v": changes_of(10 * chunk, 10)})
    before = pool.bytes_allocated()
    combined = staged.combined([attempt])
    assert len(combined[1, "v"]) == 20
    assert pool.bytes_allocated() == before


def test_memory_is_given_back_after_large_values_and_not_after_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(allocation, "_trim", lambda: trimmed.append)
    allocation.give_back_after(rows=1_000_000, size=200_000_000)
    allocation.give_back_after(rows=1, size=1_000_000)
    assert trimmed == []
    allocation.give_back_after(rows=20, size=20_000_000)
    assert trimmed == [0]


def test_the_store_on_disk_takes_large_values_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb, "_CALL_BYTES", 5 * ROW_BYTES)
    store = RocksStore(VariableCodec(LAYOUT).shape(GROUPS), tmp_path / "db")
    batches: list[int] = []
    write_batch = rocksdict.WriteBatch

    def counted(**options: bool) -> Any:
        batch = write_batch(**options)
        batches.append(0)
        return batch

    monkeypatch.setattr(rocksdict, "WriteBatch", counted)
    encoded = VariableCodec(LAYOUT).encode_changes(changes_of(0, 40))
    for _ in range(2):  # the second time, all rows are there
        store.apply(encoded)
        assert store.rows() == 40
    assert len(batches) >= 2 * 40 / 5
    parts = list(store.snapshot(None))
    assert sum(map(len, parts)) == 40
    assert max(map(len, parts)) <= 6
    deletes = changes_of(0, 30).set_column(1, LAYOUT.changes.field(1), pa.array([Op.DELETE] * 30, pa.int8()))
    store.apply(VariableCodec(LAYOUT).encode_changes(deletes))
    assert store.rows() == 10
    store.destroy()


def test_large_values_are_not_read_only_to_be_replaced(tmp_path: Path) -> None:
    store = RocksStore(VariableCodec(LAYOUT).shape(GROUPS), tmp_path / "db")
    encoded = VariableCodec(LAYOUT).encode_changes(changes_of(0, 40))
    store.apply(encoded)
    got: list[int] = []

    class Noting:
        """The database, with a note of how many values are got."""

        def __init__(self, db: Any) -> None:
            self._db = db

        def __getattr__(self, name: str) -> Any:
            return getattr(self._db, name)

        def __contains__(self, row: bytes) -> bool:
            return row in self._db

        def get(self, rows: list[bytes]) -> Any:
            got.append(len(rows))
            return self._db.get(rows)

    store._db = Noting(store._db)
    deletes = changes_of(0, 35).set_column(1, LAYOUT.changes.field(1), pa.array([Op.DELETE] * 35, pa.int8()))
    store.apply(VariableCodec(LAYOUT).encode_changes(deletes))
    assert store.rows() == 5
    assert sum(got) < 30
    store.destroy()
