"""Going back to an older epoch: Spark runs the later ones again, from the very offsets that they had.

Spark repeats one epoch at most. So the offsets of all epochs to be repeated are put aside, and put back one at a time:
each then is the one that Spark repeats. What sinks have of these epochs already, they do not take again.
"""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.checkpoint import paths
from anabranch.checkpoint.manifests import remove_after
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import Documents
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch


def newest_durable_epoch(storage: Storage, up_to: Epoch) -> Epoch:
    """Returns the newest epoch, not after this one, from which state can be restored, going by the names of files.

    Later epochs may have been committed by Spark, if the job does not make every epoch durable.
    """
    found = Documents(storage)
    epochs = (epoch for epoch in reversed(found.epochs) if epoch <= up_to)
    return next((epoch for epoch in epochs if found.gap_before(epoch) is None), NO_EPOCH)


def rewind(spark: Storage, storage: Storage, to: Epoch) -> list[Epoch]:
    """Puts the job back to the end of an epoch, and returns the epochs to repeat. Interrupted, it can be called again.

    Commits go last, and the newest of them first: as long as there is one of a later epoch, the job has not been put
    back. With offsets of later epochs, but no commits, Spark would run the newest of them and none before it.
    """
    planned = _numbers(spark, paths.SPARK_OFFSETS)
    later = [epoch for epoch in planned if epoch > to]
    repeated = sorted({*later, *pending(spark)})
    lacking = sorted(set(range(to + 1, last_committed_epoch(spark) + 1)) - set(repeated))
    if lacking or (to >= 0 and to not in planned):
        raise CheckpointError(
            f"Epoch {to} cannot be returned to: Spark no longer has the offsets of epoch {min([to, *lacking])} in "
            f"{spark.full_path(paths.SPARK_OFFSETS)}. Return to a later one, or use a new checkpoint."
        )
    for epoch in later:
        spark.copy_to(f"{paths.SPARK_OFFSETS}/{epoch}", spark, _aside(epoch))
    remove_after(storage, to)
    for epoch in sorted(later, reverse=True):
        _forget(spark, paths.SPARK_OFFSETS, epoch)
    for epoch in sorted(_numbers(spark, paths.SPARK_COMMITS), reverse=True):
        if epoch > to:
            _forget(spark, paths.SPARK_COMMITS, epoch)
    return repeated


def pending(spark: Storage) -> list[Epoch]:
    """Returns the epochs that are still to be repeated, in order."""
    return sorted(_numbers(spark, paths.REPLAY))


def repeated(spark: Storage) -> Iterator[Epoch]:
    """Yields the epochs that are to be repeated, in order. While the caller has one, it lets Spark run that."""
    committed = last_committed_epoch(spark)
    for epoch in pending(spark):
        # The driver that put it aside died after Spark had committed it again, or before it did anything else.
        if epoch <= committed:
            spark.delete(_aside(epoch))
    while waiting := pending(spark):
        epoch = waiting[0]
        put_back(spark, epoch)
        yield epoch
        done(spark, epoch)


def put_back(spark: Storage, epoch: Epoch) -> None:
    """Lets Spark run this epoch next: as the newest that has offsets."""
    for later in sorted(_numbers(spark, paths.SPARK_OFFSETS), reverse=True):
        if later > epoch:
            spark.copy_to(f"{paths.SPARK_OFFSETS}/{later}", spark, _aside(later))
            _forget(spark, paths.SPARK_OFFSETS, later)
    spark.copy_to(_aside(epoch), spark, f"{paths.SPARK_OFFSETS}/{epoch}")


def done(spark: Storage, epoch: Epoch) -> None:
    """Notes that an epoch has been repeated."""
    if last_committed_epoch(spark) < epoch:
        raise CheckpointError(
            f"Spark did not repeat epoch {epoch} of {spark.location}. Start the query again: it goes on from there."
        )
    spark.delete(_aside(epoch))


def _forget(spark: Storage, folder: str, epoch: Epoch) -> None:
    """Deletes an entry of a log of Spark's, and the checksum that Hadoop keeps beside it on local file systems."""
    spark.delete(f"{folder}/{epoch}")
    spark.delete(f"{folder}/.{epoch}.crc")


def _aside(epoch: Epoch) -> str:
    return f"{paths.REPLAY}/{epoch}"


def _numbers(storage: Storage, folder: str) -> list[Epoch]:
    found = (paths.spark_batch_of(name) for name in storage.list_names(folder))
    return [epoch for epoch in found if epoch is not None]
