"""Rows of one state variable in encoded form, and the way between them and Arrow columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.errors import WorkerError
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, OP, Layout, VariableKind
from anabranch.wire import frames
from anabranch.worker.state.codec import Encoded, RowCodec, batches_of, pieces, size_bytes, take

Hashes = npt.NDArray[np.int64]
#: Positions, or one truth value per row.
Selection = npt.NDArray[Any]

#: Rows are decoded in batches, several for a message: what that takes for a moment is a multiple of a batch.
_BATCHES_PER_MESSAGE = 4
#: Rows that are worked on at a time.
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class Shape:
    """What a store needs to know about a state variable: widths in bytes, None where they vary."""

    kind: VariableKind
    key_width: int | None
    subkey_width: int | None
    value_width: int | None
    key_groups: int

    def chosen(self, groups: Collection[int]) -> npt.NDArray[np.bool_]:
        """Which key groups are among these."""
        chosen = np.zeros(self.key_groups, dtype=np.bool_)
        chosen[list(groups)] = True
        return chosen

    def groups_of(self, hashes: Hashes) -> npt.NDArray[Any]:
        """The key group of each hash."""
        return key_groups_of(hashes, self.key_groups)


class Columns:
    """Columns of equal length; a subclass names them as fields. They never change."""

    def __len__(self) -> int:
        return len(self._columns[0])

    @property
    def _columns(self) -> list[npt.NDArray[Any]]:
        return list(vars(self).values())

    @property
    def nbytes(self) -> int:
        return sum(map(size_bytes, self._columns))

    def take(self, chosen: Selection) -> Self:
        """Some of the rows, copied."""
        return type(self)(*(take(column, chosen) for column in self._columns))

    def piece(self, part: slice) -> Self:
        """The rows from one position to another, which share the memory of the columns."""
        return type(self)(*(column[part] for column in self._columns))

    def batches(self, rows: int = _BATCH_ROWS) -> Iterator[Self]:
        """All rows, in pieces of bounded length."""
        for start in range(0, len(self), rows):
            yield self.piece(slice(start, start + rows))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        return cls(*map(np.concatenate, zip(*(part._columns for part in parts), strict=True)))


@dataclass(frozen=True)
class Keys(Columns):
    """Keys with their hashes."""

    hashes: Hashes
    keys: Encoded

    def rows_of(self, entries: Entries) -> Rows:
        """Entries of these keys as whole rows."""
        own = self.take(entries.index)
        return Rows(own.hashes, own.keys, entries.subkeys, entries.values)


@dataclass(frozen=True)
class Entries(Columns):
    """Entries of keys that were asked for; ``index`` is the position of the key in the question."""

    index: npt.NDArray[np.intp]
    subkeys: Encoded
    values: Encoded

    def in_order(self) -> Entries:
        """Ordered by the keys' positions; entries of one key stay as they are."""
        if np.all(self.index[:-1] <= self.index[1:]):
            return self
        return self.take(np.argsort(self.index, kind="stable"))


@dataclass(frozen=True)
class Rows(Columns):
    """Whole rows of state: an entry with its key."""

    hashes: Hashes
    keys: Encoded
    subkeys: Encoded
    values: Encoded


@dataclass(frozen=True)
class Changes(Columns):
    """Changes of state. Of one key, CLEAR applies first, wherever it stands; an entry has at most one other."""

    hashes: Hashes
    ops: npt.NDArray[np.int8]
    keys: Encoded
    subkeys: Encoded
    values: Encoded

    def keys_of(self, chosen: Selection) -> Keys:
        return Keys(self.hashes[chosen], take(self.keys, chosen))


class VariableCodec:
    """Encodes and decodes the rows of a state variable."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.key = RowCodec(layout.key, normalise_floats=True)
        self.subkey = RowCodec(layout.subkey, normalise_floats=True)
        self.value = RowCodec(layout.value)

    def shape(self, key_groups: int) -> Shape:
        kind = self.layout.variable.kind
        return Shape(kind, self.key.width, self.subkey.width, self.value.width, key_groups)

    def encode_keys(self, data: pa.Table | pa.RecordBatch) -> Keys:
        return Keys(_numbers(data, HASH, np.int64), self.key.encode(data))

    def no_keys(self) -> Keys:
        return Keys(np.empty(0, dtype=np.int64), self.key.empty())

    def encode_changes(self, data: pa.Table | pa.RecordBatch) -> Changes:
        return self.encode_batches(batches_of(data))

    def encode_batches(self, batches: list[pa.RecordBatch]) -> Changes:
        """Changes in batches, at least one, which are taken out of the list: what is encoded can be freed."""
        parts = []
        batches.reverse()
        while batches:
            parts.append(self._encode_batch(batches.pop()))
        return Changes.concat(parts)

    def _encode_batch(self, data: pa.RecordBatch) -> Changes:
        return Changes(
            _numbers(data, HASH, np.int64),
            _numbers(data, OP, np.int8),
            self.key.encode(data),
            self.subkey.encode(data),
            self.value.encode(data),
        )

    def answers_of(self, entries: Entries) -> Iterator[pa.RecordBatch]:
        """Entries as answers to a read, in batches of bounded size: at least one."""
        for piece in pieces((entries.subkeys, entries.values), frames.MESSAGE_BYTES // _BATCHES_PER_MESSAGE):
            yield self.decode_answers(entries.piece(piece))

    def rows_of(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Whole rows, in batches of bounded size: at least one."""
        columns = (rows.keys, rows.subkeys, rows.values)
        for piece in pieces(columns, frames.MESSAGE_BYTES // _BATCHES_PER_MESSAGE):
            yield self.decode_rows(rows.piece(piece))

    def decode_answers(self, entries: Entries) -> pa.RecordBatch:
        columns = [
            pa.array(entries.index.astype(np.int32)),
            *self.subkey.decode(entries.subkeys),
            *self.value.decode(entries.values),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.layout.answers)

    def decode_rows(self, rows: Rows) -> pa.RecordBatch:
        columns = [
            pa.array(rows.hashes),
            *self.key.decode(rows.keys),
            *self.subkey.decode(rows.subkeys),
            *self.value.decode(rows.values),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.layout.rows)


def _numbers(data: pa.Table | pa.RecordBatch, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    column = data.column(name)
    if column.null_count:
        raise WorkerError(f"The column {name} has nulls. Run the same version of anabranch everywhere.")
    # A copy: a view would keep all of the message alive that the column came with.
    return np.array(column.to_numpy(), dtype=dtype)
