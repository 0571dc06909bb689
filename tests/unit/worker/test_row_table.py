"""Tables find rows by key, keep keys with equal hashes apart, and use memory sparingly."""

from typing import Any

import numpy as np
import pytest

from anabranch.worker.state.codec import Encoded, from_objects, to_objects
from anabranch.worker.state.hash_index import HashIndex, Positions, RowNumbers
from anabranch.worker.state.table import RowTable

WIDTHS = [(9, 17), (None, None), (8, None), (None, 3), (1, 0)]


def keys_of(numbers: np.ndarray, width: int | None) -> Encoded:
    if width is None:
        return from_objects([b"key-%d" % n for n in numbers], None)
    return from_objects([int(n).to_bytes(16, "big")[-width:] for n in numbers], width)


def values_of(numbers: np.ndarray, width: int | None) -> Encoded:
    if width is None:
        return from_objects([b"v" * (int(n) % 5) + b"%d" % n for n in numbers], None)
    return from_objects([int(n).to_bytes(32, "big")[32 - width :] for n in numbers], width)


def hashes_of(numbers: np.ndarray, key_groups: int = 0) -> np.ndarray:
    """Well spread, or as of one key group only."""
    bits = np.asarray(numbers, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    bits ^= bits >> np.uint64(29)
    return (bits * np.uint64(key_groups or 1)).view(np.int64)


@pytest.mark.parametrize(("key_width", "value_width"), WIDTHS)
@pytest.mark.parametrize("hash_count", [1, 7, 2**40])
def test_a_table_is_a_dict(key_width: int | None, value_width: int | None, hash_count: int) -> None:
    random = np.random.default_rng(1)
    table, model = RowTable(key_width, value_width), {}
    for _ in range(60):
        numbers = random.choice(200, size=random.integers(1, 60), replace=False)
        hashes, keys = hashes_of(numbers) % hash_count, keys_of(numbers, key_width)
        if random.random() < 0.6:
            fresh = random.integers(0, 2**40, len(numbers))
            table.reserve(len(numbers))
            table.put(hashes, keys, values_of(fresh, value_width))
            model.update(zip(numbers.tolist(), fresh.tolist(), strict=True))
        else:
            there = sum(1 for n in numbers.tolist() if n in model)
            assert table.remove(hashes, keys) == there
            model = {n: value for n, value in model.items() if n not in set(numbers.tolist())}
        everything = np.arange(200)
        rows = table.find(hashes_of(everything) % hash_count, keys_of(everything, key_width))
        assert np.flatnonzero(rows >= 0).tolist() == sorted(model)
        found = rows[rows >= 0]
        expected = values_of(np.array([model[n] for n in sorted(model)], dtype=np.int64), value_width)
        assert to_objects(table.values(found)).tolist() == to_objects(expected).tolist()
        assert sorted(table.rows().tolist()) == sorted(found.tolist())
        assert len(table) == len(model)
    # Removed rows are used again, so the columns have not outgrown what was there at any one time.
    assert table.capacity <= 1024


@pytest.mark.parametrize(("key_width", "value_width"), [*WIDTHS[:-1], (3, 0)])
def test_a_table_without_some_rows_has_all_others(key_width: int | None, value_width: int | None) -> None:
    numbers = np.arange(150_000)
    table = RowTable(key_width, value_width)
    table.reserve(len(numbers))
    table.put(hashes_of(numbers), keys_of(numbers, key_width), values_of(numbers, value_width))
    table.remove(hashes_of(numbers[::7]), keys_of(numbers[::7], key_width))
    goes = (numbers % 3 == 0) & (numbers % 7 != 0)
    left = table.without(table.find(hashes_of(numbers[goes]), keys_of(numbers[goes], key_width)))
    rows = left.find(hashes_of(numbers), keys_of(numbers, key_width))
    stays = (numbers % 3 != 0) & (numbers % 7 != 0)
    assert (rows >= 0).tolist() == stays.tolist()
    assert len(left) == stays.sum()
    assert left.capacity < table.capacity
    values = to_objects(left.values(rows[stays])).tolist()
    assert values == to_objects(values_of(numbers[stays], value_width)).tolist()
    assert left.all_hashes().tolist() == left.hashes(left.rows()).tolist()
    assert table.all_hashes().tolist() == table.hashes(table.rows()).tolist()


@pytest.mark.parametrize("key_width", [9, None])
def test_an_index_is_built_while_the_table_changes(key_width: int | None) -> None:
    random = np.random.default_rng(2)
    there = set(range(3000))
    table = RowTable(key_width, 8)

    def change(goes: list[int], comes: list[int]) -> None:
        table.remove(hashes_of(np.array(goes)), keys_of(np.array(goes), key_width))
        table.reserve(len(comes))
        table.put(hashes_of(np.array(comes)), keys_of(np.array(comes), key_width), values_of(np.array(comes), 8))

    change([9999], sorted(there))
    for turn in range(5):
        draft = table.draft_index(30_000 << turn)
        assert draft is not None
        goes = random.choice(sorted(there), 500, replace=False).tolist()
        # Some come back, in other rows or the same; others take the rows of those that have gone, or new ones.
        comes = [*goes[:200], *range(10_000 * (turn + 1), 10_000 * (turn + 1) + int(random.integers(0, 900)))]
        change(goes[:400], comes)
        draft.build()
        change(goes[400:], goes[:1])
        table.use_index(draft)
        there = (there - set(goes)) | set(comes)
        everything = np.arange(100_000)
        rows = table.find(hashes_of(everything), keys_of(everything, key_width))
        assert set(np.flatnonzero(rows >= 0).tolist()) == there
        assert len(table) == len(there)
        values = to_objects(table.values(rows[rows >= 0])).tolist()
        assert values == to_objects(values_of(np.array(sorted(there)), 8)).tolist()
    assert table.draft_index(10_000) is None


def test_a_draft_that_is_given_up_leaves_nothing_behind() -> None:
    table = RowTable(9, 8)
    for failed in range(3):
        assert table.draft_index(100_000) is not None
        numbers = np.arange(failed * 100, failed * 100 + 100)
        table.reserve(len(numbers))
        table.put(hashes_of(numbers), keys_of(numbers, 9), values_of(numbers, 8))
        assert table._touched
        table.drop_draft()
        assert table._touched is None
    everything = np.arange(300)
    assert (table.find(hashes_of(everything), keys_of(everything, 9)) >= 0).all()


def test_a_table_begins_small_where_addresses_are_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = np.empty

    def scarce(shape: Any, dtype: Any = float) -> Any:
        if np.prod(shape) > 1 << 20:
            raise MemoryError
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(np, "empty", scarce)
    table = RowTable(9, 8, room_bytes=1 << 30)
    numbers = np.arange(5000)
    table.reserve(len(numbers))
    table.put(hashes_of(numbers), keys_of(numbers, 9), values_of(numbers, 8))
    assert (table.find(hashes_of(numbers), keys_of(numbers, 9)) >= 0).all()


@pytest.mark.parametrize("width", [9, None])
def test_of_equal_keys_in_one_batch_the_last_value_stays(width: int | None) -> None:
    numbers = np.array([5, 6, 5, 5, 7, 6])
    table = RowTable(width, 4)
    table.reserve(len(numbers))
    rows = table.put(hashes_of(numbers), keys_of(numbers, width), values_of(np.arange(6), 4))
    assert len(table) == 3
    assert rows[0] == rows[2] == rows[3]
    assert to_objects(table.values(rows)).tolist() == to_objects(values_of(np.array([3, 5, 3, 3, 4, 5]), 4)).tolist()
    assert table.remove(hashes_of(numbers), keys_of(numbers, width)) == 3


def test_an_int64_key_with_two_int64_values_takes_at_most_70_bytes() -> None:
    table = RowTable(9, 17)
    per_key = []
    for start in range(0, 400_000, 20_000):
        numbers = np.arange(start, start + 20_000, dtype=np.int64)
        keys = np.zeros((len(numbers), 9), dtype=np.uint8)
        keys[:, 1:] = numbers.view(np.uint8).reshape(-1, 8)
        table.reserve(len(numbers))
        table.put(hashes_of(numbers), keys, np.zeros((len(numbers), 17), dtype=np.uint8))
        per_key.append(table.nbytes / len(table))
    assert max(per_key[5:]) <= 70


@pytest.mark.parametrize("key_groups", [1, 1024, 32_768])
def test_keys_of_one_key_group_do_not_cluster(key_groups: int) -> None:
    hashes = hashes_of(np.arange(50_000), key_groups)
    index, collisions = HashIndex(len(hashes)), []

    def never(rows: RowNumbers, _: Positions | slice) -> np.ndarray:
        collisions.append(len(rows))
        return np.zeros(len(rows), dtype=np.bool_)

    index.insert(hashes, np.arange(len(hashes), dtype=np.int32), never)
    assert sum(collisions) < len(hashes)
    assert len(collisions) < 60


def test_an_index_stays_small_while_keys_come_and_go() -> None:
    index, rows = HashIndex(1000), np.arange(500, dtype=np.int32)
    everything: dict[int, int] = {}

    def hashes_in(held: RowNumbers) -> np.ndarray:
        return np.array([everything[int(row)] for row in held], dtype=np.int64)

    def same(held: RowNumbers, which: Positions | slice) -> np.ndarray:
        return hashes_in(held) == hashes[which]

    for turn in range(40):
        hashes = hashes_of(np.arange(turn * 500, (turn + 1) * 500))
        everything.update(zip(rows.tolist(), hashes.tolist(), strict=True))
        index.reserve(len(rows), hashes_in)
        index.insert(hashes, rows, same)
        found, slots = index.find(hashes, same)
        assert found.tolist() == rows.tolist()
        index.remove(slots)
        assert len(index) == 0
    assert index.nbytes <= 4 * 4096
