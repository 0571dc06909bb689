"""Tables find rows by key, keep keys with equal hashes apart, and use memory sparingly."""

import numpy as np
import pytest

from anabranch.worker.codec import Encoded, from_objects, to_objects
from anabranch.worker.index import HashIndex, Positions, RowNumbers
from anabranch.worker.table import RowTable

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
