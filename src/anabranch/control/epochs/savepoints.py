"""Taking a savepoint, of a job that runs or of one that does not."""

from __future__ import annotations

import logging

from anabranch.checkpoint.generations import latest_generation
from anabranch.checkpoint.job import read_job
from anabranch.checkpoint.rewind import newest_durable_epoch
from anabranch.checkpoint.savepoints import Savepoint, begin_savepoint, check_free, complete_savepoint, start_from
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.control.owned_checkpoint import OwnedCheckpoint, was_volatile
from anabranch.control.parts import PRODUCTION, DriverParts
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch

logger = logging.getLogger(__name__)


def take_savepoint(owned: OwnedCheckpoint, target: str, epoch: Epoch, parts: DriverParts = PRODUCTION) -> Savepoint:
    """Make a savepoint of an epoch that is durable and that Spark has committed. Epochs go on meanwhile."""
    place = parts.open_storage(target)
    check_free(place)
    if place.location == owned.spark.location:
        raise CheckpointError(f"{place.location} is the checkpoint itself. Name another place for the savepoint.")
    if epoch == NO_EPOCH:
        raise CheckpointError(
            f"The job of {owned.spark.location} has no epoch yet that is committed and durable, so there is nothing "
            "to save. Wait for its first epoch."
        )
    begin_savepoint(owned.spark, place, epoch)
    parts.compact(owned, epoch, target=place.location)
    return complete_savepoint(owned.storage, place, epoch)


def newest_epoch(owned: OwnedCheckpoint) -> Epoch:
    """The newest epoch of a job that does not run of which a savepoint can be made."""
    committed = last_committed_epoch(owned.spark)
    return newest_durable_epoch(owned.storage, committed) if owned.is_volatile else committed


def seed(location: str, state_location: str, savepoint: str) -> None:
    """Let a new job start from a savepoint. A checkpoint that is in use already goes on from where it is."""
    spark = Storage(location)
    storage = Storage(state_location) if state_location else spark
    epoch = start_from(Storage(savepoint), storage, spark)
    if epoch is None:
        logger.info("%s is in use: the savepoint %s is not looked at", location, savepoint)
    else:
        logger.info("the job of %s starts from epoch %d of the savepoint %s", location, epoch, savepoint)


def found(location: str, state_location: str = "") -> OwnedCheckpoint:
    """A checkpoint as it is found, without claiming it: a driver that uses it goes on undisturbed."""
    spark = Storage(location)
    storage = Storage(state_location) if state_location else spark
    return OwnedCheckpoint(storage, spark, read_job(storage), latest_generation(storage), was_volatile(storage))
