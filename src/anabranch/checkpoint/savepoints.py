"""Savepoints: a job as of one epoch, complete in itself, from which jobs can start.

A savepoint is laid out like a checkpoint: Spark's offsets and commits of the epoch, what its sources remember, the
description of the job, and a snapshot of the state. ``savepoint.json`` is written last: without it, there is none.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.generations import claim_exactly
from anabranch.checkpoint.job import fork_job
from anabranch.checkpoint.manifests import read_snapshot
from anabranch.checkpoint.sparklog import read_entries
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch


@dataclass(frozen=True)
class Savepoint:
    """What a savepoint says about itself."""

    epoch: Epoch
    #: The checkpoint that it was made from.
    origin: str
    #: Seconds since 1970.
    created_s: float


def check_free(target: Storage) -> None:
    """Refuses a place that is a savepoint or a checkpoint already."""
    if target.read_if_present(paths.SAVEPOINT) is not None or target.read_if_present(paths.JOB) is not None:
        raise CheckpointError(
            f"{target.location} is a savepoint or a checkpoint already. Name another place for the savepoint."
        )


def begin_savepoint(spark: Storage, target: Storage, epoch: Epoch) -> None:
    """Copies what Spark needs to go on after an epoch. The snapshot of the state comes next.

    When Spark chooses the input of the next epoch, file sources note at once which files that is. A job that starts
    from here chooses for itself.
    """
    # Spark wants to see where the epoch began, too.
    copied = [f"{paths.SPARK_OFFSETS}/{number}" for number in (epoch - 1, epoch) if number >= 0]
    for path in [*copied, f"{paths.SPARK_COMMITS}/{epoch}"]:
        spark.copy_to(path, target, path)
    read = read_entries(spark, epoch)
    for path, _, _ in list(spark.walk(paths.SPARK_SOURCES)):
        _, source, *inner = path.split("/")
        if not inner or inner[-1].startswith("."):
            continue
        entry = paths.log_entry_of(inner[-1])
        if entry is None or entry <= read.get(source, entry) or not _lists_files(spark, path):
            spark.copy_to(path, target, path)


def _lists_files(spark: Storage, path: str) -> bool:
    """Tells whether this is an entry of a file source's log, and not something that another source remembers."""
    return b'"path":' in spark.read(path)


def complete_savepoint(storage: Storage, target: Storage, epoch: Epoch) -> Savepoint:
    """Describes the job, and declares the savepoint whole. Its snapshot has to be there."""
    read_snapshot(target, epoch)
    storage.copy_to(paths.JOB, target, paths.JOB)
    _copy_shapes(storage, target)
    savepoint = Savepoint(epoch, storage.location, time.time())
    target.write(paths.SAVEPOINT, documents.encode(asdict(savepoint)))
    return savepoint


def _copy_shapes(source: Storage, target: Storage) -> None:
    for name in source.list_names(paths.SHAPES):
        source.copy_to(f"{paths.SHAPES}/{name}", target, f"{paths.SHAPES}/{name}")


def read_savepoint(storage: Storage) -> Savepoint:
    raw = storage.read_if_present(paths.SAVEPOINT)
    if raw is None:
        raise CheckpointError(
            f"{storage.location} is not a savepoint, or one that was never completed: it has no {paths.SAVEPOINT}. "
            "Set anabranch.savepoint to a folder that query.savepoint or `anabranch savepoint` has written."
        )
    content = documents.decode(storage, paths.SAVEPOINT, raw)
    return documents.convert(storage, paths.SAVEPOINT, content, Savepoint)


def start_from(source: Storage, storage: Storage, spark: Storage) -> Epoch | None:
    """Fills a new checkpoint from a savepoint, as a job of its own; returns None if the checkpoint is in use already.

    What an interrupted attempt has left is overwritten: the description of the job is written last.
    """
    if storage.read_if_present(paths.JOB) is not None:
        return None
    savepoint = read_savepoint(source)
    epoch = savepoint.epoch
    snapshot = read_snapshot(source, epoch)
    for file in snapshot.files:
        source.copy_to(file.path, storage, file.path)
    source.copy_to(paths.snapshot_document(epoch), storage, paths.snapshot_document(epoch))
    _copy_shapes(source, storage)
    begin_savepoint(source, spark, epoch)
    # Spark's id of the query, which it expects to find beside offsets.
    spark.write(paths.SPARK_METADATA, json.dumps({"id": str(uuid.uuid4())}).encode())
    # The runs of this job have to count as later than the one that the snapshot came from.
    claim_exactly(storage, snapshot.generation, {"savepoint": source.location})
    fork_job(source, storage)
    return epoch
