"""Any allowed change of any state, read back: compared with a model that converts one value at a time."""

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.checkpoint.datafiles import read_changes, write_changes
from anabranch.checkpoint.evolution import obstacles, to_layout
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import StageNumber, WorkerId
from anabranch.core.schemas import Layout, Op, VariableKind, VariableSpec
from anabranch.core.state_files import ChangeFile

_LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(6, 2): st.integers(-999_999, 999_999).map(lambda n: Decimal(n).scaleb(-2)),
    pa.string(): st.text(st.characters(codec="utf-8"), max_size=3),
    pa.timestamp("us", tz="UTC"): st.datetimes().map(lambda at: at.replace(tzinfo=None)),
}
_WIDER: dict[pa.DataType, list[pa.DataType]] = {
    pa.int8(): [pa.int16(), pa.int32(), pa.int64(), pa.float64()],
    pa.int16(): [pa.int32(), pa.int64(), pa.float64()],
    pa.int32(): [pa.int64(), pa.float64()],
    pa.float32(): [pa.float64()],
    pa.decimal128(6, 2): [pa.decimal128(6, 2), pa.decimal128(9, 4), pa.decimal128(38, 2)],
    pa.decimal128(9, 4): [pa.decimal128(38, 10)],
    pa.timestamp("us", tz="UTC"): [pa.timestamp("us", tz="Asia/Tokyo")],
}
Fields = list[pa.Field]


def types() -> st.SearchStrategy[pa.DataType]:
    def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
        fields = st.lists(st.tuples(inner, st.booleans()), min_size=1, max_size=3)
        structs = fields.map(lambda fs: pa.struct([pa.field(f"f{i}", t, nullable=n) for i, (t, n) in enumerate(fs)]))
        return inner.map(pa.list_) | structs | st.builds(pa.map_, st.just(pa.string()), inner)

    return st.recursive(st.sampled_from(list(_LEAVES)), nested, max_leaves=4)


def values(t: pa.DataType, *, nullable: bool = True) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(t):
        some: st.SearchStrategy[Any] = st.fixed_dictionaries(
            {f.name: values(f.type, nullable=f.nullable) for f in t.fields}
        )
    elif pa.types.is_map(t):
        entries = st.tuples(st.text("abc", max_size=2), values(t.item_type))
        some = st.lists(entries, max_size=3, unique_by=lambda entry: entry[0])
    elif pa.types.is_list(t):
        some = st.lists(values(t.value_type), max_size=3)
    else:
        some = _LEAVES[t]
    return st.none() | some if nullable else some


def schemas() -> st.SearchStrategy[Fields]:
    return st.lists(types(), min_size=1, max_size=3).map(lambda ts: [pa.field(f"v{i}", t) for i, t in enumerate(ts)])


@st.composite
def evolved_fields(draw: st.DrawFn, before: Fields) -> Fields:
    """The fields after an allowed change."""
    fields = [pa.field(f.name, draw(evolved(f.type)), nullable=f.nullable or draw(st.booleans())) for f in before]
    new = draw(st.sampled_from([None, "n0", "n1"]))
    if new and new not in {f.name for f in before}:
        fields.append(pa.field(new, draw(types())))
    return draw(st.permutations(fields))


def evolved(t: pa.DataType) -> st.SearchStrategy[pa.DataType]:
    if pa.types.is_struct(t):
        return evolved_fields(t.fields).map(pa.struct)
    if pa.types.is_map(t):
        return evolved(t.item_type).map(lambda item: pa.map_(pa.string(), item))
    if pa.types.is_list(t):
        return evolved(t.value_type).map(pa.list_)
    return st.sampled_from([t, *_WIDER.get(t, [])])


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Fields], list[dict[str, Any]]]:
    """The fields of three versions, and rows of the first."""
    first = draw(schemas())
    second = draw(evolved_fields(first))
    third = draw(evolved_fields(second))
    rows = draw(st.lists(st.fixed_dictionaries({f.name: values(f.type) for f in first}), max_size=6))
    return [first, second, third], rows


def model(value: Any, t: pa.DataType) -> Any:
    """One value in another type: fields by name, those that are not there null."""
    if value is None:
        return None
    if pa.types.is_struct(t):
        return {f.name: model(value.get(f.name), f.type) for f in t.fields}
    if pa.types.is_map(t):
        return [(key, model(item, t.item_type)) for key, item in value]
    if pa.types.is_list(t):
        return [model(element, t.value_type) for element in value]
    return value


def comparable(value: Any) -> Any:
    """NaN equals nothing; here it has to equal itself. Times are compared as such, in whatever zone they are shown."""
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def shown(table: pa.Table) -> Any:
    """The rows, with times as in UTC."""

    def in_utc(t: pa.DataType) -> pa.DataType:
        if pa.types.is_struct(t):
            return pa.struct([f.with_type(in_utc(f.type)).with_nullable(True) for f in t.fields])
        if pa.types.is_map(t):
            return pa.map_(pa.string(), in_utc(t.item_type))
        if pa.types.is_list(t):
            return pa.list_(in_utc(t.value_type))
        return pa.timestamp("us") if pa.types.is_timestamp(t) else t

    fields = [pa.field(f.name, in_utc(f.type)) for f in table.schema]
    return comparable(table.cast(pa.schema(fields)).to_pylist())


def table_of(fields: Fields, rows: list[dict[str, Any]]) -> pa.Table:
    nullable = pa.schema([(f.name, f.type) for f in fields])
    return pa.table([pa.array([row[f.name] for row in rows], f.type) for f in nullable], schema=nullable)


def expected(rows: list[dict[str, Any]], fields: Fields) -> Any:
    return comparable([{f.name: model(row.get(f.name), f.type) for f in fields} for row in rows])


@given(histories(), st.integers(0, 3), st.integers(0, 6))
def test_state_reads_the_same_whether_it_changed_in_one_step_or_in_two(
    history: tuple[list[Fields], list[dict[str, Any]]], skip: int, length: int
) -> None:
    (first, second, third), rows = history
    assert not [*obstacles(first, second), *obstacles(second, third), *obstacles(first, third)]
    table = table_of(first, rows).slice(skip, length)
    rows = rows[skip : skip + length]
    at_once = to_layout(table, pa.schema(third), "file")
    at_once.validate(full=True)
    assert at_once.schema.equals(pa.schema(third))
    assert shown(at_once) == expected(rows, third)
    assert shown(to_layout(to_layout(table, pa.schema(second), "file"), pa.schema(third), "file")) == shown(at_once)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories())
def test_change_files_of_an_old_version_are_read_by_a_new_one(
    tmp_path: Path, history: tuple[list[Fields], list[dict[str, Any]]]
) -> None:
    (first, second, _), rows = history
    key, storage = pa.schema([("key", pa.int64())]), Storage(str(tmp_path), durable=False)
    before, now = (Layout(key, VariableSpec("v", VariableKind.VALUE, pa.schema(fields))) for fields in (first, second))
    puts = table_of(first, rows)
    number = pa.array(range(len(rows)), pa.int64())
    ops = pa.array([Op.PUT] * len(rows), pa.int8())
    changes = pa.table([number, ops, number, *puts.columns], schema=before.changes)
    file = ChangeFile(StageNumber(0), "v", WorkerId("w"), "f", *write_changes(storage, "f", before, 1024, changes))
    back = read_changes(storage, file, now, None)
    assert back.schema.equals(now.changes)
    assert shown(back.select(now.value.names)) == expected(rows, second)


@settings(max_examples=100, deadline=None)
@given(histories())
def test_what_can_be_taken_back_has_only_changed_its_order(
    history: tuple[list[Fields], list[dict[str, Any]]],
) -> None:
    (first, second, _), _ = history

    def sizes(t: pa.DataType) -> Any:
        """What counts in a type, without the order of fields."""
        if pa.types.is_struct(t):
            return {f.name: sizes(f.type) for f in t.fields}
        if pa.types.is_map(t):
            return ("map", sizes(t.item_type))
        if pa.types.is_list(t):
            return ("list", sizes(t.value_type))
        return "timestamp" if pa.types.is_timestamp(t) else t

    same = sizes(pa.struct(first)) == sizes(pa.struct(second))
    assert same == (not list(obstacles(second, first, fill=True)))
