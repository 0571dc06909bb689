"""Verifies and describes a checkpoint: what is missing or damaged, which epochs can be restored, what takes space."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.checkpoint import paths
from anabranch.checkpoint.documents import checksum_of
from anabranch.checkpoint.evolution import to_layout
from anabranch.checkpoint.job import JobDescription, read_job
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import Documents
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch, Generation, JobId, RouteVersion, Run
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import GROUP, HASH, Layout, Op
from anabranch.core.state_files import ChangeFile, SnapshotFile

DataFile = ChangeFile | SnapshotFile


@dataclass(frozen=True)
class Problem:
    """Something that is missing, damaged, or not what it claims to be."""

    #: Of the file, or of the folder that lacks it; relative to the checkpoint.
    path: str
    reason: str
    #: The epochs that cannot be restored because of it.
    epochs: tuple[Epoch, ...]


@dataclass(frozen=True)
class Report:
    """The outcome of a verification."""

    #: Those that were checked.
    epochs: tuple[Epoch, ...]
    #: Epochs that a clean-up had begun to delete: the next one deletes the rest.
    leftovers: tuple[Epoch, ...]
    files: int
    bytes: int
    problems: tuple[Problem, ...]
    #: The newest epoch that no problem concerns.
    newest_whole: Epoch | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class VariableSize:
    """The files of a state variable in one epoch or snapshot."""

    stage: int
    variable: str
    files: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class EpochDescription:
    """What a manifest says; rows are changes."""

    epoch: Epoch
    generation: Generation
    run: Run
    route_version: RouteVersion
    variables: tuple[VariableSize, ...]


@dataclass(frozen=True)
class SnapshotDescription:
    """What the document of a snapshot says; rows are all that there were."""

    epoch: Epoch
    generation: Generation
    run: Run
    created_s: float
    variables: tuple[VariableSize, ...]


@dataclass(frozen=True)
class Description:
    """The contents of a checkpoint, for people."""

    job_id: JobId
    key_groups: int
    #: The last epoch that Spark committed.
    committed: Epoch
    epochs: tuple[EpochDescription, ...]
    snapshots: tuple[SnapshotDescription, ...]
    #: Bytes by folder: changes, snapshots, manifests, and so on.
    sizes: Mapping[str, int]
    #: Documents that cannot be read, as sentences.
    damaged: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(storage: Storage) -> Report:
    """Reads every document, and every file that one of them names, and compares each with what is said about it."""
    found = Documents(storage)
    leftovers = tuple(epoch for epoch in found.epochs if epoch < found.oldest_complete)
    epochs = found.epochs[len(leftovers) :]
    problems = _committed_problems(storage, epochs)
    job: JobDescription | None = None
    try:
        job = read_job(storage)
    except CheckpointError as error:
        problems.append(Problem(paths.JOB, str(error), tuple(epochs)))
    segments = _segments(found, epochs)
    for base, segment in segments.items():
        problems += _document_problems(found, base, segment)
    users = _users(found, segments)
    for file, unusable in users.values():
        if reason := _file_problem(storage, file, job):
            problems.append(Problem(file.path, reason, unusable))
    broken = {epoch for problem in problems for epoch in problem.epochs}
    return Report(
        epochs=tuple(epochs),
        leftovers=leftovers,
        files=len(users),
        bytes=sum(file.bytes for file, _ in users.values()),
        problems=tuple(problems),
        newest_whole=max((epoch for epoch in epochs if epoch not in broken), default=None),
    )


def describe(storage: Storage) -> Description:
    """Describes a checkpoint by its documents; data is not read."""
    job, found = read_job(storage), Documents(storage)
    epochs, snapshots, damaged = [], [], []
    for epoch in sorted(found.writers):
        try:
            manifest = found.manifest(epoch)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        by = manifest.generation, manifest.run, manifest.route_version
        epochs.append(EpochDescription(epoch, *by, variables=_sizes_of(manifest.files)))
    for epoch in found.snapshots:
        try:
            of = found.snapshot(epoch)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        snapshots.append(SnapshotDescription(epoch, of.generation, of.run, of.created_s, _sizes_of(of.files)))
    sizes: dict[str, int] = defaultdict(int)
    for path, size, _ in storage.walk(paths.ROOT):
        sizes[path.split("/")[1]] += size
    return Description(
        job_id=job.job_id,
        key_groups=job.key_groups,
        committed=last_committed_epoch(storage),
        epochs=tuple(epochs),
        snapshots=tuple(snapshots),
        sizes=dict(sorted(sizes.items())),
        damaged=tuple(damaged),
    )


# --------------------------------------------------------------------------------------------------- documents


def _committed_problems(storage: Storage, epochs: Sequence[Epoch]) -> list[Problem]:
    committed = last_committed_epoch(storage)
    if committed == NO_EPOCH or committed in epochs:
        return []
    reason = f"Spark committed epoch {committed}, which has neither a manifest nor a snapshot"
    return [Problem(paths.MANIFESTS, reason, (committed,))]


def _segments(found: Documents, epochs: Sequence[Epoch]) -> dict[Epoch, list[Epoch]]:
    """Groups the epochs by the snapshot that their state starts from."""
    segments: dict[Epoch, list[Epoch]] = defaultdict(list)
    for epoch in epochs:
        segments[found.base_of(epoch)].append(epoch)
    return segments


def _document_problems(found: Documents, base: Epoch, segment: Sequence[Epoch]) -> Iterator[Problem]:
    """Yields problems of the documents that these epochs need, which all start from the same snapshot."""
    intact = True
    if base != NO_EPOCH:
        try:
            found.snapshot(base)
        except CheckpointError as error:
            intact = False
            yield Problem(paths.snapshot_document(base), str(error), tuple(segment))
    # The manifest of the snapshot's own epoch is not needed, but if it is there it has to be intact.
    first = base if base in found.writers else base + 1
    for epoch in range(first, segment[-1] + 1):
        generation = found.writers.get(Epoch(epoch))
        try:
            found.manifest(Epoch(epoch))
        except CheckpointError as error:
            intact = False
            path = paths.MANIFESTS if generation is None else paths.manifest_file(Epoch(epoch), generation)
            yield Problem(path, str(error), _from(segment, epoch))
    if intact:
        try:
            found.state_files(segment[-1])
        except CheckpointError as error:
            yield Problem(paths.MANIFESTS, str(error), tuple(segment))


def _users(
    found: Documents, segments: Mapping[Epoch, Sequence[Epoch]]
) -> dict[str, tuple[DataFile, tuple[Epoch, ...]]]:
    """Returns every file that an intact document names, by its path, and the epochs that need it."""
    users: dict[str, tuple[DataFile, tuple[Epoch, ...]]] = {}
    for base, segment in segments.items():
        for epoch in range(max(base, 0), segment[-1] + 1):
            needed_by = _from(segment, epoch) if epoch > base else ()
            for file in _named_files(found, Epoch(epoch), is_base=False):
                users[file.path] = file, needed_by
        if base != NO_EPOCH:
            for file in _named_files(found, base, is_base=True):
                users[file.path] = file, tuple(segment)
    return users


def _named_files(found: Documents, epoch: Epoch, *, is_base: bool) -> Sequence[DataFile]:
    try:
        return found.snapshot(epoch).files if is_base else found.manifest(epoch).files
    except CheckpointError:
        return ()  # it has been reported already


def _from(segment: Sequence[Epoch], first: int) -> tuple[Epoch, ...]:
    return tuple(segment[bisect_left(segment, first) :])


def _sizes_of(files: Iterable[DataFile]) -> tuple[VariableSize, ...]:
    grouped: dict[tuple[int, str], list[DataFile]] = defaultdict(list)
    for file in files:
        grouped[file.stage, file.variable].append(file)
    return tuple(
        VariableSize(stage, variable, len(of), sum(file.rows for file in of), sum(file.bytes for file in of))
        for (stage, variable), of in sorted(grouped.items())
    )


# -------------------------------------------------------------------------------------------------------- data


def _file_problem(storage: Storage, file: DataFile, job: JobDescription | None) -> str | None:
    """Returns what is wrong with a file, if anything is."""
    try:
        with storage.open(file.path) as source:
            content = source.read_buffer()
        if content.size != file.bytes:
            return f"it has {content.size} bytes instead of {file.bytes}"
        if checksum_of(content) != file.checksum:
            return "its checksum is not the one in the document that names it"
        return _content_problem(storage, content, file, job)
    except (CheckpointError, pa.ArrowException, OSError) as error:
        return str(error)


def _content_problem(storage: Storage, content: pa.Buffer, file: DataFile, job: JobDescription | None) -> str | None:
    """Returns what is wrong with a file's content. Reads a row group at a time: a file may be large."""
    parquet = pq.ParquetFile(pa.BufferReader(content))
    if parquet.schema_arrow.names[:2] != [GROUP, HASH]:
        return f"it has the columns {parquet.schema_arrow.names}, and not {GROUP} and {HASH} first"
    if parquet.metadata.num_rows != file.rows:
        return f"it has {parquet.metadata.num_rows} rows instead of {file.rows}"
    layout = _layout_of(file, job)
    previous: tuple[int, int] | None = None
    for index in range(parquet.num_row_groups):
        table = parquet.read_row_group(index)
        if layout is not None:
            target = layout.rows if isinstance(file, SnapshotFile) else layout.changes
            fixed = len(target) - len(layout.value)
            path = storage.full_path(file.path)
            to_layout(table.remove_column(0), target, path, fixed_columns=fixed, dropped=layout.dropped)
        if not table.num_rows:
            continue
        reason = _rows_problem(table, file, job, previous)
        if reason is not None:
            return reason
        previous = table.column(0)[-1].as_py(), table.column(1)[-1].as_py()
    return None


def _layout_of(file: DataFile, job: JobDescription | None) -> Layout | None:
    """Returns the layout of a file's rows; None if the job no longer has the variable, or is unknown."""
    stages = {stage.number: stage for stage in job.stages} if job else {}
    stage = stages.get(file.stage)
    return None if stage is None else stage.layouts.get(file.variable)


def _rows_problem(
    table: pa.Table, file: DataFile, job: JobDescription | None, previous: tuple[int, int] | None
) -> str | None:
    """Returns what is wrong with the rows of a row group that follows a row of this group and hash."""
    if table.column(0).null_count or table.column(1).null_count:
        return "there are rows without key group or hash"
    groups, hashes = table.column(0).to_numpy(), table.column(1).to_numpy()
    if job is not None and not np.array_equal(groups, key_groups_of(hashes, job.key_groups)):
        return "there are rows in another key group than that of their hash"
    before = np.concatenate([groups[:1] if previous is None else [previous[0]], groups[:-1]])
    if np.any(groups < before):
        return "its rows are not sorted by key group"
    if isinstance(file, ChangeFile):
        known = np.isin(table.column(2).to_numpy(), (Op.PUT, Op.DELETE, Op.CLEAR))
        return None if known.all() else "there are changes of an unknown kind"
    if groups[0] < file.first_group or groups[-1] > file.last_group:
        return f"it has key groups outside of {file.first_group} to {file.last_group}"
    hash_before = np.concatenate([hashes[:1] if previous is None else [previous[1]], hashes[:-1]])
    return "its rows are not sorted by hash" if np.any((groups == before) & (hashes < hash_before)) else None
