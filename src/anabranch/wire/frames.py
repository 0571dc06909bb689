"""One message on the wire: a JSON header and any number of named Arrow tables, in one buffer.

Layout: magic and version, header length, the header (JSON, with the name and length of each table), then each table as
an Arrow IPC stream, starting at a multiple of 64 bytes so that it can be read in place.

Rows that are too many for one message travel in several. A task cuts what it sends with ``slices`` and ``messages``. A
worker answers with a stream of messages, made one after the other with ``answers``, and ``joined`` puts them together.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from anabranch.core.errors import WorkerError

_MAGIC = b"ANB1"
_PREFIX = struct.Struct("<4sI")
_ALIGNMENT_BYTES = 64
#: No header is larger: a route of the most key groups and a choice of attempts stay far below.
MAX_HEADER_BYTES = 64 * 1024 * 1024
#: The rows of one message, in bytes. Only a row that alone has more makes a larger message.
MESSAGE_BYTES = 32 * 1024 * 1024
#: No message is larger: it would come near gRPC's limit of 2 GiB, and take several times its size in memory.
MESSAGE_BYTES_MAX = 1024 * 1024 * 1024
#: Larger tables are measured before they are written, so that they are copied once and never moved.
_MEASURED_BYTES = 256 * 1024

#: Tables by name. In parts, a name may come several times.
Tables = dict[str, pa.Table]
Parts = Iterable[tuple[str, pa.Table]]


def pack(header: Mapping[str, Any], tables: Mapping[str, pa.Table] | None = None) -> pa.Buffer:
    """Put a header and tables into one buffer."""
    tables = tables or {}
    if sum(table.nbytes for table in tables.values()) > _MEASURED_BYTES:
        return _pack_measured(header, tables)
    bodies = {name: _serialize(table) for name, table in tables.items()}
    head = _head(header, {name: body.size for name, body in bodies.items()})
    if not bodies:
        return pa.py_buffer(head)
    sink = pa.BufferOutputStream()
    sink.write(head)
    for body in bodies.values():
        sink.write(b"\0" * _padding(sink.tell()))
        sink.write(body)
    return sink.getvalue()


def _pack_measured(header: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> pa.Buffer:
    """The same, into a buffer of exactly the size."""
    lengths = {name: _measure(table) for name, table in tables.items()}
    head = _head(header, lengths)
    size = len(head)
    for length in lengths.values():
        size += _padding(size) + length
    if size > MESSAGE_BYTES_MAX:
        raise _too_large(size)
    buffer = pa.allocate_buffer(size)
    sink = pa.FixedSizeBufferWriter(buffer)
    sink.write(head)
    for table in tables.values():
        sink.write(b"\0" * _padding(sink.tell()))
        _write(table, sink)
    return buffer


def _head(header: Mapping[str, Any], lengths: Mapping[str, int]) -> bytes:
    head = json.dumps({**header, "_tables": list(map(list, lengths.items()))}, separators=(",", ":")).encode()
    return _PREFIX.pack(_MAGIC, len(head)) + head


def unpack(buffer: pa.Buffer, *, thorough: bool = False) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Take a buffer apart, without copying the tables.

    Thorough: whatever is in the tables can be looked at. Others may have values that lead out of their memory.
    """
    size = buffer.size
    if size > MESSAGE_BYTES_MAX:
        raise _too_large(size)
    if size < _PREFIX.size:
        raise _malformed("it is too short")
    magic, head_length = _PREFIX.unpack(buffer.slice(0, _PREFIX.size).to_pybytes())
    if magic != _MAGIC:
        raise _malformed("it does not start as one of this protocol's version")
    position = _PREFIX.size + head_length
    if head_length > MAX_HEADER_BYTES:
        raise _malformed(f"its header is larger than {MAX_HEADER_BYTES >> 20} MiB")
    if position > size:
        raise _malformed("its header is cut off")
    try:
        header = read_json(buffer.slice(_PREFIX.size, head_length).to_pybytes())
        listed = [(str(name), int(length)) for name, length in header.pop("_tables")]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _malformed(f"its header cannot be read ({error})") from None
    tables = {}
    for name, length in listed:
        position += _padding(position)
        if length < 0 or position + length > size:
            raise _malformed(f"its table {name!r} is cut off")
        if name in tables:
            raise _malformed(f"its table {name!r} is there twice")
        tables[name] = _deserialize(name, buffer.slice(position, length), thorough)
        position += length
    return header, tables


def read_json(text: bytes) -> Any:
    """A JSON document whose whole numbers all fit into 64 bits; raises a ValueError or RecursionError if it is none."""
    return json.loads(text, parse_int=_int64)


def _int64(digits: str) -> int:
    if len(digits) > 18 and not (len(digits) <= 20 and -(2**63) <= int(digits) < 2**63):
        raise ValueError("it has a number that is too large")
    return int(digits)


def slices(table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """The rows of a table in slices of one message each, with where each begins. At least one, if it is empty."""
    waiting = [(0, table)]
    while waiting:
        start, part = waiting.pop()
        if len(part) <= 1 or part.nbytes <= MESSAGE_BYTES:
            yield start, part
            continue
        half = len(part) // 2
        waiting += [(start + half, part.slice(half)), (start, part.slice(0, half))]


def messages(parts: Parts) -> Iterator[Tables]:
    """The parts in tables of one message each. At least one message, if there is nothing to send."""
    held: dict[str, list[pa.Table]] = {}
    held_bytes = 0
    for name, table in parts:
        for _, part in slices(table):
            if held and held_bytes + part.nbytes > MESSAGE_BYTES:
                yield _joined(held)
                held, held_bytes = {}, 0
            held.setdefault(name, []).append(part)
            held_bytes += part.nbytes
    yield _joined(held)


def answers(header: Mapping[str, Any], parts: Parts) -> Iterator[pa.Buffer]:
    """An answer as messages, the header with the first. What is not asked for yet has not been made."""
    for tables in messages(parts):
        yield pack(header, tables)
        header = {}


def joined(buffers: Iterable[pa.Buffer]) -> tuple[dict[str, Any], Tables]:
    """The header and the tables of an answer that came in these messages."""
    whole: dict[str, Any] = {}
    parts: dict[str, list[pa.Table]] = {}
    for buffer in buffers:
        header, tables = unpack(buffer)
        whole |= header
        for name, table in tables.items():
            parts.setdefault(name, []).append(table)
    return whole, _joined(parts)


def _joined(parts: Mapping[str, list[pa.Table]]) -> Tables:
    return {name: tables[0] if len(tables) == 1 else pa.concat_tables(tables) for name, tables in parts.items()}


def _serialize(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    _write(table, sink)
    return sink.getvalue()


def _measure(table: pa.Table) -> int:
    sink = pa.MockOutputStream()
    _write(table, sink)
    return int(sink.size())


def _write(table: pa.Table, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _deserialize(name: str, buffer: pa.Buffer, thorough: bool) -> pa.Table:
    try:
        table = pa.ipc.open_stream(buffer).read_all()
        table.validate()
        if thorough:
            for column in table.columns:
                _without_texts(column).validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise _malformed(f"its table {name!r} is not Arrow data ({error})") from None
    return table


def _without_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same bytes, with texts as plain bytes: Spark has texts that are not UTF-8, and so may state."""
    kind = _kind_without_texts(column.type)
    return column if kind == column.type else column.cast(kind)


def _kind_without_texts(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(_kind_without_texts(part.type)) for part in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_kind_without_texts(kind.value_type)))
    if pa.types.is_map(kind):
        item = kind.item_field.with_type(_kind_without_texts(kind.item_type))
        return pa.map_(_kind_without_texts(kind.key_type), item, keys_sorted=kind.keys_sorted)
    return kind


def _padding(position: int) -> int:
    return -position % _ALIGNMENT_BYTES


def _malformed(reason: str) -> WorkerError:
    return WorkerError(
        f"A message between Spark and a state worker is malformed: {reason}. "
        "Make sure that both run the same version of anabranch and that nothing else talks to the worker's port."
    )


def _too_large(size: int) -> WorkerError:
    return WorkerError(
        f"A message between Spark and a state worker would have {size} bytes, and the most is {MESSAGE_BYTES_MAX}: a "
        "row of state is too large; keep less under one key, or in one entry of a list or map."
    )
