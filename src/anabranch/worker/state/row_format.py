"""The bytes of a row: how the pieces of its fields, nested ones included, are laid out.

A row is its head, then its segments. The head has one width for all rows of a schema: a bit per nullable node
(set = null), the fixed-width fields (zeros where null), and the length in bytes of each segment. A segment is what
varies: the bytes of a string, or the elements of a list, which are rows themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.errors import UnsupportedError

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Lengths: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]

_UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_COUNT = np.dtype("<u4")
_OFFSET_32 = np.dtype("<i4")
_OFFSET_64 = np.dtype("<i8")
#: Longer rows are taken apart row by row, shorter ones byte by byte, all at once.
_LONG_ROW_BYTES = 512


@dataclass
class _Parts:
    """The pieces of a batch of rows, node by node in depth-first order."""

    nulls: list[_Mask | None] = field(default_factory=list)
    fixed: list[npt.NDArray[Any]] = field(default_factory=list)
    segments: list[tuple[_Lengths, _Bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class _Pieces:
    """The same pieces, to be taken one after the other when decoding."""

    rows: int
    nulls: Iterator[_Mask | None]
    fixed: Iterator[npt.NDArray[Any]]
    segments: Iterator[tuple[_Lengths, _Bytes]]


class _Node(Protocol):
    """One node of the tree of types of a schema."""

    nullable: int  #: how many bits it and its children take
    slots: list[np.dtype[Any]]  #: their fixed-width fields
    segments: int  #: how many segments they take

    def split(self, array: pa.Array, parts: _Parts) -> None: ...

    def join(self, pieces: _Pieces) -> pa.Array: ...


class RowFormat:
    """How the pieces of several nodes make up a row."""

    def __init__(self, nodes: Sequence[_Node]) -> None:
        self._nodes = nodes
        self._nullable = sum(node.nullable for node in nodes)
        self.segments = sum(node.segments for node in nodes)
        slots = [slot for node in nodes for slot in node.slots] + [_COUNT] * self.segments
        self._bitmap_width = (self._nullable + 7) // 8
        offsets = self._bitmap_width + np.cumsum([0, *(slot.itemsize for slot in slots)])
        self.head_width = int(offsets[-1])
        self._fields = [f"f{i}" for i in range(len(slots))]
        self._head = np.dtype(
            {
                "names": self._fields,
                "formats": slots,
                "offsets": offsets[:-1].tolist(),
                "itemsize": self.head_width,
            }
        )

    def pack(self, arrays: Sequence[pa.Array], rows: int) -> tuple[_Bytes, list[tuple[_Lengths, _Bytes]]]:
        """The heads of the rows, and their segments."""
        parts = _Parts()
        for node, array in zip(self._nodes, arrays, strict=True):
            node.split(array, parts)
        heads = np.zeros((rows, self.head_width), dtype=np.uint8)
        if rows == 0 or self.head_width == 0:
            return heads, parts.segments
        if any(nulls is not None for nulls in parts.nulls):
            bits = np.zeros((rows, self._nullable), dtype=np.bool_)
            for i, nulls in enumerate(parts.nulls):
                if nulls is not None:
                    bits[:, i] = nulls
            heads[:, : self._bitmap_width] = np.packbits(bits, axis=1, bitorder="little")
        fields = heads.view(self._head).ravel()
        for name, values in zip(self._fields, [*parts.fixed, *(s[0] for s in parts.segments)], strict=True):
            fields[name] = values
        return heads, parts.segments

    def unpack(self, heads: _Bytes, segments: Sequence[tuple[_Lengths, _Bytes]], rows: int) -> list[pa.Array]:
        """The columns of rows of which these are the heads and segments."""
        nulls: list[_Mask | None] = [None] * self._nullable
        bitmap = heads[:, : self._bitmap_width]
        if bitmap.any():
            bits = np.unpackbits(bitmap, axis=1, count=self._nullable, bitorder="little").view(np.bool_)
            nulls = [column if column.any() else None for column in bits.T]
        fields = heads.view(self._head).ravel() if self._fields and rows else np.empty(rows, self._head)
        fixed = [np.ascontiguousarray(fields[name]) for name in self._fields]
        pieces = _Pieces(rows, iter(nulls), iter(fixed), iter(segments))
        return [node.join(pieces) for node in self._nodes]

    def pack_ragged(self, arrays: Sequence[pa.Array], rows: int) -> tuple[_Lengths, _Bytes]:
        """Whole rows, one after the other, and their lengths."""
        heads, segments = self.pack(arrays, rows)
        head_lengths = np.full(rows, self.head_width, dtype=np.int64)
        pieces = [binary_of(*piece) for piece in [(head_lengths, heads.ravel()), *segments]]
        return ragged_of(pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.large_binary())))

    def unpack_ragged(self, lengths: _Lengths, data: _Bytes) -> list[pa.Array]:
        """The columns of such rows."""
        rows = len(lengths)
        if not self.segments:
            return self.unpack(data.reshape(rows, self.head_width), [], rows)
        heads = ragged_of(pc.binary_slice(binary_of(lengths, data), 0, self.head_width))[1]
        heads = heads.reshape(rows, self.head_width)
        fields = heads.view(self._head).ravel() if rows else np.empty(0, self._head)
        piece_lengths = np.empty((rows, 1 + self.segments), dtype=np.int64)
        piece_lengths[:, 0] = self.head_width
        for i, name in enumerate(self._fields[-self.segments :], start=1):
            piece_lengths[:, i] = fields[name]
        if len(data) > _LONG_ROW_BYTES * rows:
            return self.unpack(heads, _cut(piece_lengths, data), rows)
        # Of every byte, the piece that it belongs to: then each piece is one selection of bytes.
        piece_of = np.repeat(np.tile(np.arange(1 + self.segments, dtype=np.uint16), rows), piece_lengths.ravel())
        segments = [(piece_lengths[:, i], data[piece_of == i]) for i in range(1, 1 + self.segments)]
        return self.unpack(heads, segments, rows)


def _cut(piece_lengths: npt.NDArray[np.int64], data: _Bytes) -> list[tuple[_Lengths, _Bytes]]:
    """All pieces of rows but the first, one after the other: for rows so long that a loop over them costs little."""
    ends = np.cumsum(piece_lengths.ravel()).reshape(piece_lengths.shape)
    view = data.data
    segments = []
    for i in range(1, piece_lengths.shape[1]):
        cut = [view[start:end] for start, end in zip(ends[:, i - 1].tolist(), ends[:, i].tolist(), strict=True)]
        segments.append((piece_lengths[:, i], np.frombuffer(b"".join(cut), np.uint8)))
    return segments


class _Null:
    """The null type: nothing to keep."""

    nullable = 0
    slots: list[np.dtype[Any]] = []  # noqa: RUF012  (a constant of the node protocol)
    segments = 0

    def split(self, array: pa.Array, parts: _Parts) -> None:
        pass

    def join(self, pieces: _Pieces) -> pa.Array:
        return pa.nulls(pieces.rows)


class _Fixed:
    """A type whose values all have one width of whole bytes."""

    nullable = 1
    segments = 0

    def __init__(self, data_type: pa.DataType, normalise_floats: bool) -> None:
        self._type = data_type
        width = data_type.bit_width // 8
        self._dtype = np.dtype(_UNSIGNED.get(width, f"V{width}"))
        self._float = f"<f{width}" if normalise_floats and pa.types.is_floating(data_type) else None
        self.slots = [self._dtype]

    def split(self, array: pa.Array, parts: _Parts) -> None:
        nulls = _nulls(array)
        buffer = array.buffers()[1]
        if buffer is None:
            values = np.zeros(len(array), dtype=self._dtype)
        else:
            values = np.frombuffer(buffer, self._dtype, len(array), array.offset * self._dtype.itemsize)
        if nulls is not None:
            values = values.copy()
            values[nulls] = np.zeros((), dtype=self._dtype)
        if self._float is not None:
            floats = values.view(self._float) + np.zeros((), dtype=self._float)
            floats[np.isnan(floats)] = np.nan
            values = floats.view(self._dtype)
        parts.nulls.append(nulls)
        parts.fixed.append(values)

    def join(self, pieces: _Pieces) -> pa.Array:
        validity = _validity(next(pieces.nulls))
        data = pa.py_buffer(next(pieces.fixed).view(np.uint8))
        return pa.Array.from_buffers(self._type, pieces.rows, [validity, data])


class _Bool:
    """A byte in the row for what is a bit in Arrow."""

    nullable = 1
    slots: list[np.dtype[Any]] = [np.dtype("u1")]  # noqa: RUF012
    segments = 0

    def split(self, array: pa.Array, parts: _Parts) -> None:
        nulls = _nulls(array)
        values = _bits(array.buffers()[1], array.offset, len(array))
        parts.nulls.append(nulls)
        parts.fixed.append(values if nulls is None else values & ~nulls)

    def join(self, pieces: _Pieces) -> pa.Array:
        validity = _validity(next(pieces.nulls))
        data = pa.py_buffer(np.packbits(next(pieces.fixed).view(np.bool_), bitorder="little"))
        return pa.Array.from_buffers(pa.bool_(), pieces.rows, [validity, data])


class _Binary:
    """Strings and binary values, with 32-bit or 64-bit offsets."""

    nullable = 1
    slots: list[np.dtype[Any]] = []  # noqa: RUF012
    segments = 1

    def __init__(self, data_type: pa.DataType) -> None:
        self._type = data_type
        large = pa.types.is_large_string(data_type) or pa.types.is_large_binary(data_type)
        self._offset = _OFFSET_64 if large else _OFFSET_32
        self._blank = pa.scalar(b"", data_type)

    def split(self, array: pa.Array, parts: _Parts) -> None:
        nulls = _nulls(array)
        if nulls is not None:  # what lies under a null is undefined
            array = array.fill_null(self._blank)
        parts.nulls.append(nulls)
        parts.segments.append(ragged_of(array, self._offset))

    def join(self, pieces: _Pieces) -> pa.Array:
        validity = _validity(next(pieces.nulls))
        lengths, data = next(pieces.segments)
        offsets = pa.py_buffer(_offsets(lengths, self._offset))
        return pa.Array.from_buffers(self._type, pieces.rows, [validity, offsets, pa.py_buffer(data)])


class _Struct:
    """A struct: its fields beside those of the row, and a bit of its own."""

    def __init__(self, data_type: pa.DataType, children: Sequence[_Node]) -> None:
        self._type = data_type
        self._children = children
        self.nullable = 1 + sum(child.nullable for child in children)
        self.slots = [slot for child in children for slot in child.slots]
        self.segments = sum(child.segments for child in children)

    def split(self, array: pa.Array, parts: _Parts) -> None:
        parts.nulls.append(_nulls(array))
        for child, column in zip(self._children, array.flatten(), strict=True):
            child.split(column, parts)

    def join(self, pieces: _Pieces) -> pa.Array:
        validity = _validity(next(pieces.nulls))
        children = [child.join(pieces) for child in self._children]
        return pa.Array.from_buffers(self._type, pieces.rows, [validity], children=children)


class _List:
    """A list or map: the number of its elements, and these as rows, preceded by their lengths if they vary."""

    nullable = 1
    slots: list[np.dtype[Any]] = [_COUNT]  # noqa: RUF012

    def __init__(self, data_type: pa.DataType, element: _Node) -> None:
        self._type = data_type
        self._offset = _OFFSET_64 if pa.types.is_large_list(data_type) else _OFFSET_32
        self._elements = RowFormat([element])
        self.segments = 2 if self._elements.segments else 1

    def split(self, array: pa.Array, parts: _Parts) -> None:
        if pa.types.is_map(array.type):
            as_list = pa.list_(pa.field("entries", array.values.type, nullable=False))
            children = [array.values]
            array = pa.Array.from_buffers(
                as_list, len(array), array.buffers()[:2], array.null_count, array.offset, children
            )
        nulls = _nulls(array)
        counts = np.diff(array.offsets.to_numpy()).astype(np.int64)
        if nulls is not None:
            counts[nulls] = 0
        elements = array.flatten()  # without those that lie under a null
        parts.nulls.append(nulls)
        parts.fixed.append(counts)
        if self._elements.segments == 0:
            heads, _ = self._elements.pack([elements], len(elements))
            parts.segments.append((counts * self._elements.head_width, heads.ravel()))
            return
        lengths, data = self._elements.pack_ragged([elements], len(elements))
        ends = np.concatenate(([0], np.cumsum(lengths)))[_offsets(counts, _OFFSET_64)]
        parts.segments.append((counts * _COUNT.itemsize, lengths.astype(_COUNT).view(np.uint8)))
        parts.segments.append((np.diff(ends), data))

    def join(self, pieces: _Pieces) -> pa.Array:
        validity = _validity(next(pieces.nulls))
        counts = next(pieces.fixed)
        _, data = next(pieces.segments)
        if self._elements.segments == 0:
            total = int(counts.sum())
            elements = self._elements.unpack(data.reshape(total, self._elements.head_width), [], total)
        else:
            lengths = data.view(_COUNT).astype(np.int64)
            elements = self._elements.unpack_ragged(lengths, next(pieces.segments)[1])
        offsets = pa.py_buffer(_offsets(counts, self._offset))
        return pa.Array.from_buffers(self._type, pieces.rows, [validity, offsets], children=elements)


def node_of(f: pa.Field, path: str, normalise_floats: bool) -> _Node:
    """The node of a field; ``path`` names it in errors."""
    types, t = pa.types, f.type

    def child(inner: pa.Field) -> _Node:
        return node_of(inner, f"{path}.{inner.name}", normalise_floats)

    if types.is_null(t):
        return _Null()
    if types.is_boolean(t):
        return _Bool()
    if types.is_string(t) or types.is_binary(t) or types.is_large_string(t) or types.is_large_binary(t):
        return _Binary(t)
    if types.is_struct(t):
        return _Struct(t, [child(t.field(i)) for i in range(t.num_fields)])
    if types.is_list(t) or types.is_large_list(t):
        return _List(t, child(t.value_field))
    if types.is_map(t):
        entry = pa.struct([t.key_field, t.item_field])
        return _List(t, child(pa.field("entries", entry, nullable=False)))
    if (types.is_primitive(t) or types.is_decimal(t) or types.is_fixed_size_binary(t)) and t.bit_width >= 8:
        return _Fixed(t, normalise_floats)
    raise UnsupportedError(
        f"Field '{path}' has the type {t}, which cannot be kept in state; cast it to a number, string, binary, date, "
        "timestamp, struct, list or map before the stateful stage."
    )


def _bits(buffer: pa.Buffer, offset: int, rows: int) -> _Mask:
    if buffer is None:
        return np.zeros(rows, dtype=np.bool_)
    # Only the bytes that hold these rows: a slice of a large array must not pay for the whole of it.
    first = offset // 8
    data = np.frombuffer(buffer, np.uint8)[first : (offset + rows + 7) // 8]
    return np.unpackbits(data, bitorder="little")[offset - 8 * first :][:rows].view(np.bool_)


def _nulls(array: pa.Array) -> _Mask | None:
    return None if array.null_count == 0 else ~_bits(array.buffers()[0], array.offset, len(array))


def _validity(nulls: _Mask | None) -> pa.Buffer | None:
    return None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))


def _offsets(lengths: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    offsets = np.zeros(len(lengths) + 1, dtype=dtype)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def binary_of(lengths: _Lengths, data: _Bytes) -> pa.Array:
    """An Arrow array over ragged bytes, without a copy."""
    buffers = [None, pa.py_buffer(_offsets(lengths, _OFFSET_64)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(lengths), buffers)


def ragged_of(array: pa.Array, offset: np.dtype[Any] = _OFFSET_64) -> tuple[_Lengths, _Bytes]:
    """The lengths and the bytes of an Arrow array of binary values without nulls, without a copy of the bytes."""
    _, offset_buffer, data = array.buffers()
    if len(array) == 0 or offset_buffer is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint8)
    offsets = np.frombuffer(offset_buffer, offset, len(array) + 1, array.offset * offset.itemsize)
    lengths = np.diff(offsets).astype(np.int64)
    if data is None:
        return lengths, np.zeros(0, dtype=np.uint8)
    return lengths, np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
