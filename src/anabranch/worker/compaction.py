"""Compaction: the snapshot of an epoch out of an older one and the change files since, in bounded memory.

A process of its own does it, at the lowest priority, so that epochs do not wait for it; the driver has it forked from
its fork server. By hand: ``python -m anabranch.worker.compaction LOCATION UP_TO``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.checkpoint import paths
from anabranch.checkpoint.datafiles import read_changes, read_snapshot_rows, write_snapshot_rows
from anabranch.checkpoint.generations import check_generation, latest_generation
from anabranch.checkpoint.job import read_job
from anabranch.checkpoint.manifests import Snapshot, write_snapshot
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import AnabranchError, CheckpointError
from anabranch.core.ids import Epoch, Generation
from anabranch.core.schemas import Layout, Op, StageSpec, VariableKind
from anabranch.core.state_files import ChangeFile, SnapshotFile
from anabranch.worker.state.layer import newest
from anabranch.worker.state.rows import Changes, Entries, Rows, Shape, VariableCodec
from anabranch.worker.state.table import RowTable
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores.memory import MemoryStore
from anabranch.worker.transfer.sources import as_puts

logger = logging.getLogger(__name__)

#: What is in memory at a time: the state of a range of key groups with at most this many rows, and bytes.
RANGE_ROWS_MAX = 2_000_000
_RANGE_BYTES_MAX = 512 << 20
#: What a row takes in memory beyond its columns: keys and entries that vary in width are Python objects.
_ROW_BYTES_MORE = {VariableKind.VALUE: 40, VariableKind.LIST: 400, VariableKind.MAP: 400}
#: Changes that may wait to be merged; more, if what has been merged is much more than that.
_WAITING_ROWS_MAX = 1 << 18


def compact(storage: Storage, up_to: Epoch, *, generation: Generation, write_to: Storage | None = None) -> Snapshot:
    """Makes the snapshot of an epoch, in the same checkpoint or, for a savepoint, in another storage.

    FencedError if a newer driver than ``generation`` has taken over: then there is none. State variables that the job
    no longer has are left out.
    """
    files = state_files(storage, up_to)
    by = files.committed_by
    if by is None:
        raise CheckpointError(
            f"There is no epoch yet in {storage.location}, so there is no state to make a snapshot of. Wait for the "
            f"first epoch."
        )
    if files.snapshot is not None and files.snapshot.epoch == up_to and write_to is None:
        return files.snapshot
    job, target, started = read_job(storage), write_to or storage, time.monotonic()
    written: list[SnapshotFile] = []
    for stage in job.stages:
        for variable in stage.layouts:
            for rows in state_rows(storage, files, stage, variable, key_groups=job.key_groups):
                written += write_snapshot_rows(target, stage, variable, rows, epoch=up_to, key_groups=job.key_groups)
    check_generation(storage, generation)
    snapshot = Snapshot(up_to, by.generation, by.run, time.time(), tuple(written))
    write_snapshot(target, snapshot)
    logger.info("wrote the snapshot of epoch %d in %.1f s", up_to, time.monotonic() - started)
    return snapshot


def state_rows(
    storage: Storage, files: StateFiles, stage: StageSpec, variable: str, *, key_groups: int
) -> Iterator[pa.Table]:
    """The rows of a variable as of an epoch, ``layout.rows``: each time all those of a range of key groups."""
    of = _VariableFiles(storage, stage.layouts[variable], key_groups, *_files_of(files, stage, variable))
    first, width = 0, of.first_width()
    while first < key_groups:
        rows, end = of.load(first, min(first + width, key_groups))
        if rows.num_rows:
            yield rows
        # A range that had to be cut is the best guess for the next.
        first, width = end, min(width, end - first)


def export(storage: Storage, epoch: Epoch, target_folder: str) -> dict[str, int]:
    """Writes the state as of an epoch as ``<stage>/<variable>.parquet`` in an empty or new local folder.

    With the columns of the user only: key, position or map key, value. Returns how many rows each file has.
    """
    folder = _empty_folder(target_folder)
    job, files = read_job(storage), state_files(storage, epoch)
    exported = {}
    for stage in job.stages:
        for variable, layout in stage.layouts.items():
            name = f"{paths.safe_name(stage.name)}/{paths.safe_name(variable)}.parquet"
            rows = state_rows(storage, files, stage, variable, key_groups=job.key_groups)
            exported[name] = _export_variable(folder / name, layout, rows)
    return exported


@dataclass(frozen=True)
class _VariableFiles:
    """The files that hold one variable as of an epoch."""

    storage: Storage
    layout: Layout
    key_groups: int
    snapshot: Sequence[SnapshotFile]
    #: In the order in which they apply.
    changes: Sequence[ChangeFile]
    #: The most rows that one epoch changed.
    most_changed: int

    def first_width(self) -> int:
        """How many key groups to begin with, if there are no more rows than files tell for sure."""
        rows = sum(file.rows for file in self.snapshot) + self.most_changed
        return max(1, self.key_groups * RANGE_ROWS_MAX // max(rows, RANGE_ROWS_MAX))

    def load(self, first: int, end: int) -> tuple[pa.Table, int]:
        """The rows of these key groups, or, if they are too many, of fewer; and where the next range begins."""
        state = self._empty()
        loaded_rows = loaded_bytes = 0
        files: list[SnapshotFile | ChangeFile] = [*self.snapshot, *self.changes]
        for file in files:
            changes = self._read(file, first, end)
            loaded_rows, loaded_bytes = loaded_rows + changes.num_rows, loaded_bytes + changes.nbytes
            state.load(changes)
            while end - first > 1 and self._is_too_large(state, loaded_rows, loaded_bytes):
                middle = (first + end) // 2
                state.drop_groups(range(middle, end))
                end = middle
        batches = list(state.scan())
        return pa.Table.from_batches(batches, schema=self.layout.rows), end

    def _empty(self) -> EntryMerge | ValueMerge:
        if self.layout.variable.kind is VariableKind.VALUE:
            return ValueMerge(self.layout, self.key_groups)
        return EntryMerge(self.layout, self.key_groups)

    def _is_too_large(self, state: EntryMerge | ValueMerge, loaded_rows: int, loaded_bytes: int) -> bool:
        row_bytes = loaded_bytes // max(loaded_rows, 1) + _ROW_BYTES_MORE[self.layout.variable.kind]
        rows_max = min(RANGE_ROWS_MAX, _RANGE_BYTES_MAX // row_bytes)
        # To count them takes time.
        return state.rows_at_most() > rows_max and state.rows() > rows_max

    def _read(self, file: SnapshotFile | ChangeFile, first: int, end: int) -> pa.Table:
        groups: Collection[int] | None = None if (first, end) == (0, self.key_groups) else range(first, end)
        if isinstance(file, ChangeFile):
            return read_changes(self.storage, file, self.layout, groups)
        if file.last_group < first or file.first_group >= end:
            return self.layout.changes.empty_table()
        rows = read_snapshot_rows(self.storage, file, self.layout, groups)
        return as_puts(rows, self.layout)


class ValueMerge:
    """Takes changes of values in the order in which they were made, and gives out the values that are left."""

    def __init__(self, layout: Layout, key_groups: int) -> None:
        self._state = VariableState(layout, key_groups, MemoryStore(VariableCodec(layout).shape(key_groups)))
        self.load = self._state.load
        self.rows = self.rows_at_most = self._state.rows
        self.drop_groups = self._state.drop_groups

    def scan(self) -> Iterator[pa.RecordBatch]:
        yield from self._state.scan(0)
        self._state.close()


class EntryMerge:
    """Takes changes of a list or map in the order in which they were made, and gives out the entries that are left.

    A store finds the entries of any key at any time, and keeps a dict for each key to do so. Compaction only wants to
    know what is left in the end, so columns are enough.
    """

    def __init__(self, layout: Layout, key_groups: int) -> None:
        self._layout = layout
        self._codec = VariableCodec(layout)
        self._shape = self._codec.shape(key_groups)
        #: Entries as changes that put them.
        self._merged = self._codec.encode_changes(layout.changes.empty_table())
        self._waiting: list[Changes] = []

    def load(self, changes: pa.Table) -> None:
        """Changes, ``layout.changes``, of an epoch after those before."""
        self._waiting.append(self._codec.encode_changes(changes))
        if sum(map(len, self._waiting)) > max(_WAITING_ROWS_MAX, len(self._merged) // 2):
            self._merge()

    def rows_at_most(self) -> int:
        return len(self._merged) + sum(map(len, self._waiting))

    def rows(self) -> int:
        self._merge()
        return len(self._merged)

    def drop_groups(self, groups: Collection[int]) -> None:
        self._merge()
        kept = ~self._shape.chosen(groups)
        self._merged = self._merged.take(kept[self._shape.groups_of(self._merged.hashes)])

    def scan(self) -> Iterator[pa.RecordBatch]:
        """What is left, ``layout.rows``, in bounded batches and no order."""
        self._merge()
        for part in self._merged.batches():
            yield self._codec.decode_rows(Rows(part.hashes, part.keys, part.subkeys, part.values))

    def _merge(self) -> None:
        if self._waiting:
            self._merged, self._waiting = _left([self._merged, *self._waiting], self._shape), []


def _left(parts: Sequence[Changes], shape: Shape) -> Changes:
    """The entries that are left after changes, one part after the other, as changes that put them."""
    changes = Changes.concat(parts)
    sizes = [len(part) for part in parts]
    table = RowTable(shape.key_width, 0)
    rows = table.add(changes.hashes, changes.keys)
    # Within a part, a CLEAR comes before all others of its key: it hides what is in earlier parts.
    starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    cleared = changes.ops == Op.CLEAR
    hidden_before = np.zeros(int(rows.max(initial=-1)) + 1, dtype=np.intp)
    np.maximum.at(hidden_before, rows[cleared], starts[cleared])
    puts = (changes.ops == Op.PUT) & (np.arange(len(changes)) >= hidden_before[rows])
    others = np.flatnonzero(~cleared)
    entries = Entries(rows[others].astype(np.intp), changes.subkeys[others], changes.values[others])
    left = newest(entries, puts[others], shape)
    of = left.index.astype(rows.dtype)
    ops = np.full(len(left), Op.PUT, dtype=np.int8)
    return Changes(table.hashes(of), ops, table.keys(of), left.subkeys, left.values)


def _files_of(files: StateFiles, stage: StageSpec, variable: str) -> tuple[list[SnapshotFile], list[ChangeFile], int]:
    snapshot = files.snapshot.files_of(stage.number, variable) if files.snapshot else []
    changes: list[ChangeFile] = []
    of_epoch: dict[Epoch, int] = defaultdict(int)
    for manifest in files.manifests:
        for file in manifest.files:
            if (file.stage, file.variable) == (stage.number, variable):
                changes.append(file)
                of_epoch[manifest.epoch] += file.rows
    return snapshot, changes, max(of_epoch.values(), default=0)


def _empty_folder(target_folder: str) -> Path:
    if "://" in target_folder:
        raise CheckpointError(f"State is exported to local folders only, and {target_folder} is none. Name one.")
    folder = Path(target_folder).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CheckpointError(f"The folder {folder} is not empty. Name an empty or new one.")
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _export_variable(target: Path, layout: Layout, parts: Iterator[pa.Table]) -> int:
    """A file that is there is whole: it gets its name last."""
    schema = pa.schema([field.with_nullable(True) for field in list(layout.rows)[1:]])
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    rows = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for part in parts:
                writer.write_table(pa.table(part.columns[1:], schema=schema))
                rows += part.num_rows
        temporary.replace(target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _unwritable(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot write {target}: {error.strerror or error}. Make sure that there is space and access, or name another "
        f"folder."
    )


def _stand_back() -> None:
    """Take what others leave of processors and disks."""
    os.nice(19)
    if ionice := shutil.which("ionice"):
        # Where the system has no such priorities, it says so, and that is all.
        subprocess.run([ionice, "-c", "idle", "-p", str(os.getpid())], stderr=subprocess.DEVNULL, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line of JSON about the snapshot, or says on standard error why there is none."""
    _stand_back()
    # Epochs need the other cores.
    pa.set_cpu_count(1)
    parser = argparse.ArgumentParser(prog="python -m anabranch.worker.compaction", description=compact.__doc__)
    parser.add_argument("location", help="the checkpoint")
    parser.add_argument("up_to", type=int, help="the epoch")
    parser.add_argument("--to", help="where the snapshot goes, if that is another place")
    parser.add_argument("--generation", type=int, help="of the driver that wants the snapshot; default: the newest")
    options = parser.parse_args(arguments)
    try:
        storage = Storage(options.location)
        generation = latest_generation(storage) if options.generation is None else Generation(options.generation)
        target = Storage(options.to) if options.to else None
        snapshot = compact(storage, Epoch(options.up_to), generation=generation, write_to=target)
    except AnabranchError as error:
        sys.stderr.write(f"There is no snapshot of epoch {options.up_to}: {error}\n")
        return 1
    result = {
        "epoch": snapshot.epoch,
        "files": len(snapshot.files),
        "rows": sum(file.rows for file in snapshot.files),
        "bytes": sum(file.bytes for file in snapshot.files),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
