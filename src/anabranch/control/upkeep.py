"""Upkeep of a checkpoint while its job runs: snapshots and clean-up, in the background and out of the epochs' way."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from anabranch.checkpoint.cleanup import clean_up
from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.statefiles import StateFiles
from anabranch.control.claims import Claimed
from anabranch.control.nursery import NURSERY, Child
from anabranch.core.errors import AnabranchError, CheckpointError
from anabranch.core.ids import Epoch
from anabranch.core.settings import Settings

logger = logging.getLogger(__name__)

#: Fewer changes than this are read in about a second, and to make a snapshot of them takes longer each time: it is
#: not worth while, however little there is in the end.
_CHANGES_MIN = 1_000_000
#: A snapshot is due when the changes since the last one are so many times as many as its rows.
_CHANGES_PER_ROW = 2.0
#: Files that nothing refers to may belong to a write that is under way, for so long.
_ORPHAN_AGE_S = 3600.0
#: How long the start of a process may take, that of the one included which it is forked from.
_START_TIMEOUT_S = 60.0
#: After a failure nothing is tried for so long.
_PAUSE_S = 60.0


class Upkeep:
    """Decides after every epoch what is due. One thing runs at a time."""

    def __init__(
        self,
        claimed: Claimed,
        settings: Settings,
        files: StateFiles,
        in_use: Callable[[], Sequence[StateFiles]],
    ) -> None:
        self._claimed = claimed
        self._settings = settings
        self._in_use = in_use
        self._rows = sum(file.rows for file in files.snapshot_files)
        self._changes = sum(file.rows for file in files.change_files)
        self._epochs = len(files.manifests)
        self._thread: threading.Thread | None = None
        self._process: Child | None = None
        #: Held while files are deleted, or must not be.
        self._cleaning = threading.Lock()
        self._closed = False
        self._not_before = 0.0
        #: How many snapshots were made, for status reports, and of which epoch the last one is.
        self.snapshots = 0
        self.last_snapshot: Epoch | None = files.snapshot.epoch if files.snapshot is not None else None

    def use(self, claimed: Claimed) -> None:
        """The driver has claimed another generation."""
        self._claimed = claimed

    def after_epoch(self, committed: Epoch, changed_rows: int) -> None:
        """``committed`` is an epoch that Spark has committed: the one before the epoch that has just ended."""
        self._changes += changed_rows
        self._epochs += 1
        if committed < 0 or not self._is_due() or self._is_busy():
            return
        self._thread = threading.Thread(target=self._run, args=(committed,), name="anabranch-upkeep", daemon=True)
        self._thread.start()

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
        return (self._thread is not None and self._thread.is_alive()) or time.monotonic() < self._not_before

    def _run(self, epoch: Epoch) -> None:
        changes, epochs = self._changes, self._epochs
        try:
            self._rows = compact_in_process(self._claimed, epoch, on_start=self._note_process)
            self._changes -= changes
            self._epochs -= epochs
            self.snapshots += 1
            self.last_snapshot = epoch
            self._clean_up(epoch)
        except AnabranchError as error:
            if not self._closed:
                logger.warning("the upkeep of the checkpoint failed, and is tried again later: %s", error)
            self._not_before = time.monotonic() + _PAUSE_S
        finally:
            self._process = None

    def _clean_up(self, committed: Epoch) -> None:
        with self._cleaning:
            check_generation(self._claimed.storage, self._claimed.generation)
            clean_up(
                self._claimed.storage,
                committed=committed,
                keep_epochs=self._settings.keep_epochs,
                keep_seconds=self._settings.keep_s,
                now=time.time(),
                min_age_s=_ORPHAN_AGE_S,
                in_use=self._in_use(),
            )

    def _note_process(self, process: Child) -> None:
        self._process = process
        if self._closed:
            process.kill()


def compact_in_process(
    claimed: Claimed,
    epoch: Epoch,
    *,
    target: str = "",
    on_start: Callable[[Child], None] = lambda _: None,
) -> int:
    """Let a process of low priority write the snapshot of an epoch, here or elsewhere; the rows that it has."""
    arguments = [claimed.storage.location, str(epoch), "--generation", str(claimed.generation)]
    if target:
        arguments += ["--to", target]
    process = NURSERY.start({"compaction": arguments}, _START_TIMEOUT_S)
    try:
        on_start(process)
        rows: int = process.first_line(None)["rows"]
    except ValueError:
        raise CheckpointError(
            f"The snapshot of epoch {epoch} could not be written: {process.end_of_log().splitlines()[-1]}"
        ) from None
    finally:
        process.bury()
    return rows
