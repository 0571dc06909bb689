"""Manifests: what each epoch is made of. Writing its manifest is what makes an epoch part of the state.

Manifests are named by epoch and generation. Should two drivers have written the same epoch, the newer one's counts: the
older one's was never committed by Spark, or both hold the effect of the same input on the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch, Generation, RouteVersion, Run
from anabranch.core.state_files import ChangeFile


@dataclass(frozen=True)
class Manifest:
    """An epoch: the changes that lead to its state from that of the epoch before."""

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

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "generation": self.generation,
            "run": self.run,
            "route_version": self.route_version,
            "watermarks": dict(self.watermarks),
            "base": self.base,
            "files": [asdict(file) for file in self.files],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Manifest:
        return Manifest(
            format_version=content["format_version"],
            epoch=Epoch(content["epoch"]),
            generation=Generation(content["generation"]),
            run=Run(content["run"]),
            route_version=RouteVersion(content["route_version"]),
            watermarks=dict(content["watermarks"]),
            base=content["base"],
            files=tuple(ChangeFile(**file) for file in content["files"]),
        )


def write_manifest(storage: Storage, manifest: Manifest) -> None:
    """Makes an epoch part of the state, durably and at once; FencedError if a newer driver has taken over."""
    check_generation(storage, manifest.generation)
    path = paths.manifest_file(manifest.epoch, manifest.generation)
    storage.write(path, documents.encode(manifest.to_json(), format_version=manifest.format_version))


def manifest_epochs(storage: Storage) -> list[Epoch]:
    """The epochs that have a manifest, in order."""
    return sorted(newest_writers(storage))


def newest_writers(storage: Storage) -> dict[Epoch, Generation]:
    """For each epoch that has a manifest, the newest generation that wrote it. Goes by the names alone."""
    return dict(sorted(_entries(storage)))


def read_manifest(storage: Storage, epoch: Epoch) -> Manifest:
    """The manifest of an epoch, as its newest writer left it."""
    return read_manifest_by(storage, epoch, newest_writers(storage).get(epoch))


def read_manifest_by(storage: Storage, epoch: Epoch, generation: Generation | None) -> Manifest:
    """The manifest of an epoch, as this generation left it; None stands for one that nobody wrote."""
    if generation is None:
        raise CheckpointError(
            f"The manifest of epoch {epoch} is missing in {storage.full_path(paths.MANIFESTS)}. Restore it from a copy "
            f"of the checkpoint, or use a new checkpoint."
        )
    path = paths.manifest_file(epoch, generation)
    content = documents.decode(storage, path, storage.read(path))
    try:
        manifest = Manifest.from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise documents.unexpected(storage, path, repr(error)) from error
    if (manifest.epoch, manifest.generation) != (epoch, generation):
        found = f"it is of epoch {manifest.epoch}, generation {manifest.generation}"
        raise documents.unexpected(storage, path, found)
    return manifest


def chain(storage: Storage, up_to: Epoch) -> list[Manifest]:
    """The manifests of all epochs from 0 to ``up_to``, in order: applied one after the other, they give its state."""
    writers = newest_writers(storage)
    manifests = [read_manifest_by(storage, Epoch(epoch), writers.get(Epoch(epoch))) for epoch in range(up_to + 1)]
    check_succession(storage, manifests)
    return manifests


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
    """Removes the manifests of all later epochs, the newest first, and says which: they were rolled back.

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
