"""Merging changes of entries in columns leaves what a store holds after the same changes."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.schemas import Layout, Op, VariableKind, VariableSpec
from anabranch.worker import compaction as merge
from anabranch.worker.compaction import EntryMerge
from anabranch.worker.state.variable_state import VariableState
from support.stores import open_store

KEY_GROUPS = 4
KEY = pa.schema([("k", pa.string())])
LAYOUTS = {
    "map": Layout(
        KEY, VariableSpec("m", VariableKind.MAP, pa.schema([("v", pa.string())]), pa.schema([("at", pa.int64())]))
    ),
    "timers": Layout(KEY, VariableSpec("t", VariableKind.MAP, pa.schema([]), pa.schema([("at", pa.int64())]))),
    "list": Layout(KEY, VariableSpec("l", VariableKind.LIST, pa.schema([("v", pa.string())]))),
}

#: Of a key in an epoch: whether it is cleared, and what becomes of some of its entries (None: it is deleted).
changes_of_key = st.tuples(st.booleans(), st.dictionaries(st.integers(0, 3), st.sampled_from([None, "x", "yy"])))
epochs = st.lists(st.dictionaries(st.sampled_from("abcde"), changes_of_key), max_size=8)


def hash_of(key: str) -> int:
    """Two of the keys share one."""
    return {"a": -5, "b": -5}.get(key, ord(key))


def table_of(epoch: dict[str, tuple[bool, dict[int, str | None]]], layout: Layout) -> pa.Table:
    rows: list[tuple[Any, ...]] = []
    for key, (cleared, entries) in epoch.items():
        nothing = (None,) * len(layout.value)
        if cleared:
            rows.append((hash_of(key), Op.CLEAR, key, None, *nothing))
        for at, value in entries.items():
            op = Op.DELETE if value is None else Op.PUT
            rows.append((hash_of(key), op, key, at, *(() if not nothing else (value,))))
    columns = list(zip(*rows, strict=True)) or [()] * len(layout.changes)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, layout.changes, strict=True)],
        schema=layout.changes,
    )


def rows_in(batches: Any) -> list[Any]:
    return sorted((row for batch in batches for row in batch.to_pylist()), key=repr)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=150, deadline=None)
@given(epochs=epochs, waiting=st.sampled_from([0, 5, 1 << 18]), dropped=st.sets(st.integers(0, KEY_GROUPS - 1)))
def test_what_is_left_is_what_a_store_holds(name: str, epochs: list[Any], waiting: int, dropped: set[int]) -> None:
    layout = LAYOUTS[name]
    merged = EntryMerge(layout, KEY_GROUPS)
    state = VariableState(layout, KEY_GROUPS, open_store("memory", layout, KEY_GROUPS, directory=None))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(merge, "_WAITING_ROWS_MAX", waiting)
        for epoch in epochs:
            table = table_of(epoch, layout)
            merged.load(table)
            state.load(table)
            assert merged.rows_at_most() >= state.rows()
    expected = rows_in(state.scan(0))
    assert rows_in(merged.scan()) == expected
    assert merged.rows() == len(expected) == merged.rows_at_most()
    merged.drop_groups(dropped)
    state.drop_groups(dropped)
    assert rows_in(merged.scan()) == rows_in(state.scan(0))
