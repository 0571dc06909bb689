"""Documents that say what the state is made of: manifests of epochs, snapshots, and the routes of the job.

Writing its manifest is what makes an epoch part of the state. A snapshot's document is written after its files, and
makes them a snapshot. A route is saved before the first epoch that uses it.

Manifests are named by epoch and generation. Should two drivers have written the same epoch, the newer one's counts: the
older one's was never committed by Spark, or both hold the effect of the same input on the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch, Generation, RouteVersion, Run, RunId
from anabranch.core.routes import Route
from anabranch.core.state_files import ChangeFile, SnapshotFile


@dataclass(frozen=True)
class Manifest:
    """What an epoch is made of: the changes that lead to its state from that of the epoch before."""

    epoch: Epoch
    generation: Generation
    #: Which run of the generation the epoch came from.
    run: Run
    route_version: RouteVersion
    files: tuple[ChangeFile, ...]
    #: In milliseconds since 1970, by the name of the stage.
    watermarks: Mapping[str, int] = field(default_factory=dict)
    #: The snapshot that holds the state before this epoch; None: that is the manifests of all epochs before it.
    base: str | None = None
    format_version: int = documents.FORMAT_VERSION


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


def write_manifest(storage: Storage, manifest: Manifest) -> None:
    """Makes an epoch part of the state, durably and at once; FencedError if a newer driver has taken over."""
    check_generation(storage, manifest.generation)
    documents.write(storage, paths.manifest_file(manifest.epoch, manifest.generation), manifest)


def newest_writers(storage: Storage) -> dict[Epoch, Generation]:
    """Returns the epochs that have a manifest, in order, each with its newest writer. Goes by the names alone."""
    return dict(sorted(_entries(storage)))


def read_manifest(storage: Storage, epoch: Epoch) -> Manifest:
    """Reads the manifest of an epoch, as its newest writer left it."""
    return read_manifest_by(storage, epoch, newest_writers(storage).get(epoch))


def read_manifest_by(storage: Storage, epoch: Epoch, generation: Generation | None) -> Manifest:
    """Reads the manifest of an epoch, as this generation left it; None: the epoch has no manifest."""
    if generation is None:
        raise CheckpointError(
            f"The manifest of epoch {epoch} is missing in {storage.full_path(paths.MANIFESTS)}. Restore it from a copy "
            f"of the checkpoint, or use a new checkpoint."
        )
    path = paths.manifest_file(epoch, generation)
    manifest = documents.read(storage, path, Manifest)
    if (manifest.epoch, manifest.generation) != (epoch, generation):
        found = f"it is of epoch {manifest.epoch}, generation {manifest.generation}"
        raise documents.unexpected(storage, path, found)
    return manifest


def check_succession(storage: Storage, manifests: Sequence[Manifest]) -> None:
    """Raises CheckpointError unless these manifests, of epochs in order, can follow each other."""
    for manifest in manifests:
        if manifest.base is not None:
            path = paths.manifest_file(manifest.epoch, manifest.generation)
            raise CheckpointError(
                f"{storage.full_path(path)} starts from the snapshot {manifest.base}, which this Anabranch does not "
                f"read. Upgrade Anabranch here, or use a new checkpoint."
            )
    for earlier, later in pairwise(manifests):
        if later.generation < earlier.generation:
            raise CheckpointError(
                f"Two drivers wrote the checkpoint {storage.location} at the same time: epoch {earlier.epoch} is by "
                f"generation {earlier.generation}, epoch {later.epoch} by the older {later.generation}. Restore the "
                f"checkpoint from a copy, or use a new one, and run one query per checkpoint."
            )


def remove_after(storage: Storage, epoch: Epoch) -> list[Epoch]:
    """Removes the manifests of all later epochs, the newest first, and returns these epochs: they were rolled back.

    Their snapshots, should there be any, go before them. Change files stay; they are named by generation, and nothing
    refers to them any more.
    """
    for name in reversed(storage.list_names(paths.SNAPSHOTS)):
        snapshot = paths.snapshot_epoch_of(name)
        if snapshot is not None and snapshot > epoch:
            storage.delete(paths.snapshot_document(snapshot))
    removed = sorted((entry for entry in _entries(storage) if entry[0] > epoch), reverse=True)
    for later, generation in removed:
        storage.delete(paths.manifest_file(later, generation))
    return sorted({later for later, _ in removed})


def _entries(storage: Storage) -> list[tuple[Epoch, Generation]]:
    entries = (paths.manifest_of(name) for name in storage.list_names(paths.MANIFESTS))
    return [entry for entry in entries if entry is not None]


def snapshot_epochs(storage: Storage) -> list[Epoch]:
    """Returns the epochs that have a snapshot, in order. Goes by the names alone."""
    epochs = (paths.snapshot_epoch_of(name) for name in storage.list_names(paths.SNAPSHOTS))
    return sorted(epoch for epoch in epochs if epoch is not None)


def read_snapshot(storage: Storage, epoch: Epoch) -> Snapshot:
    """Reads the document of a snapshot; its files are not looked at."""
    path = paths.snapshot_document(epoch)
    snapshot = documents.read(storage, path, Snapshot)
    if snapshot.epoch != epoch:
        raise documents.unexpected(storage, path, f"it is of epoch {snapshot.epoch}")
    return snapshot


def write_snapshot(storage: Storage, snapshot: Snapshot) -> None:
    """Makes a snapshot of the files that were written for it, in place of an earlier one of the same epoch."""
    documents.write(storage, paths.snapshot_document(snapshot.epoch), snapshot)


def save_route(storage: Storage, route: Route, *, generation: Generation) -> None:
    """Saves a route under its version, in place of one of an epoch that was rolled back.

    FencedError if a newer driver than ``generation`` has taken over.
    """
    check_generation(storage, generation)
    storage.write(paths.route_file(route.version), documents.encode({"route": route.to_json()}))


def newest_route(storage: Storage) -> Route | None:
    """Returns the route with the largest version; None if none was ever saved."""
    versions = [paths.route_version_of(name) for name in storage.list_names(paths.ROUTES)]
    newest = max((version for version in versions if version is not None), default=None)
    return None if newest is None else load_route(storage, newest)


def load_route(storage: Storage, version: RouteVersion) -> Route:
    """Reads the route of this version, as a manifest names it."""
    path = paths.route_file(version)
    content = documents.decode(storage, path, storage.read(path))
    try:
        route = Route.from_json(content["route"])
    except (KeyError, CheckpointError) as error:
        raise documents.unexpected(storage, path, repr(error)) from error
    if route.version != version:
        raise documents.unexpected(storage, path, f"it is route {route.version}")
    return route
