"""Which files hold the state as of an epoch: the newest snapshot not after it, and the manifests that follow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from anabranch.checkpoint import paths
from anabranch.checkpoint.job import deleted_variables
from anabranch.checkpoint.manifests import (
    Manifest,
    Snapshot,
    check_succession,
    newest_writers,
    read_manifest_by,
    read_snapshot,
    snapshot_epochs,
)
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch, Generation, RunId
from anabranch.core.state_files import ChangeFile, SnapshotFile

_Document = TypeVar("_Document")
_FilesDocument = TypeVar("_FilesDocument", Manifest, Snapshot)


@dataclass(frozen=True)
class StateFiles:
    """The state as of the end of an epoch: the rows of the snapshot, then the changes of each manifest in order."""

    epoch: Epoch
    #: None: the state before the first manifest is empty.
    snapshot: Snapshot | None
    manifests: tuple[Manifest, ...]

    @property
    def committed_by(self) -> RunId | None:
        """The run that the epoch came from; None for the state before the first epoch."""
        if self.manifests:
            return RunId(self.manifests[-1].generation, self.manifests[-1].run)
        return self.snapshot.committed_by if self.snapshot else None

    @property
    def snapshot_files(self) -> list[SnapshotFile]:
        return list(self.snapshot.files) if self.snapshot else []

    @property
    def change_files(self) -> list[ChangeFile]:
        """In the order in which they apply."""
        return [file for manifest in self.manifests for file in manifest.files]

    @property
    def data_files(self) -> list[SnapshotFile | ChangeFile]:
        return [*self.snapshot_files, *self.change_files]


def state_files(storage: Storage, up_to: Epoch) -> StateFiles:
    """Returns the files that hold the state as of ``up_to``.

    A document that is missing or damaged is an error that names it, and the newest older epoch that is whole: what to
    do about it is for people to decide.
    """
    found = Documents(storage)
    try:
        files = found.state_files(up_to)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_ways_out(found, up_to)}") from error
    return _without_deleted(files, deleted_variables(storage))


def _without_deleted(files: StateFiles, deleted: Mapping[tuple[int, str], Generation]) -> StateFiles:
    """Leaves out the files of state variables that were deleted, up to the epoch, after the files were written."""
    by = files.committed_by
    gone = {variable: since for variable, since in deleted.items() if by is not None and by.generation >= since}
    if not gone:
        return files

    def kept(document: _FilesDocument, written_by: Generation) -> _FilesDocument:
        rest = [file for file in document.files if written_by >= gone.get((file.stage, file.variable), written_by)]
        return replace(document, files=tuple(rest))

    snapshot = files.snapshot and kept(files.snapshot, files.snapshot.committed_by.generation)
    return replace(files, snapshot=snapshot, manifests=tuple(kept(each, each.generation) for each in files.manifests))


class Documents:
    """The manifests and snapshots of a checkpoint as of one moment, each read when it is first asked for, and once."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        #: The newest generation that wrote the manifest of an epoch.
        self.writers: Mapping[Epoch, Generation] = newest_writers(storage)
        #: Of all snapshots, those of epochs that were rolled back included.
        self.all_snapshots = snapshot_epochs(storage)
        self._manifests: dict[Epoch, Manifest | CheckpointError] = {}
        self._snapshots: dict[Epoch, Snapshot | CheckpointError] = {}

    @cached_property
    def epochs(self) -> list[Epoch]:
        """The epochs that have a manifest or a snapshot that counts, in order."""
        return sorted({*self.writers, *self.snapshots})

    @cached_property
    def snapshots(self) -> list[Epoch]:
        """The epochs with a snapshot that counts, intact or not, in order."""
        return [epoch for epoch in self.all_snapshots if not self.is_rolled_back(epoch)]

    @cached_property
    def oldest_complete(self) -> Epoch:
        """The oldest epoch that lacks no document; NO_EPOCH if there is none. Goes by names alone."""
        return next((epoch for epoch in self.epochs if self.gap_before(epoch) is None), NO_EPOCH)

    def is_rolled_back(self, epoch: Epoch) -> bool:
        """Whether the snapshot of an epoch is of another run than its manifest: that run was rolled back."""
        if epoch not in self.writers:
            return False
        try:
            manifest = self.manifest(epoch)
            return self.snapshot(epoch).committed_by != (manifest.generation, manifest.run)
        except CheckpointError:
            # Which of the two is right is not known; the reader that needs the snapshot gets the error.
            return False

    def manifest(self, epoch: Epoch) -> Manifest:
        if epoch not in self._manifests:
            try:
                self._manifests[epoch] = read_manifest_by(self.storage, epoch, self.writers.get(epoch))
            except CheckpointError as error:
                self._manifests[epoch] = error
        return _value(self._manifests[epoch])

    def snapshot(self, epoch: Epoch) -> Snapshot:
        if epoch not in self._snapshots:
            try:
                self._snapshots[epoch] = read_snapshot(self.storage, epoch)
            except CheckpointError as error:
                self._snapshots[epoch] = error
        return _value(self._snapshots[epoch])

    def base_of(self, epoch: Epoch) -> Epoch:
        """The epoch of the snapshot that the state of this one starts from; NO_EPOCH: it starts from nothing."""
        place = bisect_right(self.snapshots, epoch)
        return self.snapshots[place - 1] if place else NO_EPOCH

    def gap_before(self, epoch: Epoch) -> Epoch | None:
        """The first epoch whose manifest is needed for the state of this one and is missing. Goes by names alone."""
        needed = (Epoch(each) for each in range(self.base_of(epoch) + 1, epoch + 1))
        return next((each for each in needed if each not in self.writers), None)

    def state_files(self, up_to: Epoch) -> StateFiles:
        """Returns the files as state_files does, whatever was deleted."""
        return self.state_files_from(self.base_of(up_to), up_to)

    def state_files_from(self, base: Epoch, up_to: Epoch) -> StateFiles:
        """Returns the same from this snapshot rather than the newest."""
        snapshot = None if base == NO_EPOCH else self.snapshot(base)
        if base in self.writers:
            self.manifest(base)  # has to be intact: it tells whether the snapshot was rolled back
        manifests = tuple(self.manifest(Epoch(epoch)) for epoch in range(base + 1, up_to + 1))
        check_succession(self.storage, manifests)
        if snapshot and manifests and manifests[0].generation < snapshot.generation:
            raise CheckpointError(
                f"Two drivers wrote the checkpoint {self.storage.location} at the same time: the snapshot of epoch "
                f"{base} is by generation {snapshot.generation}, epoch {base + 1} by the older "
                f"{manifests[0].generation}. Restore the checkpoint from a copy, or use a new one, and run one query "
                f"per checkpoint."
            )
        return StateFiles(up_to, snapshot, manifests)


def _value(found: _Document | CheckpointError) -> _Document:
    if isinstance(found, CheckpointError):
        raise CheckpointError(str(found)) from found
    return found


def _ways_out(found: Documents, up_to: Epoch) -> str:
    """Returns what else an error can say about a checkpoint that lacks the state of an epoch."""
    said = ""
    base = found.base_of(up_to)
    if base != NO_EPOCH:
        try:
            found.state_files_from(found.base_of(Epoch(base - 1)), up_to)
        except CheckpointError:
            pass
        else:
            document = found.storage.full_path(paths.snapshot_document(base))
            said += (
                f" The state of epoch {up_to} is also in the files before that snapshot: delete {document} to use them."
            )
    whole = newest_whole_epoch(found, up_to)
    if whole is not None:
        said += (
            f" The newest older epoch that is whole is {whole}: `anabranch checkpoint rewind {found.storage.location} "
            f"{whole}` returns to it, and the query repeats the epochs after it."
        )
    return said


def newest_whole_epoch(found: Documents, before: Epoch) -> Epoch | None:
    """Returns the newest epoch before this one whose documents are intact and whose files are there in their size.

    The content of the files is not read: that is what verifying a checkpoint is for.
    """
    sizes: dict[str, int] = {}
    for folder in (paths.CHANGES, paths.SNAPSHOTS):
        sizes.update((path, size) for path, size, _ in found.storage.walk(folder))
    for epoch in reversed(found.epochs):
        if epoch < before:
            try:
                files = found.state_files(epoch).data_files
            except CheckpointError:
                continue
            if all(sizes.get(file.path) == file.bytes for file in files):
                return epoch
    return None
