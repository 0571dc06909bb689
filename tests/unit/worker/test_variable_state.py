"""Versions of a variable: which epochs can be read, what folding and rolling back do, also while others read."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anabranch.core.errors import EpochError
from anabranch.core.schemas import INDEX, POSITION, Layout, Op, VariableKind, VariableSpec
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores import Store
from support.stores import open_store

OpenKind = Callable[[Layout, int], Store]

KEY_GROUPS = 16
VALUE = Layout(
    pa.schema([("k", pa.int64())]), VariableSpec("count", VariableKind.VALUE, pa.schema([("x", pa.int64())]))
)
LIST = Layout(pa.schema([("k", pa.int64())]), VariableSpec("events", VariableKind.LIST, pa.schema([("x", pa.int64())])))


@pytest.fixture
def state(open_kind: OpenKind) -> Iterator[VariableState]:
    state = VariableState(VALUE, KEY_GROUPS, open_kind(VALUE, KEY_GROUPS))
    yield state
    state.close()


def puts(values: dict[int, int | None]) -> pa.Table:
    """Sets values, or deletes where there is None."""
    ops = [Op.DELETE if value is None else Op.PUT for value in values.values()]
    keys = np.array(list(values), dtype=np.int64)
    return pa.table([keys * 7919, pa.array(ops, pa.int8()), keys, list(values.values())], schema=VALUE.changes)


def keys(*wanted: int) -> pa.Table:
    numbers = np.array(wanted, dtype=np.int64)
    return pa.table([numbers * 7919, numbers], schema=VALUE.keys)


def read(state: VariableState, epoch: int, *wanted: int) -> dict[int, int]:
    answer = state.read(keys(*wanted), epoch)
    index, values = answer.column(INDEX).to_pylist(), answer.column("x").to_pylist()
    return {wanted[i]: value for i, value in zip(index, values, strict=True)}


def scanned(batches: Iterator[pa.RecordBatch]) -> dict[int, int]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert len({row["k"] for row in rows}) == len(rows)
    return {row["k"]: row["x"] for row in rows}


def test_each_epoch_has_its_own_state_until_it_is_folded(state: VariableState) -> None:
    assert (state.oldest, state.newest) == (None, None)
    state.add_layer(0, puts({1: 10, 2: 20}))
    state.add_layer(1, puts({2: None, 3: 31}))
    state.add_layer(4, puts({1: 14}))
    assert read(state, -1, 1, 2, 3) == {}
    assert read(state, 0, 1, 2, 3) == {1: 10, 2: 20}
    assert read(state, 1, 1, 2, 3) == read(state, 3, 1, 2, 3) == {1: 10, 3: 31}
    assert read(state, 4, 1, 2, 3) == read(state, 9, 1, 2, 3) == {1: 14, 3: 31}
    state.fold(1)
    assert (state.oldest, state.newest) == (1, 4)
    assert read(state, 1, 1, 2, 3) == {1: 10, 3: 31}
    assert read(state, 4, 1, 2, 3) == {1: 14, 3: 31}
    with pytest.raises(EpochError, match=r"'count' is no longer held as of epoch 0.*merged up to epoch 1\. Use"):
        state.read(keys(1), 0)
    with pytest.raises(EpochError, match="no longer held"):
        state.scan(0)


def test_rolling_back_forgets_newer_epochs_but_not_folded_ones(state: VariableState) -> None:
    state.add_layer(0, puts({1: 10}))
    state.add_layer(1, puts({1: 11}))
    state.fold(0)
    state.drop_layers_after(0)
    assert state.newest == 0
    assert read(state, 1, 1) == {1: 10}
    state.add_layer(1, puts({1: 12}))
    assert read(state, 1, 1) == {1: 12}
    state.fold(1)
    with pytest.raises(EpochError, match="restore"):
        state.drop_layers_after(0)


def test_an_epoch_is_added_once_and_in_order(state: VariableState) -> None:
    state.add_layer(3, puts({1: 10}))
    for epoch in (3, 2):
        with pytest.raises(EpochError, match=r"epoch 3 already.*Roll back"):
            state.add_layer(epoch, puts({}))
    state.fold(3)
    with pytest.raises(EpochError, match="epoch 3 already"):
        state.add_layer(3, puts({}))


def test_restored_rows_lie_below_every_layer(state: VariableState) -> None:
    state.add_layer(5, puts({1: 15, 2: None}))
    state.load(puts({1: 1, 2: 2, 3: 3}))
    assert read(state, 4, 1, 2, 3) == {1: 1, 2: 2, 3: 3}
    assert read(state, 5, 1, 2, 3) == {1: 15, 3: 3}
    assert scanned(state.scan(5)) == {1: 15, 3: 3}


def test_rows_are_counted_across_layers(state: VariableState) -> None:
    state.load(puts({n: n for n in range(100)}))
    state.add_layer(0, puts(dict.fromkeys(range(50, 150), 0)))
    assert state.rows() == 150
    state.add_layer(1, puts(dict.fromkeys(range(20))))
    assert state.rows() == 130
    state.fold(1)
    assert state.rows() == 130
    assert state.bytes() > 0


def test_the_estimate_of_rows_is_close_for_large_layers() -> None:
    state = VariableState(VALUE, KEY_GROUPS, open_store("memory", VALUE, KEY_GROUPS, None))
    state.load(puts({n: n for n in range(20_000)}))
    state.add_layer(0, puts(dict.fromkeys(range(15000, 25000), 0)))
    assert abs(state.rows() - 25_000) < 2_000
    state.fold(0)
    assert state.rows() == 25_000


def test_a_scan_goes_on_as_of_its_epoch_whatever_happens_meanwhile(state: VariableState) -> None:
    state.load(puts(dict.fromkeys(range(1000), 0)))
    state.add_layer(0, puts(dict.fromkeys(range(0, 1000, 2), 1)))
    expected = {n: (n + 1) % 2 for n in range(1000)}
    batches = state.scan(0)
    state.add_layer(1, puts(dict.fromkeys(range(1000))))
    state.fold(1)
    state.drop_groups(range(8))
    assert scanned(batches) == expected
    assert scanned(state.scan(1)) == {}


def test_keys_with_equal_hashes_stay_apart_in_every_part_of_the_state(open_kind: OpenKind) -> None:
    text = Layout(pa.schema([("k", pa.string())]), VALUE.variable)
    state = VariableState(text, KEY_GROUPS, open_kind(text, KEY_GROUPS))
    names = ["", "a", "aa", "b", "\x00", "\x00\x00"]

    def changed(values: dict[str, int]) -> pa.Table:
        columns = [[42] * len(values), [Op.PUT] * len(values), list(values), list(values.values())]
        return pa.table(columns, schema=text.changes)

    wanted = pa.table([[42] * len(names), names], schema=text.keys)
    state.load(changed({name: i for i, name in enumerate(names)}))
    state.add_layer(0, changed({"a": 10, "\x00": 40}))
    for _ in range(2):
        assert state.read(wanted, 0).column("x").to_pylist() == [0, 10, 2, 3, 40, 5]
        without = pa.table([[42, 42], ["aa", ""]], schema=text.keys)
        rest = [row["k"] for batch in state.scan(0, without=without) for row in batch.to_pylist()]
        assert sorted(rest) == ["\x00", "\x00\x00", "a", "b"]
        state.fold(0)
    state.close()


def test_lists_come_in_the_order_of_their_positions(open_kind: OpenKind) -> None:
    state = VariableState(LIST, KEY_GROUPS, open_kind(LIST, KEY_GROUPS))

    def appended(positions: list[int], op: int = Op.PUT) -> pa.Table:
        n = len(positions)
        return pa.table([[5] * n, [op] * n, [5] * n, positions, positions], schema=LIST.changes)

    state.add_layer(0, appended([300, 2, 70_000]))
    state.fold(0)
    state.add_layer(1, appended([1, 255, 256]))
    answer = state.read(pa.table([[5], [5]], schema=LIST.keys), 1)
    assert answer.column(POSITION).to_pylist() == [1, 2, 255, 256, 300, 70_000]
    clear = pa.table([[5], [Op.CLEAR], [5], [None], [None]], schema=LIST.changes)
    state.add_layer(2, pa.concat_tables([appended([9]), clear]))
    for _ in range(2):
        assert state.read(pa.table([[5], [5]], schema=LIST.keys), 2).column(POSITION).to_pylist() == [9]
        state.fold(2)
    assert state.rows() == 1
    state.close()


class FailsOnce:
    """A store whose first change fails when half of it is done."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.has_failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def apply(self, changes: Any) -> None:
        if not self.has_failed:
            self.has_failed = True
            self._store.apply(changes.take(np.arange(len(changes) // 2)))
            raise OSError("disk full")
        self._store.apply(changes)


def test_a_fold_that_failed_half_way_loses_nothing_and_can_be_repeated(open_kind: OpenKind) -> None:
    store = FailsOnce(open_kind(VALUE, KEY_GROUPS))
    state = VariableState(VALUE, KEY_GROUPS, store)
    state.add_layer(0, puts({n: n for n in range(100)}))
    with pytest.raises(OSError, match="disk full"):
        state.fold(0)
    assert len(read(state, 0, *range(100))) == 100
    state.fold(0)
    assert len(read(state, 0, *range(100))) == state.rows() == 100
    state.close()


def test_a_fold_waits_for_those_who_read_older_epochs(state: VariableState) -> None:
    state.add_layer(0, puts({1: 10}))
    state.add_layer(1, puts({1: 11}))
    state.fold(0)
    folding = threading.Thread(target=state.fold, args=(1,))
    with state._reading(0) as layers:
        folding.start()
        folding.join(timeout=0.2)
        assert folding.is_alive()
        assert not layers
        assert read(state, 1, 1) == {1: 11}
        with pytest.raises(EpochError):
            state.read(keys(1), 0)
    folding.join(timeout=10)
    assert not folding.is_alive()
    assert read(state, 1, 1) == {1: 11}


COUNT, EPOCHS = 3000, 24
Entries = dict[tuple[int, int], int]


def history(layout: Layout) -> tuple[list[pa.Table], list[Entries]]:
    """Epochs that each put, delete or clear entries of a third of the keys, and what there is after each."""
    lists = layout.variable.kind is VariableKind.LIST
    tables, states, state = [], [], Entries()
    for epoch in range(EPOCHS):
        rows = []
        for key in range(epoch % 3, COUNT, 3):
            if (key + epoch) % 7 == 0:
                rows.append((key, Op.CLEAR if lists else Op.DELETE, None, None))
            else:
                rows.append((key, Op.PUT, epoch, epoch))
                if lists:
                    rows.append((key, Op.DELETE, epoch - 6, None))
        cleared = {key for key, op, _, _ in rows if op != Op.PUT and (not lists or op == Op.CLEAR)}
        deleted = {(key, position) for key, op, position, _ in rows if lists and op == Op.DELETE}
        state = {at: value for at, value in state.items() if at[0] not in cleared and at not in deleted}
        state |= {(key, position if lists else 0): value for key, op, position, value in rows if op == Op.PUT}
        states.append(state)
        keys, ops, positions, values = (list(column) for column in zip(*rows, strict=True))
        columns = [np.array(keys) * 7919, ops, keys, *([positions] if lists else []), values]
        tables.append(pa.table(columns, schema=layout.changes))
    return tables, states


def entries_of(rows: list[dict[str, Any]], key: str) -> Entries:
    found = {(row[key], row.get(POSITION, 0)): row["x"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("layout", [VALUE, LIST], ids=["value", "list"])
def test_readers_see_every_key_correctly_at_every_moment_of_a_fold(open_kind: OpenKind, layout: Layout) -> None:
    state = VariableState(layout, KEY_GROUPS, open_kind(layout, KEY_GROUPS))
    tables, states = history(layout)
    everything = keys(*range(COUNT))
    committed, finished, errors, checked = [-1], threading.Event(), [], [0, 0]

    def look(how: int, epoch: int) -> Entries:
        if how == 0:
            return entries_of(state.read(everything, epoch).to_pylist(), INDEX)
        return entries_of([row for batch in state.scan(epoch) for row in batch.to_pylist()], "k")

    def watch(how: int) -> None:
        try:
            while not finished.is_set() or not checked[how]:
                epoch = committed[0]
                # An epoch that has been folded since cannot be read; the next one is tried then.
                with contextlib.suppress(EpochError):
                    if epoch >= 0:
                        assert look(how, epoch) == states[epoch]
                        checked[how] += 1
        except BaseException as error:
            errors.append(error)

    watchers = [threading.Thread(target=watch, args=(how,)) for how in range(2)]
    for watcher in watchers:
        watcher.start()
    folds = [threading.Thread(target=state.fold, args=(epoch,)) for epoch in range(EPOCHS)]
    for epoch, fold in enumerate(folds):
        state.add_layer(epoch, tables[epoch])
        committed[0] = epoch
        fold.start()
    for thread in folds:
        thread.join()
    finished.set()
    for thread in watchers:
        thread.join()
    assert not errors
    assert min(checked) > 0
    assert state.rows() == len(states[-1])
    assert look(0, EPOCHS - 1) == look(1, EPOCHS - 1) == states[-1]
    state.close()


def test_columns_of_keys_may_be_chunked_or_a_record_batch(state: VariableState) -> None:
    state.load(puts({n: n for n in range(10)}))
    chunked = pa.concat_tables([keys(1, 2), keys(3)])
    assert state.read(chunked, 0).column("x").to_pylist() == [1, 2, 3]
    assert state.read(chunked.combine_chunks().to_batches()[0], 0).column("x").to_pylist() == [1, 2, 3]
    assert state.read(VALUE.keys.empty_table(), 0).num_rows == 0


def test_a_map_may_have_keys_and_no_values(open_kind: OpenKind) -> None:
    """As timers are: the time is the key, and there is nothing more to say."""
    layout = Layout(
        pa.schema([("k", pa.string())]),
        VariableSpec("timers", VariableKind.MAP, pa.schema([]), pa.schema([("expiry_ms", pa.int64())])),
    )
    state = VariableState(layout, 16, open_kind(layout, 16))

    def change(epoch: int, *rows: tuple[str, int, int]) -> None:
        keys, ops, times = zip(*rows, strict=True)
        hashes = [hash_of(key) for key in keys]
        state.add_layer(epoch, pa.table([hashes, pa.array(ops, pa.int8()), keys, times], schema=layout.changes))

    def hash_of(key: str) -> int:
        return ord(key) * 7919

    change(0, ("a", Op.PUT, 5), ("a", Op.PUT, 7), ("b", Op.PUT, 5))
    change(1, ("a", Op.DELETE, 5), ("c", Op.PUT, 9))
    asked = pa.table([[hash_of(key) for key in "abc"], list("abc")], schema=layout.keys)
    for folded in (None, 0, 1):
        if folded is not None:
            state.fold(folded)
        found = state.read(asked, 1)
        assert sorted(zip(*[found.column(i).to_pylist() for i in range(2)], strict=True)) == [(0, 7), (1, 5), (2, 9)]
        scanned = [row for batch in state.scan(1) for row in batch.to_pylist()]
        assert sorted((row["k"], row["expiry_ms"]) for row in scanned) == [("a", 7), ("b", 5), ("c", 9)]
    state.close()
