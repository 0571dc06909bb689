"""One message in one buffer: whatever goes in comes out, and whatever else arrives is refused in words."""

import json
import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import WorkerError
from anabranch.wire.frames import pack, unpack

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
HEADERS = st.dictionaries(st.text(max_size=8).filter(lambda name: name != "_tables"), JSON, max_size=5)
ROWS = st.lists(st.tuples(st.none() | st.integers(-(2**63), 2**63 - 1), st.none() | st.text(max_size=5)), max_size=9)
TABLES = st.dictionaries(st.text(max_size=6), ROWS, max_size=4)

#: The same examples every time, however slow the machine is.
steady = settings(deadline=None, derandomize=True)


def table_of(rows: list[tuple[Any, Any]]) -> pa.Table:
    return pa.table({"n": pa.array([row[0] for row in rows], pa.int64()), "t": pa.array([row[1] for row in rows])})


@steady
@given(HEADERS, TABLES)
def test_what_is_packed_is_unpacked(header: dict[str, Any], rows: dict[str, Any]) -> None:
    tables = {name: table_of(values) for name, values in rows.items()}
    found_header, found = unpack(pack(header, tables))
    assert found_header == header
    assert list(found) == list(tables)
    assert all(found[name].equals(table) for name, table in tables.items())


def test_tables_start_where_they_can_be_read_in_place() -> None:
    table = pa.table({"n": pa.array(range(100), pa.int64())})
    _, found = unpack(pack({"x": "y"}, {"a": table, "b": table}))
    assert all(found[name].column(0).chunk(0).buffers()[1].address % 8 == 0 for name in "ab")


@steady
@given(HEADERS, TABLES, st.data())
def test_a_message_that_was_cut_off_is_refused(
    header: dict[str, Any], rows: dict[str, Any], data: st.DataObject
) -> None:
    whole = pack(header, {name: table_of(values) for name, values in rows.items()}).to_pybytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(WorkerError, match=r"malformed.*same version"):
        unpack(pa.py_buffer(whole[:cut]))


def framed(head: bytes, magic: bytes = b"ANB1", length: int | None = None, rest: bytes = b"") -> pa.Buffer:
    return pa.py_buffer(struct.pack("<4sI", magic, len(head) if length is None else length) + head + rest)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (framed(b"{}", magic=b"HTTP"), "does not start as one"),
        (framed(b"{}", length=2**32 - 1), "header is larger than 64 MiB"),
        (framed(b"{}", length=99), "header is cut off"),
        (framed(b"{"), "header cannot be read"),
        (framed(b"\xff\xff"), "header cannot be read"),
        (framed(b"[]"), "header cannot be read"),
        (framed(b"3"), "header cannot be read"),
        (framed(b"{}"), "header cannot be read"),
        (framed(b'{"_tables": 3}'), "header cannot be read"),
        (framed(b'{"_tables": [["a"]]}'), "header cannot be read"),
        (framed(b'{"_tables": [["a", "b"]]}'), "header cannot be read"),
        (framed(b'{"_tables": [["a", -1]]}'), "table 'a' is cut off"),
        (framed(b'{"_tables": [["a", 99]]}', rest=b"\0" * 64), "table 'a' is cut off"),
        (framed(json.dumps({"_tables": [["a", 8]]}).encode(), rest=b"\0" * 99), "table 'a' is not Arrow data"),
    ],
)
def test_what_is_no_message_is_refused(message: pa.Buffer, reason: str) -> None:
    with pytest.raises(WorkerError, match=reason):
        unpack(message)


@steady
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(WorkerError):
        unpack(pa.py_buffer(b"ANB1" + noise))
