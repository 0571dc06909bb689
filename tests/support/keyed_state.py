"""State for tests of workers: one stage with a value, a list and a map, keys of every key group, some of equal hash."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.core.ids import StageNumber
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import INDEX, Op, StageSpec, VariableKind, VariableSpec

KEY_GROUPS = 16
STAGE = 1
SPEC = StageSpec(
    StageNumber(STAGE),
    "stage1",
    pa.schema([("k", pa.string())]),
    (
        VariableSpec("total", VariableKind.VALUE, pa.schema([("n", pa.int64())])),
        VariableSpec("items", VariableKind.LIST, pa.schema([("item", pa.string())])),
        VariableSpec("seen", VariableKind.MAP, pa.schema([("times", pa.int64())]), pa.schema([("m", pa.string())])),
    ),
)
#: The keys of each key group: two with a hash of their own, and two that share one.
KEYS_OF_GROUP: dict[int, list[str]] = {group: [] for group in range(KEY_GROUPS)}

#: A key's entries: by variable the total, the list, and the map.
Entries = dict[str, Any]


def hash_of(key: str) -> int:
    """Keys that are equal up to a # share a hash. Half of the hashes are negative."""
    digest = zlib.crc32(key.partition("#")[0].encode()) * 0x9E3779B97F4A7C15 % 2**64
    return digest - 2**64 if digest >= 2**63 else digest


def group_of(key: str) -> int:
    return int(key_groups_of(np.array([hash_of(key)]), KEY_GROUPS)[0])


for _name in (f"key-{number}" for number in range(1000)):
    _keys = KEYS_OF_GROUP[group_of(_name)]
    if len(_keys) < 2:
        _keys += [_name]
    elif len(_keys) == 2:
        _keys += [f"{_name}#1", f"{_name}#2"]
KEYS = [key for keys in KEYS_OF_GROUP.values() for key in keys]


def keys_table(keys: Collection[str]) -> pa.Table:
    return pa.table(
        [pa.array([hash_of(key) for key in keys], pa.int64()), list(keys)], schema=SPEC.layouts["total"].keys
    )


def entries(number: int) -> Entries:
    """Something of every kind; list and map have different sizes for different numbers."""
    items = [f"item-{number}-{position}" for position in range(1 + number % 3)]
    # Map keys of which one is the beginning of another, and an empty one.
    seen = dict.fromkeys(("", "a", "aa", "ab")[: 1 + number % 4], number)
    return {"total": number, "items": items, "seen": seen}


def changes_to(keys: Mapping[str, Entries | None]) -> dict[str, pa.Table]:
    """Tables of changes after which the keys have these entries; None: no entry at all."""
    rows: dict[str, list[list[Any]]] = {"total": [], "items": [], "seen": []}
    for key, wanted in keys.items():
        rows["items"].append([hash_of(key), Op.CLEAR, key, None, None])
        rows["seen"].append([hash_of(key), Op.CLEAR, key, None, None])
        if wanted is None:
            rows["total"].append([hash_of(key), Op.DELETE, key, None])
            continue
        rows["total"].append([hash_of(key), Op.PUT, key, wanted["total"]])
        rows["items"] += [[hash_of(key), Op.PUT, key, n, item] for n, item in enumerate(wanted["items"])]
        rows["seen"] += [[hash_of(key), Op.PUT, key, m, times] for m, times in wanted["seen"].items()]
    return {name: _table(rows[name], SPEC.layouts[name].changes) for name in rows}


def _table(rows: list[list[Any]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def from_answers(keys: list[str], tables: Mapping[str, pa.Table]) -> dict[str, Entries]:
    """What the answers to a read, or scanned rows, say about each key."""
    found: dict[str, Entries] = {}
    for name, table in tables.items():
        for row in table.to_pylist():
            key = row["k"] if "k" in row else keys[row[INDEX]]
            of_key = found.setdefault(key, {"total": None, "items": [], "seen": {}})
            if name == "total":
                assert of_key["total"] is None, f"{key} has two totals"
                of_key["total"] = row["n"]
            elif name == "items":
                of_key["items"].append((row["_position"], row["item"]))
            else:
                assert row["m"] not in of_key["seen"], f"{key} has an entry twice"
                of_key["seen"][row["m"]] = row["times"]
    for of_key in found.values():
        positions = sorted(of_key["items"])
        assert [position for position, _ in positions] == list(range(len(positions)))
        of_key["items"] = [item for _, item in positions]
    return found
