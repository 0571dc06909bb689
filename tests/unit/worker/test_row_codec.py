"""What the properties of the codec do not reach: its exact bytes, undefined memory under nulls, types it refuses."""

import numpy as np
import pyarrow as pa
import pytest

from anabranch.core.errors import UnsupportedError
from anabranch.worker.state.codec import RowCodec, to_objects


def table(**columns: pa.Array) -> pa.Table:
    return pa.table(columns)


def test_fixed_width_rows_are_a_bitmap_of_nulls_and_the_fields() -> None:
    data = table(k=pa.array([1, None, -1], pa.int16()), f=pa.array([True, False, None]))
    codec = RowCodec(data.schema)
    assert codec.width == 4
    assert to_objects(codec.encode(data)).tolist() == [b"\x00\x01\x00\x01", b"\x01\x00\x00\x00", b"\x02\xff\xff\x00"]


def test_an_int64_key_and_two_int64_values_take_26_bytes() -> None:
    key = RowCodec(pa.schema([("k", pa.int64())]))
    value = RowCodec(pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    assert (key.width, value.width) == (9, 17)


def test_varying_rows_are_a_head_of_one_width_and_then_the_segments() -> None:
    data = table(s=pa.array(["ab", None, ""]), k=pa.array([7, 8, None], pa.int8()))
    codec = RowCodec(data.schema)
    assert codec.width is None
    assert codec.encode(data).tolist() == [
        b"\x00\x07\x02\x00\x00\x00ab",
        b"\x01\x08\x00\x00\x00\x00",
        b"\x02\x00\x00\x00\x00\x00",
    ]


def test_what_lies_under_a_null_does_not_show() -> None:
    second_is_null = pa.py_buffer(b"\x05")
    numbers = np.array([1, 99, 3])
    offsets = pa.py_buffer(np.array([0, 1, 3, 4], dtype=np.int32))
    text = pa.py_buffer(b"axyb")
    child = pa.array([1, 98, 97, 2])
    struct = pa.struct([("x", pa.int64())])
    dirty = table(
        n=pa.Array.from_buffers(pa.int64(), 3, [second_is_null, pa.py_buffer(numbers)]),
        s=pa.Array.from_buffers(pa.string(), 3, [second_is_null, offsets, text]),
        l=pa.Array.from_buffers(pa.list_(pa.int64()), 3, [second_is_null, offsets], children=[child]),
        t=pa.Array.from_buffers(struct, 3, [second_is_null], children=[pa.array(numbers)]),
        b=pa.Array.from_buffers(pa.bool_(), 3, [second_is_null, pa.py_buffer(b"\x07")]),
    )
    clean = pa.Table.from_pylist(dirty.to_pylist(), schema=dirty.schema)
    codec = RowCodec(dirty.schema)
    assert codec.encode(dirty).tolist() == codec.encode(clean).tolist()
    assert pa.Table.from_arrays(codec.decode(codec.encode(dirty)), schema=dirty.schema).equals(clean)


@pytest.mark.parametrize(("floats", "bits"), [(np.float64, np.uint64), (np.float32, np.uint32)])
def test_zeros_and_nans_are_one_key_each_but_values_keep_their_bits(floats: type, bits: type) -> None:
    one = np.array(1, dtype=bits)
    nan = np.array([np.nan], dtype=floats).view(bits)[0]
    column = pa.array(np.array([0, nan, nan | one], dtype=bits).view(floats))
    column = pa.concat_arrays([column, pa.array(np.array([-0.0], dtype=floats))])
    data = table(x=column)
    key = to_objects(RowCodec(data.schema, normalise_floats=True).encode(data)).tolist()
    assert key[0] == key[3]
    assert key[1] == key[2]
    assert len(set(key)) == 2
    value = RowCodec(data.schema)
    back = value.decode(value.encode(data))[0]
    assert back.buffers()[1].to_pybytes() == column.buffers()[1].to_pybytes()


def test_columns_of_a_like_type_are_cast() -> None:
    codec = RowCodec(pa.schema([("s", pa.string()), ("n", pa.int64())]))
    given = table(s=pa.array(["x"], pa.large_string()), n=pa.array([1], pa.int32()))
    assert [column.to_pylist() for column in codec.decode(codec.encode(given))] == [["x"], [1]]


def test_rows_without_columns_keep_their_number() -> None:
    codec = RowCodec(pa.schema([]))
    assert codec.encode(table(other=pa.array([1, 2, 3]))).shape == (3, 0)
    assert codec.encode(pa.RecordBatch.from_pydict({"other": [1, 2]})).shape == (2, 0)


def test_no_rows_are_no_rows() -> None:
    for kind in (pa.int64(), pa.string(), pa.list_(pa.string()), pa.map_(pa.string(), pa.null())):
        schema = pa.schema([("x", kind)])
        codec = RowCodec(schema)
        encoded = codec.encode(schema.empty_table())
        assert len(encoded) == len(codec.empty()) == 0
        assert codec.decode(encoded)[0].type == kind


@pytest.mark.parametrize(
    "refused", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.run_end_encoded(pa.int32(), pa.int64())]
)
def test_a_type_that_state_cannot_hold_is_refused_by_the_name_of_its_field(refused: pa.DataType) -> None:
    schema = pa.schema([("fine", pa.int64()), ("outer", pa.struct([("inner", pa.list_(refused))]))])
    with pytest.raises(UnsupportedError, match=r"'outer\.inner\.item'.*cast it"):
        RowCodec(schema)
