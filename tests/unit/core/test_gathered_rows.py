"""Rows in any order out of tables of any size: as Arrow takes them, where Arrow can."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core import gather
from anabranch.core.gather import gathered, gathered_in_parts

TYPE = pa.struct([("a", pa.list_(pa.int64())), ("b", pa.string())])


def table_of(sizes: list[list[int]]) -> pa.Table:
    """A chunk for each list, a row for each size."""
    schema = pa.schema([("n", pa.int64()), ("text", pa.string()), ("nested", TYPE)])
    chunks, number = [schema.empty_table()], 0
    for of_chunk in sizes:
        numbers = range(number, number + len(of_chunk))
        texts = [None if size == 3 else str(n) * size for n, size in zip(numbers, of_chunk, strict=True)]
        nested = [{"a": [n] * size, "b": str(n)} for n, size in zip(numbers, of_chunk, strict=True)]
        columns = [pa.array(numbers, pa.int64()), pa.array(texts, pa.string()), pa.array(nested, TYPE)]
        chunks.append(pa.table(columns, schema=schema))
        number += len(of_chunk)
    return pa.concat_tables(chunks)


@given(
    sizes=st.lists(st.lists(st.integers(0, 40), max_size=8), max_size=5),
    part=st.integers(1, 3000),
    data=st.data(),
)
@settings(deadline=None, derandomize=True)
def test_rows_are_those_that_arrow_takes(sizes: list[list[int]], part: int, data: st.DataObject) -> None:
    table = table_of(sizes)
    rows = np.array(
        data.draw(st.lists(st.integers(0, len(table) - 1), max_size=30) if len(table) else st.just([])), int
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "PART_BYTES", part)
        assert gathered(table, rows).equals(table.take(pa.array(rows, pa.int64())))
        parts = list(gathered_in_parts(table, rows))
        # About as large as asked for, whatever the sizes of rows; a row that is larger comes alone.
        assert all(len(each) == 1 or each.nbytes <= 4 * part + 100 for each in parts)


def test_more_than_arrow_can_join_is_gathered() -> None:
    """Two gigabytes of binary values, which share their memory: Arrow takes no row out of them."""
    chunk = pa.table({"b": pa.array([b"x" * 1_000_000] * 40, pa.binary())})
    table = pa.concat_tables([chunk] * 60)
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        table.take(pa.array([1999, 7]))
    assert gathered(table, np.array([1999, 7])).equals(chunk.slice(0, 2))
