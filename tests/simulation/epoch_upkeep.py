"""Upkeep of a simulated checkpoint: snapshots by a process of its own, then a clean-up. See control's upkeep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from epoch_checkpoint import VARIABLE, DataFile, Step, snapshot_file_of
from epoch_rows import applied

from anabranch.checkpoint import paths
from anabranch.checkpoint.cleanup import clean_up
from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.snapshots import Snapshot, SnapshotFile, write_snapshot
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import Epoch

if TYPE_CHECKING:
    from epoch_driver import Driver

#: Longer than any snapshot takes, and shorter than most histories.
ORPHAN_AGE_TICKS = 500


class Upkeep:
    """One thing at a time: a snapshot, which goes on when the driver is dead, then a clean-up, which does not."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.world = driver.world
        self.busy = False
        self.killed = False

    def after_epoch(self, committed: Epoch) -> None:
        """``committed`` is an epoch that Spark has committed: the one before the epoch that has just ended."""
        if committed >= 0 and not self.busy and self.world.rng.random() < self.world.history.upkeep_rate:
            self.busy, self.killed = True, False
            self.later(self.start_snapshot, committed)

    def kill(self) -> None:
        self.killed = self.busy

    def later(self, action: Callable[..., None], *arguments: Any) -> None:
        self.world.at(self.world.rng.randint(1, 9), self.go_on, action, arguments)

    def go_on(self, action: Callable[..., None], arguments: Sequence[Any]) -> None:
        if self.killed:
            self.busy = False
            self.world.seen["upkeep killed"] += 1
            return
        try:
            action(*arguments)
        except AnabranchError as error:
            self.world.seen[f"upkeep stopped by {type(error).__name__}"] += 1
            self.busy = False

    # -- the snapshot

    def start_snapshot(self, epoch: Epoch) -> None:
        files = state_files(self.world.storage, epoch)
        if files.snapshot is not None and files.snapshot.epoch == epoch:
            self.snapshot_written(epoch)
        else:
            self.read_files(files, 0, [])

    def read_files(self, files: StateFiles, index: int, changes: list[Any]) -> None:
        """A few files at a time: some may go meanwhile."""
        some = files.data_files[index : index + 4]
        for file in some:
            changes = changes + list(self.world.storage.read_data(file.path).rows)
        if some:
            self.later(self.read_files, files, index + 4, changes)
        else:
            self.write_files(files, changes)

    def write_files(self, files: StateFiles, changes: list[Any]) -> None:
        history = self.world.history
        state = applied(changes)
        written: list[SnapshotFile] = []
        for stage in sorted({row[0] for row in state}):
            rows = {row: value for row, value in state.items() if row[0] == stage}
            unique = f"{self.driver.generation}-{self.world.steps}"
            path = paths.snapshot_file(f"s{stage}", VARIABLE, epoch=files.epoch, unique=unique)
            data: Any = DataFile(rows, history.hash_of)
            self.world.storage.write(path, data)
            written.append(snapshot_file_of(stage, path, [history.group_of[row] for row in rows], len(rows)))
        self.later(self.check_claim, files, tuple(written))

    def check_claim(self, files: StateFiles, written: tuple[SnapshotFile, ...]) -> None:
        check_generation(self.world.storage, self.driver.generation)
        self.later(self.write_document, files, written)

    def write_document(self, files: StateFiles, written: tuple[SnapshotFile, ...]) -> None:
        by = files.committed_by
        assert by is not None
        write_snapshot(self.world.storage, Snapshot(files.epoch, by.generation, by.run, 0.0, written))
        self.world.seen["snapshot"] += 1
        self.snapshot_written(files.epoch)

    # -- the clean-up

    def snapshot_written(self, epoch: Epoch) -> None:
        if self.driver.dead:
            self.busy = False
        else:
            self.driver.later(self.go_on, self.start_clean_up, (epoch,))

    def start_clean_up(self, epoch: Epoch) -> None:
        check_generation(self.world.storage, self.driver.generation)
        self.driver.cluster.files_in_use(partial(self.clean_up, epoch))

    def clean_up(self, epoch: Epoch, in_use: list[StateFiles]) -> None:
        try:
            steps = self.world.storage.in_steps(
                lambda storage: clean_up(
                    storage,
                    committed=epoch,
                    keep_epochs=self.world.history.keep_epochs,
                    keep_seconds=0.0,
                    now=self.world.now,
                    min_age_s=ORPHAN_AGE_TICKS,
                    in_use=in_use,
                )
            )
        except AnabranchError as error:
            self.world.seen[f"clean-up stopped by {type(error).__name__}"] += 1
            steps = []
        if in_use:
            self.world.seen["clean-up while files are in use"] += 1
        self.delete(steps)

    def delete(self, steps: list[Step]) -> None:
        if not steps or self.killed:
            self.busy = False
            return
        self.world.seen["deleted by a clean-up"] += 1
        steps[0]()
        self.driver.later(self.delete, steps[1:])
