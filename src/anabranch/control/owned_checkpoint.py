"""Claiming a checkpoint: one driver at a time may use it, and fences those before it."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.generations import NO_GENERATION, claim_generation, generation_info, latest_generation
from anabranch.checkpoint.job import JobDescription, create_or_check, save_shape
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch, Generation, JobId, RunId
from anabranch.core.schemas import StageSpec

logger = logging.getLogger(__name__)

#: In what a driver says about itself: whether epochs may be not durable for a while.
VOLATILE = "checkpoint_interval"


@dataclass(frozen=True)
class OwnedCheckpoint:
    """A checkpoint that this driver may use."""

    storage: Storage
    #: Where Spark keeps its own offsets and commits; the same, unless the state has a place of its own.
    spark: Storage
    job: JobDescription
    generation: Generation
    #: Whether the driver before this one did not make every epoch durable.
    is_volatile: bool = False


@dataclass(frozen=True)
class Committed:
    """The newest epoch that is part of the state, and the run that it came from (None before the first epoch)."""

    epoch: Epoch
    by: RunId | None


def claim(
    location: str,
    stages: Sequence[StageSpec],
    key_groups: int,
    *,
    state_location: str = "",
    interval_s: float = 0.0,
    open_storage: Callable[[str], Storage] = Storage,
) -> OwnedCheckpoint:
    """Check that the checkpoint is this job's, and fence every earlier driver."""
    spark = open_storage(location)
    storage = open_storage(state_location) if state_location else spark
    wanted = JobDescription(FORMAT_VERSION, JobId(uuid.uuid4().hex), key_groups, tuple(stages))
    job = create_or_check(storage, wanted, spark)
    is_volatile = was_volatile(storage)
    generation = claim_generation(storage, who_claims(volatile=bool(interval_s) or is_volatile))
    save_shape(storage, job, generation, spark)
    return OwnedCheckpoint(storage, spark, job, generation, is_volatile)


def who_claims(*, volatile: bool) -> dict[str, Any]:
    """What this driver says about itself when it claims a generation; others tell by it whether it still runs."""
    return {"host": socket.gethostname(), "pid": os.getpid(), VOLATILE: volatile}


def was_volatile(storage: Storage) -> bool:
    """Whether the newest driver did not make every epoch durable. If nobody can tell, a missing epoch is an error."""
    before = latest_generation(storage)
    if before == NO_GENERATION:
        return False
    try:
        return bool(generation_info(storage, before).get(VOLATILE))
    except CheckpointError as error:
        logger.warning("%s", error)
        return False
