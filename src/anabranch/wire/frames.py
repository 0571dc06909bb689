"""One message on the wire: a JSON header and any number of named Arrow tables, in one buffer.

Layout: magic and version, header length, the header (JSON, with the name and length of each table), then each table as
an Arrow IPC stream, starting at a multiple of 64 bytes so that it can be read in place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from anabranch.core.errors import WorkerError

_MAGIC = b"ANB1"
_PREFIX = struct.Struct("<4sI")
_ALIGNMENT_BYTES = 64
#: No header is larger: a route of the most key groups and a choice of attempts stay far below.
_MAX_HEADER_BYTES = 64 * 1024 * 1024


def pack(header: Mapping[str, Any], tables: Mapping[str, pa.Table] | None = None) -> pa.Buffer:
    """Put a header and tables into one buffer."""
    bodies = {name: _serialize(table) for name, table in (tables or {}).items()}
    head = json.dumps(
        {**header, "_tables": [[name, body.size] for name, body in bodies.items()]}, separators=(",", ":")
    ).encode()
    if not bodies:
        return pa.py_buffer(_PREFIX.pack(_MAGIC, len(head)) + head)
    sink = pa.BufferOutputStream()
    sink.write(_PREFIX.pack(_MAGIC, len(head)))
    sink.write(head)
    for body in bodies.values():
        sink.write(b"\0" * _padding(sink.tell()))
        sink.write(body)
    return sink.getvalue()


def unpack(buffer: pa.Buffer) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Take a buffer apart, without copying the tables."""
    size = buffer.size
    if size < _PREFIX.size:
        raise _malformed("it is too short")
    magic, head_length = _PREFIX.unpack(buffer.slice(0, _PREFIX.size).to_pybytes())
    if magic != _MAGIC:
        raise _malformed("it does not start as one of this protocol's version")
    position = _PREFIX.size + head_length
    if head_length > _MAX_HEADER_BYTES or position > size:
        raise _malformed("its header is cut off")
    try:
        header = json.loads(buffer.slice(_PREFIX.size, head_length).to_pybytes())
        listed = [(str(name), int(length)) for name, length in header.pop("_tables")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _malformed(f"its header cannot be read ({error})") from None
    tables = {}
    for name, length in listed:
        position += _padding(position)
        if length < 0 or position + length > size:
            raise _malformed(f"its table {name!r} is cut off")
        tables[name] = _deserialize(name, buffer.slice(position, length))
        position += length
    return header, tables


def _serialize(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _deserialize(name: str, buffer: pa.Buffer) -> pa.Table:
    try:
        return pa.ipc.open_stream(buffer).read_all()
    except pa.ArrowInvalid as error:
        raise _malformed(f"its table {name!r} is not Arrow data ({error})") from None


def _padding(position: int) -> int:
    return -position % _ALIGNMENT_BYTES


def _malformed(reason: str) -> WorkerError:
    return WorkerError(
        f"A message between Spark and a state worker is malformed: {reason}. "
        "Make sure that both run the same version of anabranch and that nothing else talks to the worker's port."
    )
