"""Arrow columns to one value of bytes per row, and back: canonical, so that equal rows have equal bytes.

A schema whose fields all have one width is encoded as a matrix of bytes; any other as an array of ``bytes`` objects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.gather import PART_BYTES
from anabranch.worker.state.row_format import RowFormat, binary_of, node_of, ragged_of

#: One value of bytes per row: uint8 of shape (rows, width), or ``bytes`` objects of shape (rows,).
Encoded: TypeAlias = npt.NDArray[Any]

_SIZE_SAMPLES = 512
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class RowCodec:
    """Encodes the columns of a schema, a batch at a time.

    With ``normalise_floats``, as keys need it, -0.0 becomes 0.0 and every NaN the same NaN: Spark groups them so.
    Maps are compared entry by entry in their order.
    """

    def __init__(self, schema: pa.Schema, *, normalise_floats: bool = False) -> None:
        self.schema = schema
        self._rows = RowFormat([node_of(f, f.name, normalise_floats) for f in schema])
        #: The bytes of a row, or None if rows differ.
        self.width: int | None = None if self._rows.segments else self._rows.head_width

    def encode(self, data: pa.Table | pa.RecordBatch) -> Encoded:
        """Encode the schema's columns of ``data``, found by name; further columns are ignored."""
        if not self.schema.names:  # Arrow loses the number of rows of data without columns
            return np.empty((data.num_rows, 0), dtype=np.uint8)
        parts = [self._encode(batch) for batch in batches_of(data.select(self.schema.names))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def decode(self, encoded: Encoded) -> list[pa.Array]:
        """The schema's columns, exactly of their types."""
        rows = len(encoded)
        if self.width is not None:
            return self._rows.unpack(np.ascontiguousarray(encoded), [], rows)
        lengths, data = ragged_of(pa.array(encoded, type=pa.large_binary()))
        return self._rows.unpack_ragged(lengths, data)

    def empty(self) -> Encoded:
        """The encoding of no rows."""
        return np.empty(0, dtype=object) if self.width is None else np.empty((0, self.width), dtype=np.uint8)

    def _encode(self, batch: pa.RecordBatch) -> Encoded:
        arrays = [
            column if column.type == f.type else column.cast(f.type)
            for column, f in zip(batch.columns, self.schema, strict=True)
        ]
        if self.width is not None:
            return self._rows.pack(arrays, batch.num_rows)[0]
        joined = binary_of(*self._rows.pack_ragged(arrays, batch.num_rows))
        return np.asarray(joined.to_numpy(zero_copy_only=False))


def to_objects(encoded: Encoded) -> npt.NDArray[np.object_]:
    """The same values as ``bytes`` objects."""
    if encoded.dtype == object:
        return encoded
    rows, width = encoded.shape
    if width == 0:
        return np.full(rows, b"", dtype=object)
    objects = np.empty(rows, dtype=object)
    objects[:] = np.ascontiguousarray(encoded).view(f"V{width}").ravel().tolist()
    return objects


def from_objects(values: Sequence[bytes], width: int | None) -> Encoded:
    """The encoding whose values are these ``bytes`` objects."""
    if width is None:
        objects = np.empty(len(values), dtype=object)
        objects[:] = values
        return objects
    return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(len(values), width)


def take(encoded: Encoded, rows: npt.NDArray[Any]) -> Encoded:
    """The values of some rows."""
    if encoded.ndim == 1 or encoded.shape[1] == 0:
        return np.asarray(encoded[rows])
    # As one opaque value per row, because a gather of rows of single bytes is several times slower.
    width = encoded.shape[1]
    opaque = np.ascontiguousarray(encoded).view(f"V{width}").ravel()
    taken: Encoded = opaque[rows].view(np.uint8).reshape(-1, width)
    return taken


def pieces(columns: Sequence[Encoded], bytes_max: int) -> Iterator[slice]:
    """Cuts the rows of columns into pieces, at least one, of bounded size; a larger row is a piece by itself."""
    rows = len(columns[0])
    sizes = np.full(rows, sum(column.shape[1] for column in columns if column.dtype != object), dtype=np.int64)
    for column in columns:
        if column.dtype == object:
            sizes += np.fromiter(map(len, column.tolist()), dtype=np.int64, count=rows)
    ends = np.cumsum(sizes)
    start = 0
    while True:
        before = int(ends[start - 1]) if start else 0
        end = min(rows, max(start + 1, int(np.searchsorted(ends, before + bytes_max, side="right"))))
        yield slice(start, end)
        if end == rows:
            return
        start = end


def hashes_of(encoded: Encoded) -> npt.NDArray[np.int64]:
    """A hash of each value, which means nothing outside of this process."""
    if encoded.dtype == object:
        return np.fromiter(map(hash, encoded), dtype=np.int64, count=len(encoded))
    rows, width = encoded.shape
    words = -(-width // 8)
    padded = np.zeros((rows, words * 8), dtype=np.uint8)
    padded[:, :width] = encoded
    hashes = np.zeros(rows, dtype=np.uint64)
    for word in padded.view(np.uint64).reshape(rows, words).T:
        hashes = (hashes ^ word) * _SPREAD
        hashes ^= hashes >> np.uint64(29)
    return hashes.view(np.int64)


def size_bytes(column: npt.NDArray[Any]) -> int:
    """The memory that an encoding holds; of objects, as estimated from some of them."""
    if column.dtype != object or not len(column):
        return column.nbytes
    sample = column[:: len(column) // _SIZE_SAMPLES + 1]
    return column.nbytes + sum(map(_size_of, sample)) * len(column) // len(sample)


def _size_of(item: Any) -> int:
    """Of a dict of encoded values, with what is in it."""
    size = sys.getsizeof(item)
    if isinstance(item, dict):
        size += sum(sys.getsizeof(subkey) + sys.getsizeof(value) for subkey, value in item.items())
    return size


def batches_of(data: pa.Table | pa.RecordBatch) -> list[pa.RecordBatch]:
    """The rows in batches of bounded size, of which there is at least one."""
    if isinstance(data, pa.RecordBatch):
        return [data]
    # What encoding takes for a moment is a multiple of a batch.
    whole = data.combine_chunks() if data.nbytes <= PART_BYTES else data
    batches = [part for batch in whole.to_batches() for part in _small(batch)]
    return batches or [pa.RecordBatch.from_pylist([], schema=data.schema)]


def _small(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    if batch.nbytes <= PART_BYTES or batch.num_rows == 1:
        return [batch]
    half = batch.num_rows // 2
    return [*_small(batch.slice(0, half)), *_small(batch.slice(half))]
