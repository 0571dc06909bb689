"""The rows of each key come together, whatever their types and hashes."""

import datetime as dt
from collections import defaultdict
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.schemas import HASH
from anabranch.operators.grouping import Groups, frozen, group_rows


def group(keys: list[Any], kind: pa.DataType, hash_of: Any, rows_per_batch: int = 7) -> Groups:
    table = pa.table(
        {
            HASH: pa.array([hash_of(key) for key in keys], pa.int64()),
            "_key0": pa.array(keys, kind),
            "n": pa.array(range(len(keys)), pa.int64()),
        }
    )
    return group_rows(table.to_batches(max_chunksize=rows_per_batch), pa.schema([("k", kind)]))


@pytest.mark.parametrize(
    ("kind", "ascending"),
    [
        (pa.int64(), [None, -5, 0, 7, 2**40]),
        (pa.string(), [None, "", "B", "a", "aa", "é"]),
        (pa.float64(), [None, float("-inf"), -1.5, 0.0, 3.0, float("inf"), float("nan")]),
        (pa.bool_(), [None, False, True]),
        (pa.decimal128(10, 2), [None, Decimal("-3.10"), Decimal("0.00"), Decimal("12.00")]),
        (pa.date32(), [dt.date(1969, 1, 1), dt.date(2024, 1, 1)]),
        (
            pa.struct([("start", pa.int64()), ("who", pa.string())]),
            [None, {"start": None, "who": "z"}, {"start": 1, "who": None}, {"start": 1, "who": "a"}, {"start": 2}],
        ),
    ],
)
def test_keys_ascend_as_in_spark_and_keep_their_rows(kind: pa.DataType, ascending: list[Any]) -> None:
    keys = [key for turn in range(3) for key in (ascending[turn:] + ascending[:turn])]
    groups = group(keys, kind, spread)
    ordered = groups.in_key_order()
    assert frozen(ordered.keys.column("k").to_pylist()) == frozen(pa.array(ascending, kind).to_pylist())
    assert as_dict(ordered) == as_dict(groups) == expected(pa.array(keys, kind).to_pylist())


def test_keys_without_an_order_stay_as_they_are() -> None:
    groups = group([[2], [1], [2]], pa.list_(pa.int64()), spread)
    assert groups.in_key_order() is groups


def as_dict(groups: Groups) -> dict[Any, list[int]]:
    numbers = groups.rows.column("n").to_pylist()
    found = {}
    keys = groups.keys.column("k").to_pylist()
    assert frozen(groups.given_keys.column(0).to_pylist()) == frozen(keys)
    for position, key in enumerate(keys):
        assert frozen(key) not in found, "each key comes once"
        found[frozen(key)] = numbers[groups.offsets[position] : groups.offsets[position + 1]]
    assert groups.offsets[-1] == len(numbers)
    return found


def expected(keys: list[Any]) -> dict[Any, list[int]]:
    groups = defaultdict(list)
    for number, key in enumerate(keys):
        groups[frozen(key)].append(number)
    return dict(groups)


def spread(key: Any) -> int:
    return hash(frozen(key)) if key is not None else 42


def crowded(key: Any) -> int:
    """Few hashes for many keys."""
    return hash(frozen(key)) % 3 if key is not None else 0


NAN = float("nan")
KEYS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [5, None, 3, 5, 0, None, -(2**63), 2**63 - 1, 3, 5]),
    (pa.string(), ["b", "", None, "a", "b", None, "é", "a", ""]),
    (pa.float64(), [1.5, NAN, None, NAN, 0.0, 1.5, float("inf"), None, 0.0]),
    (pa.float32(), [NAN, NAN, 1.0, None]),
    (pa.bool_(), [True, None, False, True, None]),
    (pa.date32(), [dt.date(2024, 1, 1), None, dt.date(1, 1, 1), dt.date(2024, 1, 1)]),
    (pa.timestamp("us", "UTC"), [dt.datetime(2024, 1, 1, tzinfo=dt.UTC), None] * 3),
    (pa.decimal128(10, 2), [Decimal("1.10"), Decimal("1.20"), None, Decimal("1.10")]),
    (pa.binary(), [b"a", b"", None, b"a"]),
    (
        pa.struct([("s", pa.string()), ("f", pa.float64())]),
        [
            {"s": "a", "f": 1.0},
            None,
            {"s": None, "f": NAN},
            {"s": "a", "f": 1.0},
            {"s": None, "f": NAN},
            {"s": None, "f": None},
        ],
    ),
    (pa.list_(pa.int32()), [[1, 2], None, [], [1, None], [1, 2], [], None]),
]


@pytest.mark.parametrize(("kind", "keys"), KEYS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("hash_of", [spread, crowded, lambda key: 7])  # noqa: ARG005
def test_keys_of_every_type_are_kept_apart_whatever_their_hashes(kind: Any, keys: list[Any], hash_of: Any) -> None:
    assert as_dict(group(keys, kind, hash_of)) == expected(keys)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 6)), st.sampled_from([None, "a", "b", ""])), max_size=40),
    st.integers(1, 4),
)
def test_any_rows_are_grouped_by_both_key_fields(keys: list[tuple[Any, Any]], hashes: int) -> None:
    table = pa.table(
        {
            HASH: pa.array([hash(key) % hashes for key in keys], pa.int64()),
            "_key0": pa.array([key[0] for key in keys], pa.int32()),
            "_key1": pa.array([key[1] for key in keys], pa.string()),
            "n": pa.array(range(len(keys)), pa.int64()),
        }
    )
    schema = pa.schema([("a", pa.int64()), ("n", pa.string())])
    groups = group_rows(table.to_batches(max_chunksize=5), schema)
    assert groups.keys.schema.equals(pa.schema([(HASH, pa.int64()), *schema]))
    found = {}
    numbers = groups.rows.column("n").to_pylist() if keys else []
    for position, row in enumerate(groups.keys.to_pylist()):
        assert row[HASH] == hash((row["a"], row["n"])) % hashes
        found[row["a"], row["n"]] = numbers[groups.offsets[position] : groups.offsets[position + 1]]
    assert found == expected(keys)


def test_no_rows_make_no_groups() -> None:
    schema = pa.schema([("k", pa.int64())])
    empty = pa.record_batch({HASH: pa.array([], pa.int64()), "_key0": pa.array([], pa.int64()), "n": pa.array([])})
    for batches in ([], [empty]):
        groups = group_rows(batches, schema)
        assert (groups.keys.num_rows, groups.offsets.tolist()) == (0, [0])
        assert list(groups.windows(10)) == []


def test_a_key_without_fields_is_one_group() -> None:
    table = pa.table({HASH: pa.array([1, 1, 1]), "n": pa.array([5, 6, 7])})
    groups = group_rows(table.to_batches(), pa.schema([]))
    assert (groups.keys.num_rows, groups.offsets.tolist()) == (1, [0, 3])


@pytest.mark.parametrize(
    ("counts", "windows"),
    [
        ([1] * 25, [(0, 10), (10, 20), (20, 25)]),
        ([10], [(0, 1)]),
        ([11], [(0, 1)]),
        ([3, 30, 3, 3, 5], [(0, 1), (1, 2), (2, 4), (4, 5)]),
        ([5, 5, 5, 5], [(0, 2), (2, 4)]),
    ],
)
def test_windows_hold_a_bounded_number_of_rows_unless_one_key_has_more(counts: list[int], windows: Any) -> None:
    offsets = np.concatenate(([0], np.cumsum(counts)))
    assert list(Groups(pa.table({}), pa.table({}), pa.table({}), offsets).windows(10)) == windows
