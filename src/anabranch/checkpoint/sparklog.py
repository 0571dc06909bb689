"""What Spark's own logs in a checkpoint say: which micro-batches it planned, and which it committed."""

from __future__ import annotations

from anabranch.checkpoint import paths
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import NO_EPOCH, Epoch


def last_committed_epoch(storage: Storage) -> Epoch:
    """The newest epoch that Spark will not run again; NO_EPOCH if it committed none.

    A manifest of a later epoch is not part of the state: Spark runs that epoch again, from the same offsets.
    """
    return _newest_batch(storage, paths.SPARK_COMMITS)


def has_offsets(storage: Storage) -> bool:
    """Whether a streaming query has ever planned a micro-batch on this checkpoint."""
    return _newest_batch(storage, paths.SPARK_OFFSETS) != NO_EPOCH


def _newest_batch(storage: Storage, folder: str) -> Epoch:
    batches = (paths.spark_batch_of(name) for name in storage.list_names(folder))
    return max((batch for batch in batches if batch is not None), default=NO_EPOCH)
