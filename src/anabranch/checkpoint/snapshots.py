"""Snapshots: the whole state as of an epoch, as Parquet sorted by key group and hash, and a document that lists it.

The document is written last and makes the snapshot one. Files have names of their own, so that a snapshot that is
written twice, or by two processes at once, is one of the two, whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.evolution import to_layout
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.gather import gathered
from anabranch.core.ids import Epoch, Generation, Run, RunId
from anabranch.core.keygroups import MAX_KEY_GROUPS, key_groups_of
from anabranch.core.schemas import GROUP, HASH, Layout, StageSpec, VariableKind
from anabranch.core.state_files import SnapshotFile

#: Small enough that a reader of few key groups skips most of a large file.
ROW_GROUP_ROWS = 65_536
#: A reader holds a file in memory, compressed, while it takes rows from it.
FILE_ROWS_MAX = 4_000_000
_COMPRESSION = "lz4"


@dataclass(frozen=True)
class Snapshot:
    """The state as of the end of an epoch. A variable without files has no rows."""

    epoch: Epoch
    #: Of the run that the epoch came from, as its manifest says.
    generation: Generation
    run: Run
    #: Seconds since 1970.
    created_s: float
    files: tuple[SnapshotFile, ...]
    format_version: int = documents.FORMAT_VERSION

    @property
    def committed_by(self) -> RunId:
        return RunId(self.generation, self.run)

    def files_of(self, stage: int, variable: str) -> list[SnapshotFile]:
        return [file for file in self.files if (file.stage, file.variable) == (stage, variable)]

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "generation": self.generation,
            "run": self.run,
            "created_s": self.created_s,
            "files": [asdict(file) for file in self.files],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Snapshot:
        return Snapshot(
            format_version=content["format_version"],
            epoch=Epoch(content["epoch"]),
            generation=Generation(content["generation"]),
            run=Run(content["run"]),
            created_s=float(content["created_s"]),
            files=tuple(SnapshotFile(**file) for file in content["files"]),
        )


def snapshot_epochs(storage: Storage) -> list[Epoch]:
    """The epochs that have a snapshot, in order. Goes by the names alone."""
    epochs = (paths.snapshot_epoch_of(name) for name in storage.list_names(paths.SNAPSHOTS))
    return sorted(epoch for epoch in epochs if epoch is not None)


def read_snapshot(storage: Storage, epoch: Epoch) -> Snapshot:
    """What the document of a snapshot says; its files are not looked at."""
    path = paths.snapshot_document(epoch)
    content = documents.decode(storage, path, storage.read(path))
    try:
        snapshot = Snapshot.from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise documents.unexpected(storage, path, repr(error)) from error
    if snapshot.epoch != epoch:
        raise documents.unexpected(storage, path, f"it is of epoch {snapshot.epoch}")
    return snapshot


def write_snapshot(storage: Storage, snapshot: Snapshot) -> None:
    """Makes a snapshot of the files that were written for it, in place of an earlier one of the same epoch."""
    path = paths.snapshot_document(snapshot.epoch)
    storage.write(path, documents.encode(snapshot.to_json(), format_version=snapshot.format_version))


def write_snapshot_rows(
    storage: Storage, stage: StageSpec, variable: str, rows: pa.Table, *, epoch: Epoch, key_groups: int
) -> list[SnapshotFile]:
    """Writes rows of a state variable, ``layout.rows`` in any order, and says what the document has to list.

    All rows of the key groups that they are of have to come in one call.
    """
    layout = stage.layouts[variable]
    rows, groups = _in_order(rows, layout, key_groups)
    return [
        _write_file(storage, stage, variable, rows[start : start + FILE_ROWS_MAX], groups[start:], epoch=epoch)
        for start in range(0, rows.num_rows, FILE_ROWS_MAX)
    ]


def read_snapshot_rows(
    storage: Storage, file: SnapshotFile, layout: Layout, groups: Collection[int] | None
) -> pa.Table:
    """The rows of these key groups (None: of all), ``layout.rows``, by key group and hash.

    The file may be older than the layout: see evolution.
    """
    try:
        with storage.open(file.path) as source:
            content = source.read_buffer()
        if documents.checksum_of(content) != file.checksum:
            raise _damaged(storage, file, "its checksum is not the one in the document of the snapshot")
        # Key and sub-key tell what a row is about, and are never others.
        about = len(layout.rows) - len(layout.value)
        path = storage.full_path(file.path)
        return to_layout(_decode(content, groups), layout.rows, path, fixed_columns=about, dropped=layout.dropped)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(storage, file, str(error)) from error


def file_schema(layout: Layout) -> pa.Schema:
    """The columns of a snapshot's files. All may be null, for readers that know of nothing else."""
    return pa.schema([pa.field(GROUP, pa.int32()), *(field.with_nullable(True) for field in layout.rows)])


def _in_order(rows: pa.Table, layout: Layout, key_groups: int) -> tuple[pa.Table, npt.NDArray[np.int32]]:
    """The rows by key group and hash, lists by position too, and the key group of each."""
    if not rows.schema.equals(layout.rows):
        raise ValueError(f"rows have the columns\n{rows.schema}\ninstead of\n{layout.rows}")
    hashes = rows.column(HASH).to_numpy()
    groups = key_groups_of(hashes, key_groups)
    keys = [hashes, groups]
    if layout.variable.kind is VariableKind.LIST:
        keys.insert(0, rows.column(layout.subkey.names[0]).to_numpy())
    order = np.lexsort(keys)
    return gathered(rows, order), groups[order]


def _write_file(
    storage: Storage,
    stage: StageSpec,
    variable: str,
    rows: pa.Table,
    groups: npt.NDArray[np.int32],
    *,
    epoch: Epoch,
) -> SnapshotFile:
    groups = groups[: rows.num_rows]
    path = paths.snapshot_file(stage.name, variable, epoch=epoch, unique=uuid4().hex)
    content = _encode(storage, path, stage.layouts[variable], rows, groups)
    storage.write(path, content)
    return SnapshotFile(
        stage=stage.number,
        variable=variable,
        first_group=int(groups[0]),
        last_group=int(groups[-1]),
        path=path,
        rows=rows.num_rows,
        bytes=content.size,
        checksum=documents.checksum_of(content),
    )


def _encode(storage: Storage, path: str, layout: Layout, rows: pa.Table, groups: npt.NDArray[np.int32]) -> pa.Buffer:
    schema = file_schema(layout)
    table = pa.table([pa.array(groups), *rows.columns], schema=schema)
    sink = pa.BufferOutputStream()
    try:
        with pq.ParquetWriter(sink, schema, compression=_COMPRESSION, use_dictionary=False) as writer:
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
    except pa.ArrowException as error:
        raise CheckpointError(
            f"Cannot write {storage.full_path(path)} as Parquet: {error}. Use other types in the state."
        ) from error
    return sink.getvalue()


def _decode(content: pa.Buffer, groups: Collection[int] | None) -> pa.Table:
    """The columns of the file, but for the key group, and the rows of these key groups."""
    file = pq.ParquetFile(pa.BufferReader(content))
    if file.schema_arrow.names[:2] != [GROUP, HASH]:
        raise pa.ArrowInvalid(f"it has the columns {file.schema_arrow.names}, and not {GROUP} and {HASH} first")
    if groups is None:
        return file.read().remove_column(0)
    wanted = np.zeros(MAX_KEY_GROUPS, dtype=np.bool_)
    wanted[np.fromiter(groups, np.int64, len(groups))] = True
    table = file.read_row_groups(
        [
            index
            for index in range(file.num_row_groups)
            if (of := file.metadata.row_group(index).column(0).statistics) is None or wanted[of.min : of.max + 1].any()
        ]
    )
    keep = wanted[table.column(0).to_numpy()]
    return (table if keep.all() else table.filter(pa.array(keep))).remove_column(0)


def _damaged(storage: Storage, file: SnapshotFile, reason: str) -> CheckpointError:
    return CheckpointError(
        f"The snapshot file {storage.full_path(file.path)} is damaged: {reason}. Restore it from a copy of the "
        f"checkpoint, or use a new checkpoint."
    )
