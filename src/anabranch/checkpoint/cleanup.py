"""Clean-up: deletes what no retained epoch needs, and nothing else.

Documents go before the data that they name, so that whatever a crash in the middle leaves is either whole or lacks a
document, and never looks whole when it is not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from anabranch.checkpoint import paths
from anabranch.checkpoint.manifests import Manifest
from anabranch.checkpoint.statefiles import Documents, StateFiles
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch, Generation
from anabranch.core.state_files import ChangeFile, SnapshotFile

logger = logging.getLogger(__name__)

_DATA_FILE = re.compile(rf"(?:{paths.CHANGES}|{paths.SNAPSHOTS})/[^/]+/[^/]+/epoch=\d{{12}}/[^/]+\.parquet")
#: What an interrupted write leaves behind.
_TEMPORARY_FILE = re.compile(r"(?:.*/)?\.[^/]+\.tmp")


@dataclass(frozen=True)
class Policy:
    """Which epochs can be restored after a clean-up, beside the newest committed one and those after it."""

    #: How many of the newest are kept.
    keep_epochs: int
    #: Epochs whose manifest is younger are kept, too.
    keep_seconds: float
    #: Data without a document may belong to a write that is under way; it goes when it is older than that.
    min_age_s: float
    #: Change files of epochs after the committed one, by this generation or a later one, stay however old they seem:
    #: their manifest may be about to be written, and clocks may be wrong. None: no driver runs.
    writing: Generation | None = None
    committed: Epoch = NO_EPOCH

    def is_being_written(self, path: str) -> bool:
        """Tells whether a change file may be part of an epoch whose manifest is yet to come."""
        of = paths.change_file_of(path)
        return self.writing is not None and of is not None and of[0] > self.committed and of[1] >= self.writing


@dataclass(frozen=True)
class Kept:
    """Documents that stay, and all that they name."""

    states: tuple[StateFiles, ...]
    #: Of retained epochs, also where a snapshot says it all.
    manifests: tuple[Manifest, ...]

    @cached_property
    def manifest_entries(self) -> frozenset[tuple[Epoch, Generation]]:
        manifests = [*self.manifests, *(manifest for state in self.states for manifest in state.manifests)]
        return frozenset((manifest.epoch, manifest.generation) for manifest in manifests)

    @cached_property
    def snapshots(self) -> frozenset[Epoch]:
        return frozenset(state.snapshot.epoch for state in self.states if state.snapshot)

    @cached_property
    def data(self) -> frozenset[str]:
        files: list[ChangeFile | SnapshotFile] = [file for state in self.states for file in state.data_files]
        files += [file for manifest in self.manifests for file in manifest.files]
        return frozenset(file.path for file in files)


@dataclass(frozen=True)
class Unneeded:
    """Paths to delete, in this order."""

    snapshots: tuple[str, ...]
    manifests: tuple[str, ...]
    data: tuple[str, ...]
    temporary: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.snapshots, *self.manifests, *self.data, *self.temporary)


@dataclass(frozen=True)
class CleanedUp:
    """What a clean-up did."""

    #: The epochs that can be restored afterwards, as far as they were meant to.
    retained: tuple[Epoch, ...]
    deleted: Unneeded
    bytes: int


def clean_up(
    storage: Storage,
    *,
    committed: Epoch,
    keep_epochs: int,
    keep_seconds: float,
    now: float,
    min_age_s: float,
    in_use: Sequence[StateFiles] = (),
    writing: Generation | None = None,
) -> CleanedUp:
    """Deletes what no retained epoch needs; ``committed`` is the last epoch that Spark committed.

    ``in_use`` is what is being read at the moment, as by workers that fetch key groups from the checkpoint
    bit by bit: those files stay, even if a newer snapshot holds the same state. ``min_age_s`` has to be longer than
    any compaction takes; ``writing`` is the generation of the driver that runs, if one does. If a retained epoch cannot
    be restored as it is, CheckpointError, and nothing is deleted.
    """
    policy = Policy(keep_epochs, keep_seconds, min_age_s, writing, committed)
    files = {path: (size, written_s) for path, size, written_s in storage.walk(paths.ROOT)}
    written = {path: written_s for path, (_, written_s) in files.items()}
    found = Documents(storage)
    retained = _restorable(
        found, committed, retained_epochs(found.epochs, _ages(found, written, now), committed, policy)
    )
    kept = Kept(
        (*(found.state_files(epoch) for epoch in retained), *in_use),
        tuple(found.manifest(epoch) for epoch in retained if epoch in found.writers),
    )
    rolled_back = frozenset(found.all_snapshots) - frozenset(found.snapshots)
    dropped = _named_by_dropped(found, kept, written)
    going = unneeded(written, kept, dropped=dropped, rolled_back=rolled_back, now=now, policy=policy)
    for path in going:
        storage.delete(path)
    freed = sum(files[path][0] for path in going)
    logger.info("clean-up after epoch %d: %d files, %d bytes deleted", committed, len(list(going)), freed)
    return CleanedUp(tuple(retained), going, freed)


def retained_epochs(
    epochs: Sequence[Epoch], ages_s: Mapping[Epoch, float], committed: Epoch, policy: Policy
) -> list[Epoch]:
    """Returns the epochs that are to be kept; ``ages_s`` are the ages of their manifests."""
    return [
        epoch
        for epoch in epochs
        if epoch >= committed
        or epoch > committed - policy.keep_epochs
        or ages_s.get(epoch, policy.keep_seconds) < policy.keep_seconds
    ]


def unneeded(
    written_s: Mapping[str, float],
    kept: Kept,
    *,
    dropped: Collection[str],
    rolled_back: Collection[Epoch],
    now: float,
    policy: Policy,
) -> Unneeded:
    """Returns what to delete of all files of a checkpoint, given by their time of writing.

    ``dropped`` is the data that documents name which are not kept: nothing needs it any more. ``rolled_back`` are the
    epochs whose snapshots do not count: they go first, as only the manifest of the epoch tells that they do not.
    """
    old = frozenset(path for path, at in written_s.items() if now - at > policy.min_age_s)
    snapshots, manifests, data, temporary = [], [], [], []
    # In the order of the names, a manifest that was superseded goes before the one that counts.
    for path in sorted(written_s):
        folder, _, name = path.rpartition("/")
        if folder == paths.SNAPSHOTS and (epoch := paths.snapshot_epoch_of(name)) is not None:
            if epoch not in kept.snapshots:
                snapshots.append((epoch not in rolled_back, path))
        elif folder == paths.MANIFESTS and (entry := paths.manifest_of(name)) is not None:
            if entry not in kept.manifest_entries:
                manifests.append(path)
        elif _DATA_FILE.fullmatch(path) and not name.startswith("."):
            is_old = path in old and not policy.is_being_written(path)
            if path not in kept.data and (path in dropped or is_old):
                data.append(path)
        elif _TEMPORARY_FILE.fullmatch(path) and path in old:
            temporary.append(path)
    return Unneeded(tuple(path for _, path in sorted(snapshots)), tuple(manifests), tuple(data), tuple(temporary))


def _restorable(found: Documents, committed: Epoch, epochs: Iterable[Epoch]) -> list[Epoch]:
    """Leaves out the epochs that an interrupted clean-up got at, which lie before the oldest complete one."""
    restorable = []
    for epoch in sorted({*epochs, committed} - {NO_EPOCH}):
        if epoch != committed and epoch < found.oldest_complete:
            continue
        try:
            found.state_files(epoch)
        except CheckpointError as error:
            raise CheckpointError(f"Nothing was cleaned up, because epoch {epoch} is to be kept: {error}") from error
        restorable.append(epoch)
    return restorable


def _ages(found: Documents, written_s: Mapping[str, float], now: float) -> dict[Epoch, float]:
    documents = {epoch: paths.manifest_file(epoch, generation) for epoch, generation in found.writers.items()}
    return {epoch: now - written_s[path] for epoch, path in documents.items() if path in written_s}


def _named_by_dropped(found: Documents, kept: Kept, written_s: Collection[str]) -> frozenset[str]:
    """Returns the data that is named by intact documents which go. That of damaged ones goes by age.

    A document that was written since the files were listed does not go, so neither does what it names.
    """
    names: set[str] = set()
    for epoch in found.all_snapshots:
        if epoch not in kept.snapshots and paths.snapshot_document(epoch) in written_s:
            names.update(_paths_of(found, epoch, of_snapshot=True))
    for epoch, generation in found.writers.items():
        if (epoch, generation) not in kept.manifest_entries and paths.manifest_file(epoch, generation) in written_s:
            names.update(_paths_of(found, epoch, of_snapshot=False))
    return frozenset(names)


def _paths_of(found: Documents, epoch: Epoch, *, of_snapshot: bool) -> list[str]:
    try:
        document = found.snapshot(epoch) if of_snapshot else found.manifest(epoch)
    except CheckpointError as error:
        logger.warning("a document that is no longer needed cannot be read: %s", error)
        return []
    return [file.path for file in document.files]
