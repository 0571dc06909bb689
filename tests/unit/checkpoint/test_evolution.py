"""Which fields of state may become which, and how old columns are read as new ones."""

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from anabranch.checkpoint.datafiles import read_changes, write_changes
from anabranch.checkpoint.evolution import MEANING, obstacles, to_layout
from anabranch.checkpoint.paths import generation_of, shape_file
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Generation, StageNumber, WorkerId
from anabranch.core.schemas import Layout, Op, VariableKind, VariableSpec
from anabranch.core.state_files import ChangeFile
from support.sentences import says

INT8, INT16, INT32, INT64 = pa.int8(), pa.int16(), pa.int32(), pa.int64()
FLOAT, DOUBLE, STRING = pa.float32(), pa.float64(), pa.string()
WIDENED = [
    *((INT8, wider) for wider in (INT16, INT32, INT64, DOUBLE)),
    *((INT16, wider) for wider in (INT32, INT64, DOUBLE)),
    *((INT32, wider) for wider in (INT64, DOUBLE)),
    (FLOAT, DOUBLE),
]
SIMPLE = [pa.bool_(), INT8, INT16, INT32, INT64, FLOAT, DOUBLE, STRING, pa.binary(), pa.date32(), pa.timestamp("us")]


def reasons(before: pa.DataType, now: pa.DataType) -> list[str]:
    return list(obstacles([pa.field("x", before)], [pa.field("x", now)]))


@pytest.mark.parametrize("now", SIMPLE, ids=str)
@pytest.mark.parametrize("before", SIMPLE, ids=str)
def test_a_type_becomes_itself_or_a_wider_one_and_nothing_else(before: pa.DataType, now: pa.DataType) -> None:
    assert (not reasons(before, now)) == (before == now or (before, now) in WIDENED)


@pytest.mark.parametrize(
    ("before", "now", "allowed"),
    [
        ((10, 2), (10, 2), True),
        ((10, 2), (12, 2), True),
        ((10, 2), (12, 4), True),
        ((10, 2), (11, 4), False),  # seven digits before the point, where there were eight
        ((10, 2), (20, 1), False),
        ((10, 2), (9, 2), False),
        ((10, 0), (38, 28), True),
        ((10, 0), (38, 29), False),
    ],
)
def test_a_decimal_keeps_room_for_its_digits_on_both_sides_of_the_point(
    before: tuple[int, int], now: tuple[int, int], allowed: bool
) -> None:
    assert (not reasons(pa.decimal128(*before), pa.decimal128(*now))) == allowed
    assert reasons(pa.decimal128(*before), INT64)
    assert reasons(INT8, pa.decimal128(*now))


def test_obstacles_are_named_with_the_way_to_them() -> None:
    before = [
        pa.field("a", pa.struct([("x", INT64), ("y", pa.list_(pa.struct([("z", DOUBLE)])))])),
        pa.field("b", pa.map_(STRING, INT32)),
        pa.field("c", pa.map_(INT32, STRING)),
        pa.field("d", pa.list_(INT8)),
        pa.field("e", INT8),
    ]
    now = [
        pa.field("a", pa.struct([("y", pa.list_(pa.struct([("z", FLOAT), pa.field("n", INT8, nullable=False)])))])),
        pa.field("b", pa.map_(STRING, INT16)),
        pa.field("c", pa.map_(INT64, STRING)),
        pa.field("d", pa.struct([("x", INT8)])),
        pa.field("f", INT8, nullable=False),
    ]
    assert list(obstacles(before, now)) == [
        "a.x is not in this query",
        "a.y.element.z cannot change from double to float",
        "a.y.element.n is new and may not be null",
        "b.value cannot change from int to smallint",
        "c cannot change from map<int, string> to map<bigint, string>",
        "d cannot change from array<tinyint> to struct<x: tinyint>",
        "e is not in this query",
        "f is new and may not be null",
    ]


def test_the_time_zone_and_the_order_of_fields_are_no_obstacles() -> None:
    inner = [pa.field("x", INT8), pa.field("y", pa.timestamp("us", tz="UTC"))]
    turned = [pa.field("y", pa.timestamp("us", tz="Asia/Tokyo")), pa.field("x", INT8)]
    assert not reasons(pa.struct(inner), pa.struct(turned))
    assert not list(obstacles(inner, turned))
    assert reasons(pa.timestamp("us"), pa.timestamp("us", tz="UTC"))


def test_nulls_may_become_allowed_anywhere_and_forbidden_only_in_columns_which_hold_them_in_any_case() -> None:
    maybe, never = pa.field("x", INT8), pa.field("x", INT8, nullable=False)
    assert not list(obstacles([maybe], [never]))
    assert not list(obstacles([never], [maybe]))
    refused = "x{} may be null in the checkpoint and may not in this query"
    for of, part in (
        (lambda f: pa.struct([f]), ".x"),
        (pa.list_, ".element"),
        (lambda f: pa.map_(STRING, f), ".value"),
    ):
        assert not reasons(of(never), of(maybe))
        assert reasons(of(maybe), of(never)) == [refused.format(part)]
        assert reasons(pa.list_(of(maybe)), pa.list_(of(never))) == [refused.format(".element" + part)]


def test_a_field_that_says_what_it_means_cannot_come_to_mean_something_else() -> None:
    plain = pa.field("x", INT64)
    total, largest = (plain.with_metadata({MEANING: meaning}) for meaning in (b"sum", b"max"))
    assert list(obstacles([total], [largest])) == ["x is sum in the checkpoint and max in this query"]
    assert not list(obstacles([total], [total]))
    assert not list(obstacles([plain], [total]))


def one_column(values: list[Any], data_type: pa.DataType) -> pa.Table:
    return pa.table({"x": pa.array(values, data_type)})


def converted(column: pa.Table, now: pa.DataType) -> list[Any]:
    table = to_layout(column, pa.schema([("x", now)]), "file")
    table.validate(full=True)
    assert table.schema.equals(pa.schema([("x", now)]))
    return table.column("x").to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("before", "now"), WIDENED, ids=str)
def test_widened_numbers_are_the_same_numbers(before: pa.DataType, now: pa.DataType) -> None:
    if before == FLOAT:
        values: list[Any] = [0.5, -(2.0**120), None, float("inf")]
    else:
        half = 2 ** (before.bit_width - 1)
        values = [-half, half - 1, 0, None]
    assert converted(one_column(values, before), now) == values


def test_decimals_get_more_digits() -> None:
    values = [Decimal("99999999.99"), Decimal("-0.01"), None]
    assert converted(one_column(values, pa.decimal128(10, 2)), pa.decimal128(12, 4)) == values


def test_slices_of_nested_values_are_converted_in_place() -> None:
    before = pa.list_(pa.struct([("a", INT32), ("b", pa.map_(STRING, INT8))]))
    now = pa.list_(pa.struct([("c", STRING), ("b", pa.map_(STRING, INT64)), ("a", DOUBLE)]))
    values = [
        [{"a": 1, "b": [("k", 1)]}],
        None,
        [],
        [{"a": None, "b": None}, None, {"a": 2, "b": []}],
        [{"a": 3, "b": [("l", None), ("m", 2)]}],
    ]
    expected = [v and [e and {"c": None, "b": e["b"], "a": e["a"]} for e in v] for v in values]
    table = one_column(values, before)
    assert converted(table, now) == expected
    assert converted(table.slice(1, 3), now) == expected[1:4]
    assert converted(pa.concat_tables([table.slice(3), table.slice(0, 2)]), now) == expected[3:] + expected[:2]
    assert converted(table.slice(0, 0), now) == []
    assert converted(pa.schema([("x", before)]).empty_table(), now) == []


def test_what_a_null_struct_hides_need_not_fit_the_new_type() -> None:
    # Ten digits in a decimal of four: no value, but nothing checks what is below a null.
    hidden = pa.array([Decimal("1234567890"), Decimal(1)], pa.decimal128(10, 0)).view(pa.decimal128(4, 0))
    structs = pa.StructArray.from_arrays([hidden], names=["d"], mask=pa.array([True, False]))
    now = pa.struct([("d", pa.decimal128(38, 30))])
    assert converted(pa.table({"x": structs}), now) == [None, {"d": Decimal(1)}]


def test_columns_are_found_by_name_and_missing_ones_are_null() -> None:
    table = pa.table({"a": pa.array([1, 2], INT32), "b": ["x", "y"]})
    required = pa.field("d", pa.struct([pa.field("e", INT8, nullable=False)]), nullable=False)
    target = pa.schema([("c", pa.map_(STRING, INT8)), ("b", STRING), required, ("a", INT64)])
    back = to_layout(table, target, "file")
    assert back.schema.equals(target)
    assert back.to_pylist() == [{"c": None, "b": b, "d": None, "a": a} for a, b in ((1, "x"), (2, "y"))]


def test_a_column_of_the_user_called_like_one_of_ours_is_the_second_of_its_name() -> None:
    table = pa.table([pa.array([0], INT8), pa.array([7])], names=["_op", "v"])
    target = pa.schema([("_op", INT8), ("_op", STRING), ("v", INT64)])
    assert [column.to_pylist() for column in to_layout(table, target, "file").columns] == [[0], [None], [7]]


def test_what_cannot_be_read_is_an_error_that_names_file_and_columns() -> None:
    table = pa.table({"k": [1], "a": [1], "b": ["x"]})
    with pytest.raises(CheckpointError) as caught:
        to_layout(table, pa.schema([("k", INT64), ("a", INT32)]), "the/file.parquet")
    assert says(
        str(caught.value),
        "The state in the/file.parquet does not fit … column a cannot change from bigint to int … column b is not in "
        "this query … Start the query as it was … or use a new checkpoint",
    )


@pytest.mark.parametrize("key", [("k", INT64), ("l", INT32)])
def test_fixed_columns_are_neither_widened_nor_filled(key: tuple[str, pa.DataType]) -> None:
    table = pa.table({"k": pa.array([1], INT32), "a": [1]})
    target = pa.schema([key, ("a", INT64), ("b", INT64)])
    with pytest.raises(CheckpointError, match=r"first columns are \(k int\) instead of \("):
        to_layout(table, target, "file", fixed_columns=1)
    with pytest.raises(CheckpointError, match=r"first columns are \(k int, a bigint\) instead of"):
        to_layout(table, pa.schema([("k", INT32), ("b", INT64), ("a", INT64)]), "file", fixed_columns=2)
    assert to_layout(table, pa.schema([("k", INT32), ("b", INT64), ("a", INT64)]), "file", fixed_columns=1).num_rows


@pytest.mark.parametrize("groups", [None, {3}])
def test_change_files_of_every_age_are_read_in_the_layout_of_today(storage: Storage, groups: set[int] | None) -> None:
    def layout_of(*fields: tuple[str, pa.DataType]) -> Layout:
        key = pa.schema([("k", STRING)])
        spec = VariableSpec("v", VariableKind.MAP, pa.schema(list(fields)), map_key=pa.schema([("m", INT32)]))
        return Layout(key, spec)

    ages = [
        layout_of(("n", INT8)),
        layout_of(("s", pa.struct([("a", FLOAT)])), ("n", INT32)),
        layout_of(("n", INT64), ("s", pa.struct([("b", STRING), ("a", DOUBLE)])), ("k", STRING)),
    ]
    values: list[dict[str, Any]] = [
        {"n": 1},
        {"n": 2, "s": {"a": 0.5}},
        {"n": 3, "s": {"b": "b", "a": 1.5}, "value.k": "v"},
    ]
    read = []
    for age, (layout, value) in enumerate(zip(ages, values, strict=True)):
        about = {"_hash": 3, "k": "key", "m": age}
        rows = [{**about, "_op": Op.CLEAR, "m": None}, {**about, "_op": Op.PUT, **value}]
        path = f"age{age}.parquet"
        written = write_changes(storage, path, layout, 64, pa.Table.from_pylist(rows, schema=layout.changes))
        file = ChangeFile(StageNumber(0), "v", WorkerId("w"), path, *written)
        back = read_changes(storage, file, ages[-1], groups)
        assert back.schema.equals(ages[-1].changes)
        read += back.to_pylist()
    put, clear = {"_hash": 3, "_op": Op.PUT, "k": "key"}, {"_hash": 3, "_op": Op.CLEAR, "k": "key"}
    nothing = {"m": None, "n": None, "s": None, "value.k": None}
    assert read == [
        clear | nothing,
        put | {"m": 0, "n": 1, "s": None, "value.k": None},
        clear | nothing,
        put | {"m": 1, "n": 2, "s": {"b": None, "a": 0.5}, "value.k": None},
        clear | nothing,
        put | {"m": 2, "n": 3, "s": {"b": "b", "a": 1.5}, "value.k": "v"},
    ]


def test_shapes_are_named_by_generation() -> None:
    assert shape_file(Generation(12)) == "anabranch/shapes/00000012.json"
    assert generation_of("00000012.json") == 12
    assert generation_of("12.json") is None
    assert generation_of("00000012.json.tmp") is None
