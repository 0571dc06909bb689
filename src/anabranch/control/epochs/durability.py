"""Which epochs are durable, and which are part of the state and not durable yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from anabranch.checkpoint.manifests import Manifest, snapshot_epochs, write_manifest
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.checkpoint.storage import Storage
from anabranch.control.owned_checkpoint import Committed, OwnedCheckpoint
from anabranch.core.ids import NO_EPOCH, Epoch, RouteVersion, Run, RunId
from anabranch.core.state_files import ChangeFile
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS

#: Epochs that may be not durable at a time: Spark forgets the offsets of epochs after a hundred.
_VOLATILE_EPOCHS_MAX = 50
#: More than there are between two snapshots, with the settings that most have.
_MANIFESTS_KEPT = 500


class Durability:
    """Writes manifests, of every epoch or of several at a time."""

    def __init__(self, newest: Committed, files: StateFiles, interval_s: float, scheduler: Scheduler = THREADS) -> None:
        self._scheduler = scheduler
        #: The newest epoch that is durable.
        self.newest = newest
        self._snapshot = files.snapshot
        #: The newest manifests, so that nobody has to read what was written here.
        self._manifests = deque(files.manifests, maxlen=_MANIFESTS_KEPT)
        self._interval_s = interval_s
        self._since_s = self._scheduler.monotonic_s()
        #: Whether somebody waits for epochs to become durable; and who is told when some have.
        self.is_wanted = False
        self._closed = False
        self._written = scheduler.condition()
        #: The runs of the epochs after it, which are part of the state all the same.
        self.volatile: dict[Epoch, Run] = {}

    @property
    def is_due(self) -> bool:
        """Whether the epoch that ends now has to be made durable."""
        waited_s = self._scheduler.monotonic_s() - self._since_s
        return self.is_wanted or waited_s >= self._interval_s or len(self.volatile) >= _VOLATILE_EPOCHS_MAX

    def wait_until_durable(self, epoch: Epoch, timeout_s: float) -> bool:
        """Waits until an epoch is durable, for so long at most; returns False if it is not. Epochs go on meanwhile."""
        with self._written:
            # Others may wait for a later one.
            self.is_wanted = self.is_wanted or self.newest.epoch < epoch
            self._written.wait_for(lambda: self._closed or self.newest.epoch >= epoch, timeout_s)
            return self.newest.epoch >= epoch

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._written:
            self._closed = True
            self._written.notify_all()

    def deferred(self) -> tuple[tuple[Epoch, Run], ...]:
        """The epochs that are part of the state and not durable, each with its run."""
        return tuple(sorted(self.volatile.items()))

    def files(self, storage: Storage) -> StateFiles:
        """Where the state as of the newest durable epoch is."""
        epoch = self.newest.epoch
        base = max((made for made in snapshot_epochs(storage) if made <= epoch), default=NO_EPOCH)
        first = base + 1
        later = tuple(manifest for manifest in self._manifests if first <= manifest.epoch <= epoch)
        if [manifest.epoch for manifest in later] == list(range(first, epoch + 1)) and self._can_start_from(base):
            return StateFiles(epoch, self._snapshot, later)
        files = state_files(storage, epoch)
        self._snapshot = files.snapshot
        return files

    def _can_start_from(self, base: Epoch) -> bool:
        """Whether the snapshot of that epoch is the one that is known here, and not of a run that was rolled back."""
        return base == (NO_EPOCH if self._snapshot is None else self._snapshot.epoch)

    def write(
        self,
        owned: OwnedCheckpoint,
        version: RouteVersion,
        files: Sequence[tuple[Epoch, ChangeFile]],
        runs: Mapping[Epoch, Run],
    ) -> None:
        """Write the manifests of epochs that are not durable yet, oldest first: so whatever is there is whole."""
        for epoch, run in sorted(runs.items()):
            manifest = Manifest(
                epoch=epoch,
                generation=owned.generation,
                run=run,
                route_version=version,
                files=tuple(file for of, file in files if of == epoch),
            )
            write_manifest(owned.storage, manifest)
            self.newest = Committed(epoch, RunId(owned.generation, run))
            self._manifests.append(manifest)
            self.volatile.pop(epoch, None)
        self._since_s = self._scheduler.monotonic_s()
        with self._written:
            self.is_wanted = False
            self._written.notify_all()
