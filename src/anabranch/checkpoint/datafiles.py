"""Files of state as Parquet, sorted by key group: change files, and the files of snapshots.

A change file has the changes of one worker to one state variable in one epoch. The files of a snapshot have all rows
of a variable, sorted by hash within a key group, and names of their own: so a snapshot that is written twice, or by two
processes at once, is one of the two, whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.checkpoint import paths
from anabranch.checkpoint.documents import Checksum, checksum_of
from anabranch.checkpoint.evolution import to_layout
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.gather import PART_BYTES, gathered, gathered_in_parts
from anabranch.core.ids import Epoch
from anabranch.core.keygroups import MAX_KEY_GROUPS, key_groups_of
from anabranch.core.schemas import GROUP, HASH, Layout, StageSpec, VariableKind
from anabranch.core.state_files import ChangeFile, SnapshotFile

DataFile = ChangeFile | SnapshotFile

#: Small enough that a reader of few key groups skips most of a large file.
ROW_GROUP_ROWS = 65_536
#: The rows of one file of a snapshot: a reader holds it in memory, compressed, while it takes rows from it.
FILE_ROWS_MAX = 4_000_000
#: LZ4 writes a quarter less than nothing at all does, in half the time of zstd; dictionaries of keys and numbers cost
#: more than everything else together, and make the file no smaller.
_COMPRESSION = "lz4"


class Written(NamedTuple):
    """What documents say about a file that was written."""

    rows: int
    bytes: int
    checksum: str


def write_changes(storage: Storage, path: str, layout: Layout, key_groups: int, changes: pa.Table) -> Written:
    """Writes the changes of ``layout.changes``, by key group; the order within a key group stays as it is."""
    _check_columns(changes, layout.changes)
    groups = key_groups_of(changes.column(HASH).to_numpy(), key_groups)
    # On 16 bits, NumPy's stable sort is a radix sort: five times as fast as on 32.
    order = np.argsort(groups.astype(np.int16), kind="stable")
    if changes.nbytes > PART_BYTES:
        parts = gathered_in_parts(changes, order)
    else:
        in_order = np.all(groups[1:] >= groups[:-1])
        parts = iter([changes if in_order else changes.combine_chunks().take(pa.array(order))])
    return _write(storage, path, file_schema(layout.changes), _with_groups(parts, groups[order]), changes.nbytes)


def read_changes(storage: Storage, file: ChangeFile, layout: Layout, groups: Collection[int] | None) -> pa.Table:
    """Reads the changes of these key groups (None: of all), with the columns of ``layout.changes``, by key group.

    The file may be older than the layout: see evolution.
    """
    return _read(storage, file, layout, layout.changes, groups)


def write_snapshot_rows(
    storage: Storage, stage: StageSpec, variable: str, rows: pa.Table, *, epoch: Epoch, key_groups: int
) -> list[SnapshotFile]:
    """Writes rows of a state variable, ``layout.rows`` in any order, and returns what the document has to list.

    All rows of the key groups that they are of have to come in one call.
    """
    layout = stage.layouts[variable]
    _check_columns(rows, layout.rows)
    hashes = rows.column(HASH).to_numpy()
    groups = key_groups_of(hashes, key_groups)
    keys = [hashes, groups]
    if layout.variable.kind is VariableKind.LIST:
        keys.insert(0, rows.column(layout.subkey.names[0]).to_numpy())
    order = np.lexsort(keys)
    rows, groups = gathered(rows, order), groups[order]
    files = []
    for start in range(0, rows.num_rows, FILE_ROWS_MAX):
        part, groups_of_part = rows[start : start + FILE_ROWS_MAX], groups[start : start + FILE_ROWS_MAX]
        path = paths.snapshot_file(stage.name, variable, epoch=epoch, unique=uuid4().hex)
        parts = _with_groups(iter([part]), groups_of_part)
        written = _write(storage, path, file_schema(layout.rows), parts, part.nbytes)
        first, last = int(groups_of_part[0]), int(groups_of_part[-1])
        files.append(SnapshotFile(stage.number, variable, first, last, path, *written))
    return files


def read_snapshot_rows(
    storage: Storage, file: SnapshotFile, layout: Layout, groups: Collection[int] | None
) -> pa.Table:
    """Reads the rows of these key groups (None: of all), ``layout.rows``, by key group and hash.

    The file may be older than the layout: see evolution.
    """
    return _read(storage, file, layout, layout.rows, groups)


def file_schema(columns: pa.Schema) -> pa.Schema:
    """Returns the columns of a file with rows of these columns.

    All may be null, whatever the type of the state says: those of a change that clears or deletes are.
    """
    return pa.schema([pa.field(GROUP, pa.int32()), *(field.with_nullable(True) for field in columns)])


class _Sink:
    """A file, as far as Arrow needs one: holds what Parquet has written until it is taken."""

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
        """Does nothing: what is here has to be taken."""

    def take(self) -> bytes:
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

    @property
    def checksum(self) -> str:
        return self._hash.text


def _check_columns(rows: pa.Table, columns: pa.Schema) -> None:
    if not rows.schema.equals(columns):
        raise ValueError(f"the rows have the columns\n{rows.schema}\ninstead of\n{columns}")


def _with_groups(parts: Iterator[pa.Table], groups: npt.NDArray[np.int32]) -> Iterator[pa.Table]:
    """Puts the key group of each row in front of it."""
    start = 0
    for part in parts:
        yield part.add_column(0, pa.field(GROUP, pa.int32()), pa.array(groups[start : start + len(part)]))
        start += len(part)


def _write(storage: Storage, path: str, schema: pa.Schema, parts: Iterator[pa.Table], size_bytes: int) -> Written:
    """Writes a file of parts, of which there is at least one; if they are large, one after the other."""
    sink = _Sink()
    rows = 0

    def encoded() -> Iterator[bytes]:
        nonlocal rows
        try:
            with pq.ParquetWriter(
                pa.PythonFile(sink, "w"), schema, compression=_COMPRESSION, use_dictionary=False
            ) as writer:
                for part in parts:
                    writer.write_table(pa.table(part.columns, schema=schema), row_group_size=ROW_GROUP_ROWS)
                    rows += len(part)
                    yield sink.take()
        except pa.ArrowException as error:
            raise CheckpointError(
                f"Cannot write {storage.full_path(path)} as Parquet: {error}. Use other types in the state."
            ) from error
        yield sink.take()

    if size_bytes <= PART_BYTES:
        storage.write(path, b"".join(encoded()))
    else:
        storage.write_from(path, encoded())
    return Written(rows, sink.position, sink.checksum)


def _read(
    storage: Storage, file: DataFile, layout: Layout, columns: pa.Schema, groups: Collection[int] | None
) -> pa.Table:
    is_change = isinstance(file, ChangeFile)
    what, document = ("change", "manifest") if is_change else ("snapshot", "document of the snapshot")

    def damaged(reason: str) -> CheckpointError:
        return CheckpointError(
            f"The {what} file {storage.full_path(file.path)} is damaged: {reason}. Restore it from a copy of the "
            f"checkpoint, or use a new checkpoint."
        )

    try:
        with storage.open(file.path) as source:
            content = source.read_buffer()
        if checksum_of(content) != file.checksum:
            raise damaged(f"its checksum is not the one in the {document}")
        # All columns but the values tell what a row is about, and are never others.
        fixed = len(columns) - len(layout.value)
        path = storage.full_path(file.path)
        return to_layout(_decode(content, groups), columns, path, fixed_columns=fixed, dropped=layout.dropped)
    except (pa.ArrowException, OSError) as error:
        raise damaged(str(error)) from error


def _decode(content: pa.Buffer, groups: Collection[int] | None) -> pa.Table:
    """Returns the rows of these key groups, without the key group, which is the first column."""
    file = pq.ParquetFile(pa.BufferReader(content))
    if file.schema_arrow.names[:2] != [GROUP, HASH]:
        raise pa.ArrowInvalid(f"it has the columns {file.schema_arrow.names}, and not {GROUP} and {HASH} first")
    if groups is None:
        return file.read().remove_column(0)
    wanted = np.zeros(MAX_KEY_GROUPS, dtype=np.bool_)
    wanted[np.fromiter(groups, np.int64, len(groups))] = True
    # The statistics of the first column tell which row groups may hold wanted rows.
    may_hold = [
        index
        for index in range(file.num_row_groups)
        if (of := file.metadata.row_group(index).column(0).statistics) is None or wanted[of.min : of.max + 1].any()
    ]
    table = file.read_row_groups(may_hold)
    keep = wanted[table.column(0).to_numpy()]
    return (table if keep.all() else table.filter(pa.array(keep))).remove_column(0)
