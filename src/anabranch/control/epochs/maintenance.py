"""Upkeep of a checkpoint while its job runs: snapshots and clean-up, in the background and out of the epochs' way."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from anabranch.checkpoint.cleanup import clean_up
from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.statefiles import StateFiles
from anabranch.control.owned_checkpoint import OwnedCheckpoint
from anabranch.control.parts import PRODUCTION, DriverParts, Killable
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import Epoch
from anabranch.core.settings import Settings
from anabranch.runtime.scheduler import Thread

logger = logging.getLogger(__name__)

#: Fewer changes than this are read in about a second, and to make a snapshot of them takes longer each time: it is
#: not worth while, however little there is in the end.
_CHANGES_MIN = 1_000_000
#: A snapshot is due when the changes since the last one are so many times as many as its rows.
_CHANGES_PER_ROW = 2.0
#: Files that nothing refers to may belong to a write that is under way, for so long.
_ORPHAN_AGE_S = 3600.0
#: After a failure nothing is tried for so long.
_PAUSE_S = 60.0


class Maintenance:
    """Decides after every epoch what is due. One thing runs at a time."""

    def __init__(
        self,
        owned: OwnedCheckpoint,
        settings: Settings,
        files: StateFiles,
        in_use: Callable[[], Sequence[StateFiles]],
        parts: DriverParts = PRODUCTION,
    ) -> None:
        self._parts = parts
        self._owned = owned
        self._settings = settings
        self._in_use = in_use
        self._rows = sum(file.rows for file in files.snapshot_files)
        self._changes = sum(file.rows for file in files.change_files)
        self._epochs = len(files.manifests)
        self._thread: Thread | None = None
        self._process: Killable | None = None
        #: Held while files are deleted, or must not be.
        self._cleaning = parts.scheduler.lock()
        self._closed = False
        self._not_before = 0.0
        #: How many snapshots were made, for status reports, and of which epoch the last one is.
        self.snapshots = 0
        self.last_snapshot: Epoch | None = files.snapshot.epoch if files.snapshot is not None else None

    def use(self, owned: OwnedCheckpoint) -> None:
        """The driver has claimed another generation."""
        self._owned = owned

    def after_epoch(self, committed: Epoch, changed_rows: int) -> None:
        """``committed`` is an epoch that Spark has committed: the one before the epoch that has just ended."""
        self._changes += changed_rows
        self._epochs += 1
        if committed < 0 or not self._is_due() or self._is_busy():
            return
        self._thread = self._parts.scheduler.start(partial(self._run, committed), name="anabranch-maintenance")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Delete nothing meanwhile: somebody reads the files of an epoch."""
        with self._cleaning:
            yield

    def close(self) -> None:
        """Stop what runs. A snapshot that is not complete does not count, and its files go with the next clean-up."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join()

    def _is_due(self) -> bool:
        if self._epochs >= self._settings.snapshot_epochs:
            return True
        return self._changes >= max(_CHANGES_MIN, _CHANGES_PER_ROW * self._rows)

    def _is_busy(self) -> bool:
        return (
            self._thread is not None and self._thread.is_alive()
        ) or self._parts.scheduler.monotonic_s() < self._not_before

    def _run(self, epoch: Epoch) -> None:
        changes, epochs = self._changes, self._epochs
        try:
            self._rows = self._parts.compact(self._owned, epoch, on_start=self._note_process)
            self._changes -= changes
            self._epochs -= epochs
            self.snapshots += 1
            self.last_snapshot = epoch
            self._clean_up(epoch)
        except AnabranchError as error:
            if not self._closed:
                logger.warning("the maintenance of the checkpoint failed, and is tried again later: %s", error)
            self._not_before = self._parts.scheduler.monotonic_s() + _PAUSE_S
        finally:
            self._process = None

    def _clean_up(self, committed: Epoch) -> None:
        with self._cleaning:
            check_generation(self._owned.storage, self._owned.generation)
            clean_up(
                self._owned.storage,
                committed=committed,
                keep_epochs=self._settings.keep_epochs,
                keep_seconds=self._settings.keep_s,
                now=self._parts.scheduler.time_s(),
                min_age_s=_ORPHAN_AGE_S,
                in_use=self._in_use(),
                writing=self._owned.generation,
            )

    def _note_process(self, process: Killable) -> None:
        self._process = process
        if self._closed:
            process.kill()
