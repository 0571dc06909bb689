"""Events as lines of JSON or CSV, made in columns.

The strings of generated events never hold a quote, a comma, a backslash or a line break, so nothing needs escaping.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Piece: TypeAlias = pa.Scalar | pa.Array

_TIME_WIDTH = len("2024-01-01 00:00:00.000000")
_DATE_WIDTH = len("2024-01-01")


def json_lines(batch: pa.RecordBatch) -> pa.StringArray:
    """One JSON object a row, each with its line break."""
    pieces: list[Piece | str] = []
    text = "{"
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        quote = "" if _is_bare(column.type) else '"'
        pieces += [f'{text}"{name}":{quote}', _as_text(column)]
        text = f"{quote},"
    return _joined([*pieces, text.removesuffix(",") + "}\n"])


def csv_lines(batch: pa.RecordBatch) -> pa.StringArray:
    """One line a row, without quotes, each with its line break."""
    pieces: list[Piece | str] = []
    for column in batch.columns:
        pieces += [_as_text(column), ","]
    return _joined([*pieces[:-1], "\n"])


def csv_header(schema: pa.Schema) -> bytes:
    return (",".join(schema.names) + "\n").encode()


def line_offsets(lines: pa.StringArray) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Where each line begins in line_bytes, and at last where they end."""
    return np.frombuffer(lines.buffers()[1], dtype=np.int32)[lines.offset : lines.offset + len(lines) + 1]


def line_bytes(lines: pa.StringArray) -> memoryview:
    """The text of all lines: in memory they already follow each other, so nothing is copied."""
    offsets = line_offsets(lines)
    return memoryview(lines.buffers()[2])[int(offsets[0]) : int(offsets[-1])]


def _joined(pieces: list[Piece | str]) -> pa.StringArray:
    return pc.binary_join_element_wise(*pieces, "")


def _is_bare(kind: pa.DataType) -> bool:
    """Whether JSON writes values of this type without quotes."""
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _as_text(column: pa.Array) -> pa.StringArray:
    if pa.types.is_timestamp(column.type):
        return _iso_times(column)
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def _iso_times(column: pa.TimestampArray) -> pa.StringArray:
    """Like 2024-01-01T00:00:00.000000Z. Casting times that have a zone does the same 40 times slower."""
    spaced = column.cast(pa.timestamp("us")).cast(pa.string())
    letters = np.empty((len(column), _TIME_WIDTH + 1), dtype=np.uint8)
    letters[:, :_TIME_WIDTH] = np.frombuffer(line_bytes(spaced), dtype=np.uint8).reshape(-1, _TIME_WIDTH)
    letters[:, _DATE_WIDTH] = ord("T")
    letters[:, _TIME_WIDTH] = ord("Z")
    offsets = np.arange(len(column) + 1, dtype=np.int32) * np.int32(_TIME_WIDTH + 1)
    return pa.StringArray.from_buffers(len(column), pa.py_buffer(offsets), pa.py_buffer(letters))
