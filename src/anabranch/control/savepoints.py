"""Taking a savepoint, of a job that runs or of one that does not."""

from __future__ import annotations

import logging

from anabranch.checkpoint.generations import latest_generation
from anabranch.checkpoint.job import read_job
from anabranch.checkpoint.savepoints import Savepoint, begin_savepoint, check_free, complete_savepoint, start_from
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.control.claims import Claimed
from anabranch.control.upkeep import compact_in_process
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH

logger = logging.getLogger(__name__)


def take_savepoint(claimed: Claimed, target: str) -> Savepoint:
    """Make a savepoint of the last epoch that Spark has committed. Epochs go on meanwhile."""
    place = Storage(target)
    check_free(place)
    if place.location == claimed.spark.location:
        raise CheckpointError(f"{place.location} is the checkpoint itself. Name another place for the savepoint.")
    epoch = last_committed_epoch(claimed.spark)
    if epoch == NO_EPOCH:
        raise CheckpointError(
            f"The job of {claimed.spark.location} has not committed an epoch yet, so there is nothing to save. "
            "Wait for its first epoch."
        )
    begin_savepoint(claimed.spark, place, epoch)
    compact_in_process(claimed, epoch, target=place.location)
    return complete_savepoint(claimed.storage, place, epoch)


def seed(location: str, state_location: str, savepoint: str) -> None:
    """Let a new job start from a savepoint. A checkpoint that is in use already goes on from where it is."""
    spark = Storage(location)
    storage = Storage(state_location) if state_location else spark
    epoch = start_from(Storage(savepoint), storage, spark)
    if epoch is None:
        logger.info("%s is in use: the savepoint %s is not looked at", location, savepoint)
    else:
        logger.info("the job of %s starts from epoch %d of the savepoint %s", location, epoch, savepoint)


def found(location: str, state_location: str = "") -> Claimed:
    """A checkpoint as it is found, without claiming it: a driver that uses it goes on undisturbed."""
    spark = Storage(location)
    storage = Storage(state_location) if state_location else spark
    return Claimed(storage, spark, read_job(storage), latest_generation(storage))
