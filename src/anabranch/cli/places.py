"""Where commands find a checkpoint, and what they may do with it while its job runs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import psutil

from anabranch.checkpoint import paths
from anabranch.checkpoint.generations import generation_info, latest_generation
from anabranch.checkpoint.sparklog import has_offsets, last_committed_epoch
from anabranch.checkpoint.statefiles import Documents
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import Problem, Report, verify
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch

_T = TypeVar("_T")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint: where the state is, and where Spark keeps its own logs."""

    storage: Storage
    spark: Storage

    @cached_property
    def committed(self) -> Epoch:
        return last_committed_epoch(self.spark)

    def marks(self) -> tuple[object, ...]:
        """What is different once the job has gone on."""
        folders = (paths.GENERATIONS, paths.MANIFESTS, paths.SNAPSHOTS)
        return last_committed_epoch(self.spark), [self.storage.list_names(folder) for folder in folders]


def find(checkpoint: str, state_location: str) -> FoundCheckpoint:
    spark = Storage(checkpoint)
    storage = Storage(state_location) if state_location else spark
    known = storage.read_if_present(paths.JOB) is not None
    if not known and not any(map(storage.list_names, (paths.GENERATIONS, paths.MANIFESTS, paths.SNAPSHOTS))):
        if state_location or not has_offsets(spark):
            raise CheckpointError(f"{storage.location} is not a checkpoint of Anabranch. Name the folder of one.")
        raise CheckpointError(
            f"{storage.location} has offsets of Spark, but no state of Anabranch. If the state has a place of its own "
            f"(anabranch.stateLocation), name it with --state-location; otherwise it is a plain Spark query's."
        )
    return FoundCheckpoint(storage, spark)


def chosen_epoch(place: FoundCheckpoint, wanted: int | None) -> Epoch:
    """The epoch that the user asked for; by default the one that a restart of the query would resume from."""
    if wanted is None:
        if place.committed == NO_EPOCH:
            raise CheckpointError(
                f"Spark has not committed an epoch in {place.spark.location} yet. Wait for the first one, or name one "
                f"with --epoch."
            )
        return place.committed
    epochs = Documents(place.storage).epochs
    if wanted not in epochs:
        there = f"it has the epochs {epoch_ranges(epochs)}" if epochs else "it has none yet"
        raise CheckpointError(f"There is no epoch {wanted} in {place.storage.location}: {there}. Name another --epoch.")
    return Epoch(wanted)


def while_it_runs(place: FoundCheckpoint, attempt: Callable[[], _T], *, tries: int) -> _T:
    """Try again where an error may come from the job having gone on, and files having been cleaned up, meanwhile."""
    while True:
        before, tries = place.marks(), tries - 1
        try:
            return attempt()
        except CheckpointError as error:
            if place.marks() == before:
                raise
            if not tries:
                raise CheckpointError(
                    f"{error} The job went on meanwhile, and may have cleaned up what was being read: try again, with "
                    f"a larger anabranch.keepEpochs or anabranch.keepSeconds if that does not help."
                ) from error


def verified(place: FoundCheckpoint) -> Report:
    """What is damaged, apart from what was cleaned up while it was looked at."""
    before = place.marks()
    report = verify(place.storage)
    if report.problems and place.marks() != before:
        report = verify(place.storage)
    committed = last_committed_epoch(place.spark)
    if place.storage is place.spark or committed == NO_EPOCH or committed in report.epochs:
        return report
    reason = f"Spark committed epoch {committed}, which has neither a manifest nor a snapshot"
    return replace(report, problems=(Problem(paths.MANIFESTS, reason, (committed,)), *report.problems))


def check_not_running(place: FoundCheckpoint, *, force: bool) -> None:
    """Refuse if the last driver is a process of this machine that still runs. Of other machines nothing is known."""
    generation = latest_generation(place.storage)
    driver = generation_info(place.storage, generation) if generation and not force else {}
    pid = driver.get("pid")
    if driver.get("host") == socket.gethostname() and isinstance(pid, int) and psutil.pid_exists(pid):
        raise CheckpointError(
            f"The job of {place.storage.location} seems to be running, in process {pid} of this machine. Stop its "
            f"query first, or use --force if that process is something else or its query has ended."
        )


def epoch_ranges(epochs: Iterable[int]) -> str:
    """Epochs in order as people write them: ``0 to 3, 5, 8 to 9``."""
    ranges: list[list[int]] = []
    for epoch in epochs:
        if ranges and epoch == ranges[-1][-1] + 1:
            ranges[-1][1:] = [epoch]
        else:
            ranges.append([epoch])
    return ", ".join(" to ".join(map(str, each)) for each in ranges) or "none"
