"""Change files: the changes of one worker to one state variable in one epoch, as Parquet sorted by key group."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.checkpoint.documents import Checksum, checksum_of
from anabranch.checkpoint.evolution import to_layout
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.gather import PART_BYTES, gathered_in_parts
from anabranch.core.keygroups import MAX_KEY_GROUPS, key_groups_of
from anabranch.core.schemas import GROUP, HASH, Layout
from anabranch.core.state_files import ChangeFile

#: Small enough that a reader of few key groups skips most of a large file.
_ROW_GROUP_ROWS = 65_536
#: LZ4 writes a quarter less than nothing at all does, in half the time of zstd; dictionaries of keys and numbers cost
#: more than everything else together, and make the file no smaller.
_COMPRESSION = "lz4"


class Written(NamedTuple):
    """What a manifest says about a change file."""

    rows: int
    bytes: int
    checksum: str


def write_changes(storage: Storage, path: str, layout: Layout, key_groups: int, changes: pa.Table) -> Written:
    """Writes the changes of ``layout.changes``, by key group; the order within a key group stays as it is."""
    sink = _Sink()
    chunks = _encoded(storage, path, layout, _by_group(changes, layout, key_groups), sink)
    if changes.nbytes <= PART_BYTES:
        storage.write(path, b"".join(chunks))
    else:
        storage.write_from(path, chunks)
    return Written(rows=changes.num_rows, bytes=sink.position, checksum=sink.checksum)


def read_changes(storage: Storage, file: ChangeFile, layout: Layout, groups: Collection[int] | None) -> pa.Table:
    """The changes of these key groups (None: of all), with the columns of ``layout.changes``, by key group.

    The file may be older than the layout: see evolution.
    """
    try:
        with storage.open(file.path) as source:
            content = source.read_buffer()
        if checksum_of(content) != file.checksum:
            raise _damaged(storage, file, "its checksum is not the one in the manifest")
        changes = _decode(content, groups)
        # Everything but the values tells what a change is about, and is never another.
        about = len(layout.changes) - len(layout.value)
        path = storage.full_path(file.path)
        return to_layout(changes, layout.changes, path, fixed_columns=about, dropped=layout.dropped)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(storage, file, str(error)) from error


class _Sink:
    """What Parquet has written and nobody has taken yet. A file, as far as Arrow needs one."""

    closed = False

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._hash = Checksum()
        self.position = 0

    def write(self, data: pa.Buffer | bytes) -> int:
        chunk = bytes(data)
        self._chunks.append(chunk)
        self._hash.update(chunk)
        self.position += len(chunk)
        return len(chunk)

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """What is here has to be taken."""

    def take(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

    @property
    def checksum(self) -> str:
        return self._hash.text


def _by_group(changes: pa.Table, layout: Layout, key_groups: int) -> Iterator[pa.Table]:
    """The changes sorted by key group, with the key group: in parts of bounded size, of which there is at least one."""
    if not changes.schema.equals(layout.changes):
        raise ValueError(f"changes have the columns\n{changes.schema}\ninstead of\n{layout.changes}")
    groups = key_groups_of(changes.column(HASH).to_numpy(), key_groups)
    # On 16 bits, NumPy's stable sort is a radix sort: five times as fast as on 32.
    order = np.argsort(groups.astype(np.int16), kind="stable")
    if changes.nbytes <= PART_BYTES:
        in_order = np.all(groups[1:] >= groups[:-1])
        parts = iter([changes if in_order else changes.combine_chunks().take(pa.array(order))])
    else:
        parts = gathered_in_parts(changes, order)
    start = 0
    for part in parts:
        of_part = groups[order[start : start + len(part)]]
        yield part.add_column(0, pa.field(GROUP, pa.int32()), pa.array(of_part))
        start += len(part)


def _encoded(storage: Storage, path: str, layout: Layout, parts: Iterator[pa.Table], sink: _Sink) -> Iterator[bytes]:
    """The file as it is written."""
    # All columns may be null: those of a change that clears or deletes are, whatever the type of the state says.
    schema = pa.schema([field.with_nullable(True) for field in layout.files])
    try:
        with pq.ParquetWriter(
            pa.PythonFile(sink, "w"), schema, compression=_COMPRESSION, use_dictionary=False
        ) as writer:
            for part in parts:
                writer.write_table(pa.table(part.columns, schema=schema), row_group_size=_ROW_GROUP_ROWS)
                yield sink.take()
    except pa.ArrowException as error:
        raise CheckpointError(
            f"Cannot write {storage.full_path(path)} as Parquet: {error}. Use other types in the state."
        ) from error
    yield sink.take()


def _decode(content: pa.Buffer, groups: Collection[int] | None) -> pa.Table:
    """The columns as they were written, without the key group, which is the first one."""
    file = pq.ParquetFile(pa.BufferReader(content))
    if groups is None:
        return file.read().remove_column(0)
    wanted = np.zeros(MAX_KEY_GROUPS, dtype=np.bool_)
    wanted[np.fromiter(groups, np.int64, len(groups))] = True
    table = file.read_row_groups(_row_groups_with(file, wanted))
    keep = wanted[table.column(0).to_numpy()]
    changes = table.remove_column(0)
    return changes if keep.all() else changes.filter(pa.array(keep))


def _row_groups_with(file: pq.ParquetFile, wanted: npt.NDArray[np.bool_]) -> list[int]:
    """The row groups that may hold rows of wanted key groups, by the statistics of the first column."""
    return [
        index
        for index in range(file.num_row_groups)
        if (of := file.metadata.row_group(index).column(0).statistics) is None or wanted[of.min : of.max + 1].any()
    ]


def _damaged(storage: Storage, file: ChangeFile, reason: str) -> CheckpointError:
    return CheckpointError(
        f"The change file {storage.full_path(file.path)} is damaged: {reason}. Restore it from a copy of the "
        f"checkpoint, or use a new checkpoint."
    )
