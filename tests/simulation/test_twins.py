"""The dictionaries in which simulated workers keep their state answer exactly as the state of production does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import EpochError
from anabranch.core.eventtime import EventTime
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import Layout, Op, StageSpec, VariableKind, VariableSpec
from anabranch.worker.compaction import EntryMerge, ValueMerge
from anabranch.worker.state.variable_state import VariableState
from simulated.state import DictKnown, DictMerge, DictState
from support.stores import open_store

GROUPS = 4
_NUMBER = pa.schema([("n", pa.int64())])
VARIABLES = (
    VariableSpec("value", VariableKind.VALUE, _NUMBER),
    VariableSpec("map", VariableKind.MAP, pa.schema([]), pa.schema([("due_ms", pa.int64())])),
    VariableSpec("list", VariableKind.LIST, _NUMBER),
)
LAYOUTS = StageSpec(StageNumber(0), "stage", pa.schema([("k", pa.int64())]), VARIABLES).layouts
#: Where each variable has something to be due by.
TIMES = {"value": EventTime("n", ""), "map": EventTime("due_ms", ""), "list": EventTime("n", "")}

keys_of_state = st.integers(0, 6)
#: A key, what is done with it, what tells its entries apart, and a value.
change = st.tuples(keys_of_state, st.sampled_from((Op.PUT, Op.PUT, Op.DELETE)), st.integers(0, 3), st.integers(0, 9))
changes_of_an_epoch = st.tuples(st.sets(keys_of_state, max_size=2), st.lists(change, max_size=6))
some_groups = st.frozensets(st.integers(0, GROUPS - 1), max_size=GROUPS)
step = st.one_of(
    st.tuples(st.just("add_layer"), changes_of_an_epoch),
    st.tuples(st.just("load"), changes_of_an_epoch),
    st.tuples(st.just("fold"), st.integers(0, 3)),
    st.tuples(st.just("drop_layers_after"), st.integers(0, 3)),
    st.tuples(st.just("drop_groups"), some_groups),
)


def hash_of(key: int) -> int:
    """Keys of several key groups, some of which share their hash."""
    return (key // 2 << 40) + key % 5


def table_of(layout: Layout, cleared: set[int], rows: list[tuple[int, int, int, int]]) -> pa.Table:
    """The changes of an epoch, of which each says something about another entry; those that clear come first."""
    kind = layout.variable.kind
    found: dict[tuple[int, int], tuple[Any, ...]] = {}
    for key, op, subkey, value in rows:
        entry = 0 if kind is VariableKind.VALUE else subkey
        told = value if op == Op.PUT else None
        middle = () if kind is VariableKind.VALUE else (subkey,)
        found[key, entry] = (hash_of(key), op, key, *middle, *(() if kind is VariableKind.MAP else (told,)))
    lines = [(hash_of(key), Op.CLEAR, key, *([None] * (len(layout.changes) - 3))) for key in sorted(cleared)]
    return pa.Table.from_pylist(
        [dict(zip(layout.changes.names, line, strict=True)) for line in (*lines, *found.values())],
        schema=layout.changes,
    )


def keys_table(layout: Layout, keys: list[int]) -> pa.Table:
    return pa.table([pa.array(map(hash_of, keys), pa.int64()), pa.array(keys, pa.int64())], schema=layout.keys)


def rows_in(batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch] | pa.Table) -> list[tuple[Any, ...]]:
    found = batches.to_batches() if isinstance(batches, pa.Table) else list(batches)
    return sorted(tuple(row.values()) for batch in found for row in batch.to_pylist())


@pytest.mark.parametrize("name", LAYOUTS)
@given(steps=st.lists(step, max_size=8), asked=st.lists(keys_of_state, unique=True), groups=some_groups)
def test_state_in_dictionaries_is_that_of_production(
    name: str, steps: list[tuple[str, Any]], asked: list[int], groups: frozenset[int]
) -> None:
    layout = LAYOUTS[name]
    real: Any = VariableState(layout, GROUPS, open_store("memory", layout, GROUPS, directory=None))
    twin: Any = DictState(layout, GROUPS)
    epoch = 0
    for what, value in steps:
        if what in ("add_layer", "load"):
            epoch += what == "add_layer"
            arguments: tuple[Any, ...] = (table_of(layout, *value),)
            arguments = (epoch, *arguments) if what == "add_layer" else arguments
        else:
            arguments = (max(epoch - value, 0),) if what in ("fold", "drop_layers_after") else (value,)
        outcomes = []
        for state in (real, twin):
            try:
                getattr(state, what)(*arguments)
                outcomes.append("done")
            except EpochError:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1]
        if what == "drop_layers_after" and outcomes[0] == "done":
            epoch = arguments[0]
        _compare(layout, real, twin, epoch, asked, groups)


def _compare(layout: Layout, real: Any, twin: Any, epoch: int, asked: list[int], groups: frozenset[int]) -> None:
    keys, event_time = keys_table(layout, asked), TIMES[layout.variable.name]
    assert (real.newest, real.oldest) == (twin.newest, twin.oldest)
    assert rows_in([real.read(keys, epoch)]) == rows_in([twin.read(keys, epoch)])
    assert rows_in(real.scan(epoch)) == rows_in(twin.scan(epoch))
    assert rows_in(real.scan(epoch, groups, keys)) == rows_in(twin.scan(epoch, groups, keys))
    assert rows_in(real.due(epoch, groups, event_time, 2)) == rows_in(twin.due(epoch, groups, event_time, 2))
    whole = [each.due(epoch, groups, event_time, 2, since=1, whole_keys=True) for each in (real, twin)]
    # Keys that are not due any more may come along with production's.
    assert set(rows_in(whole[1])) <= set(rows_in(whole[0]))


@given(added=st.lists(keys_of_state), asked=st.lists(keys_of_state))
def test_known_keys_in_dictionaries_are_those_of_production(added: list[int], asked: list[int]) -> None:
    layout = LAYOUTS["value"]
    real: Any = VariableState(layout, GROUPS, open_store("memory", layout, GROUPS, directory=None)).known_keys()
    twin = DictKnown(layout)
    known, wanted = keys_table(layout, sorted(set(added))), keys_table(layout, asked)
    for each in (real, twin):
        each.add(known)
    assert real.missing(wanted).to_pylist() == twin.missing(wanted).to_pylist()
    assert real.without(wanted).to_pylist() == twin.without(wanted).to_pylist()
    assert real.added(wanted).to_pylist() == twin.added(wanted).to_pylist()
    assert real.missing(wanted).num_rows == twin.missing(wanted).num_rows == 0


@pytest.mark.parametrize("name", LAYOUTS)
@given(epochs=st.lists(changes_of_an_epoch, max_size=5), dropped=some_groups)
def test_a_merge_in_dictionaries_is_that_of_compaction(name: str, epochs: list[Any], dropped: frozenset[int]) -> None:
    layout = LAYOUTS[name]
    real: Any = ValueMerge(layout, GROUPS) if name == "value" else EntryMerge(layout, GROUPS)
    twin = DictMerge(layout, GROUPS)
    for of_epoch in epochs:
        for each in (real, twin):
            each.load(table_of(layout, *of_epoch))
    for each in (real, twin):
        each.drop_groups(dropped)
    assert real.rows() == twin.rows()
    assert rows_in(real.scan()) == rows_in(twin.scan())
