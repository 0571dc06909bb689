"""Any columns that state may have survive encoding, and equal rows are those with equal bytes."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.worker.state.codec import RowCodec, from_objects, take, to_objects
from support import arrow_strategies as arrow


@st.composite
def batches(draw: st.DrawFn) -> tuple[pa.Schema, list[dict[str, Any]]]:
    schema = draw(arrow.schemas("f", min_size=1))
    return schema, draw(st.lists(arrow.rows(schema), max_size=8))


def decoded(codec: RowCodec, encoded: Any) -> pa.Table:
    table = pa.Table.from_arrays(codec.decode(encoded), schema=codec.schema)
    table.validate(full=True)
    return table


def python(table: pa.Table) -> list[Any]:
    return [arrow.frozen(row, exact=True) for row in table.to_pylist()]


@settings(max_examples=100, deadline=None)
@given(batches(), st.data())
def test_columns_come_back_exactly_with_their_types(batch: Any, data: st.DataObject) -> None:
    schema, rows = batch
    table = arrow.table(schema, rows)
    start = data.draw(st.integers(0, len(rows)))
    # A slice has offsets into larger buffers, and a chunked table must be put together first.
    for piece in (table, table.slice(start), pa.concat_tables([table.slice(start), table])):
        codec = RowCodec(schema)
        back = decoded(codec, codec.encode(piece))
        assert back.schema.equals(schema)
        assert python(back) == python(piece)


@settings(max_examples=100, deadline=None)
@given(batches(), st.data())
def test_rows_are_equal_exactly_when_their_bytes_are(batch: Any, data: st.DataObject) -> None:
    schema, rows = batch
    again = data.draw(st.permutations(rows))
    # A parent that is null hides what its children hold, so the decoded rows are the ones to compare.
    table = arrow.table(schema, [*rows, *again])
    for exact in (True, False):
        codec = RowCodec(schema, normalise_floats=not exact)
        encoded = to_objects(codec.encode(table)).tolist()
        frozen = [arrow.frozen(row, exact=exact) for row in table.to_pylist()]
        for one, one_bytes in zip(frozen, encoded, strict=True):
            for other, other_bytes in zip(frozen, encoded, strict=True):
                assert (one == other) == (one_bytes == other_bytes)


@settings(max_examples=100, deadline=None)
@given(batches(), st.data())
def test_encoded_rows_can_be_picked_and_passed_as_objects(batch: Any, data: st.DataObject) -> None:
    schema, rows = batch
    codec = RowCodec(schema)
    table = arrow.table(schema, rows)
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    encoded = take(codec.encode(table), np.array(picked, dtype=np.intp))
    objects = to_objects(encoded).tolist()
    assert all(type(item) is bytes for item in objects)
    before = python(table)
    assert python(decoded(codec, from_objects(objects, codec.width))) == [before[i] for i in picked]
