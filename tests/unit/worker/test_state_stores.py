"""What all stores promise beyond reads and changes: snapshots, key groups, memory and files given back."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import rocksdict

from anabranch.core.errors import SettingsError
from anabranch.core.schemas import HASH, OP, POSITION, Layout, Op, VariableKind, VariableSpec
from anabranch.worker.state.rows import Changes, VariableCodec
from anabranch.worker.state.table import RowTable
from anabranch.worker.stores import Store
from anabranch.worker.stores.options import StoreOptions
from support.keyed_state import SPEC
from support.state_workers import JOB
from support.stores import open_store

OpenKind = Callable[[Layout, int], Store]

KEY_GROUPS = 16
VALUE = Layout(pa.schema([("k", pa.int64())]), VariableSpec("v", VariableKind.VALUE, pa.schema([("x", pa.int64())])))
LIST = Layout(pa.schema([("k", pa.string())]), VariableSpec("v", VariableKind.LIST, pa.schema([("x", pa.string())])))


@pytest.fixture(params=[VALUE, LIST], ids=["value", "list"])
def layout(request: pytest.FixtureRequest) -> Layout:
    layout: Layout = request.param
    return layout


@pytest.fixture
def store(open_kind: OpenKind, layout: Layout) -> Iterator[Store]:
    store = open_kind(layout, KEY_GROUPS)
    yield store
    store.destroy()


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


def content(store: Store, layout: Layout, groups: range | list[int] | None = None) -> dict[int, int]:
    """What a snapshot of the store has."""
    return contents(store.snapshot(groups), layout)


def contents(snapshot: Iterator, layout: Layout) -> dict[int, int]:
    rows = [row for part in snapshot for row in VariableCodec(layout).decode_rows(part).to_pylist()]
    assert all(row[HASH] == int(row["k"]) for row in rows)
    assert len({row["k"] for row in rows}) == len(rows)
    return {int(row["k"]): int(row["x"]) for row in rows}


def test_applying_changes_twice_is_the_same_as_once(store: Store, layout: Layout) -> None:
    for _ in range(2):
        store.apply(changes(layout, range(100), 1))
        store.apply(changes(layout, range(50), 2))
        store.apply(changes(layout, range(90, 110), 0, Op.DELETE))
        assert store.rows() == 90
    assert content(store, layout) == {n: 2 if n < 50 else 1 for n in range(90)}


def test_a_snapshot_does_not_see_what_changes_while_it_is_read(store: Store, layout: Layout) -> None:
    store.apply(changes(layout, range(1000), 1))
    snapshot = store.snapshot(None)
    store.apply(changes(layout, range(500), 2))
    store.apply(changes(layout, range(500, 600), 0, Op.CLEAR))
    store.apply(changes(layout, range(1000, 2000), 3))
    store.drop_groups([3])
    assert contents(snapshot, layout) == dict.fromkeys(range(1000), 1)


def test_a_snapshot_has_the_rows_of_the_chosen_key_groups_once(store: Store, layout: Layout) -> None:
    store.apply(changes(layout, range(-100, 100), 1))
    assert content(store, layout, [4, 3, 4, 9]) == {n: 1 for n in range(-100, 100) if n % KEY_GROUPS in (3, 4, 9)}
    assert content(store, layout, []) == {}


def test_snapshots_of_key_groups_are_right_whatever_changes_between_them(store: Store, layout: Layout) -> None:
    """A store may remember where the rows of a key group are, but not for longer than that is true."""
    random = np.random.default_rng(7)
    expected: dict[int, int] = {}
    for round_ in range(60):
        start = int(random.integers(0, 300))
        numbers = range(start, start + int(random.integers(1, 40)), int(random.choice([1, KEY_GROUPS])))
        match random.integers(4):
            case 0 | 1:
                store.apply(changes(layout, numbers, round_))
                expected |= dict.fromkeys(numbers, round_)
            case 2:
                store.apply(changes(layout, numbers, 0, Op.DELETE if round_ % 2 else Op.CLEAR))
                expected = {n: x for n, x in expected.items() if n not in numbers}
            case _:
                dropped = int(random.integers(KEY_GROUPS))
                store.drop_groups([dropped])
                expected = {n: x for n, x in expected.items() if n % KEY_GROUPS != dropped}
        groups = random.choice(KEY_GROUPS, int(random.integers(1, 5)), replace=False).tolist()
        assert content(store, layout, groups) == {n: x for n, x in expected.items() if n % KEY_GROUPS in groups}
        assert store.rows(groups) == sum(n % KEY_GROUPS in groups for n in expected)


def test_rows_are_counted_for_some_key_groups_too(store: Store, layout: Layout) -> None:
    store.apply(changes(layout, range(200), 1))
    assert store.rows([3, 4]) == sum(n % KEY_GROUPS in (3, 4) for n in range(200))
    assert store.rows([]) == 0
    assert store.rows(range(KEY_GROUPS)) == store.rows() == 200


def test_dropped_key_groups_are_gone_and_may_come_back(store: Store, layout: Layout) -> None:
    store.apply(changes(layout, range(200), 1))
    store.drop_groups([0, 1, 2, 15])
    kept = {n: 1 for n in range(200) if n % KEY_GROUPS not in (0, 1, 2, 15)}
    assert content(store, layout) == kept
    assert store.rows() == len(kept)
    store.apply(changes(layout, range(16, 18), 5))
    assert content(store, layout) == {**kept, 16: 5, 17: 5}
    assert store.rows() == len(kept) + 2


def test_batches_of_a_snapshot_are_bounded(store: Store, layout: Layout) -> None:
    store.apply(changes(layout, range(150_000), 1))
    sizes = [len(part) for part in store.snapshot(None)]
    assert sum(sizes) == 150_000
    assert max(sizes) <= 65_536


def test_readers_wait_while_rows_in_memory_change_in_place(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory", layout, KEY_GROUPS, None)
    store.apply(changes(layout, range(10), 1))
    changing, go_on = threading.Event(), threading.Event()
    put = RowTable.put

    def slow_put(*arguments: Any) -> Any:
        changing.set()
        assert go_on.wait(10)
        return put(*arguments)

    monkeypatch.setattr(RowTable, "put", slow_put)
    wanted = changes(layout, range(10), 2)
    writer = threading.Thread(target=store.apply, args=(wanted,))
    writer.start()
    assert changing.wait(10)
    reader = threading.Thread(target=store.read, args=(wanted.keys_of(np.arange(10)),))
    reader.start()
    reader.join(0.1)
    assert reader.is_alive()
    go_on.set()
    for thread in (writer, reader):
        thread.join(10)
        assert not thread.is_alive()


def test_memory_is_given_back_when_most_key_groups_leave() -> None:
    store = open_store("memory", VALUE, KEY_GROUPS, None)
    store.apply(changes(VALUE, range(100_000), 1))
    full = store.size_bytes()
    store.drop_groups(range(12))
    assert store.rows() == 25_000
    assert store.size_bytes() < full / 3
    assert content(store, VALUE) == {n: 1 for n in range(100_000) if n % KEY_GROUPS >= 12}


def test_rows_that_were_announced_are_not_copied_while_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    grown: list[int] = []
    grow = RowTable._grow
    monkeypatch.setattr(RowTable, "_grow", lambda table, more: (grown.append(more), grow(table, more)))
    store = open_store("memory", VALUE, KEY_GROUPS, None)
    store.make_room(200_000)
    grown.clear()
    for start in range(0, 200_000, 20_000):
        store.apply(changes(VALUE, range(start, start + 20_000), 1))
    assert grown == []
    assert store.rows() == 200_000


def test_room_for_entries_of_lists_is_made_by_the_keys_that_they_may_have() -> None:
    store = open_store("memory", LIST, KEY_GROUPS, None)
    store.make_room(1_000_000)  # nothing is known of keys yet
    little = store.size_bytes()
    for position in range(10):
        entries = changes(LIST, range(100), 1)
        store.apply(replace(entries, subkeys=entries.subkeys + np.uint8(position)))
    assert store.rows() == 1000
    store.make_room(1_000_000)
    assert little < store.size_bytes() < little + 100_000 * 100


def test_entries_of_lists_count_as_memory() -> None:
    store = open_store("memory", LIST, KEY_GROUPS, None)
    store.apply(changes(LIST, range(10_000), 10**15))
    assert store.size_bytes() > 10_000 * 150


def test_rocksdb_starts_empty_whatever_its_directory_holds_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "job" / "stage" / "variable"
    left = rocksdict.Rdict(str(directory))
    left["key"] = "value"
    left.close()
    assert any(directory.iterdir())
    store = open_store("rocksdb", VALUE, KEY_GROUPS, directory)
    assert content(store, VALUE) == {}
    assert store.rows() == 0
    for _ in range(2):
        store.destroy()
        assert not directory.exists()


def test_rocksdb_writes_no_log(tmp_path: Path) -> None:
    store = open_store("rocksdb", VALUE, KEY_GROUPS, tmp_path / "db")
    store.apply(changes(VALUE, range(1000), 1))
    assert sum(path.stat().st_size for path in (tmp_path / "db").glob("*.log")) == 0
    store.destroy()


def test_an_unknown_kind_or_a_missing_directory_is_refused() -> None:
    with pytest.raises(SettingsError, match="memory, rocksdb"):
        StoreOptions("disk").open(JOB, SPEC, "total", KEY_GROUPS)
    with pytest.raises(SettingsError, match="directory"):
        StoreOptions("rocksdb").open(JOB, SPEC, "total", KEY_GROUPS)


def test_long_lists_are_read_in_whole(open_kind: OpenKind) -> None:
    store = open_kind(LIST, KEY_GROUPS)
    codec = VariableCodec(LIST)
    table = pa.table(
        {
            HASH: pa.array([7] * 3000, pa.int64()),
            OP: pa.array([Op.PUT] * 3000, pa.int8()),
            "k": ["seven"] * 3000,
            POSITION: pa.array(range(3000), pa.int64()),
            "x": [str(n) for n in range(3000)],
        },
        schema=LIST.changes,
    )
    store.apply(codec.encode_changes(table))
    entries = store.read(codec.encode_keys(pa.table({HASH: np.array([8, 7]), "k": ["eight", "seven"]})))
    answer = codec.decode_answers(entries)
    assert answer.column("_index").unique().to_pylist() == [1]
    assert sorted(answer.column(POSITION).to_pylist()) == list(range(3000))
    store.destroy()
