"""The names of things: one type for each kind of number, so that two of them cannot be swapped."""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

from anabranch.core.errors import WorkerError

#: One Spark micro-batch; its number is Spark's batch id. The state before the first epoch is that of -1.
Epoch = NewType("Epoch", int)
#: One incarnation of the driver. A worker refuses requests of an older one.
Generation = NewType("Generation", int)
#: One of G hash buckets of a job's keys: the unit of ownership.
KeyGroup = NewType("KeyGroup", int)
#: Counts the routes of a job.
RouteVersion = NewType("RouteVersion", int)
#: An operator of the job, numbered from 0 at the source.
StageNumber = NewType("StageNumber", int)
#: A partition of a stateful stage within one epoch.
Partition = NewType("Partition", int)
#: Spark's task attempt id: unique within an application, larger for later attempts.
Attempt = NewType("Attempt", int)
#: Identifies a state worker, for as long as its process lives.
WorkerId = NewType("WorkerId", str)
#: Identifies a streaming query: drawn at random when its checkpoint is first used.
JobId = NewType("JobId", str)

#: Counts the runs of all epochs within a generation, from 0. An epoch that is run again keeps its number: so a *run*
#: tells its runs apart.
Run = NewType("Run", int)

NO_EPOCH = Epoch(-1)
NO_RUN = Run(-1)


class StagePartition(NamedTuple):
    """The work of one task: a partition of a stateful stage."""

    stage: StageNumber
    partition: Partition


class StageAttempt(NamedTuple):
    """One attempt at a task, and the changes it stages."""

    stage: StageNumber
    partition: Partition
    attempt: Attempt

    @property
    def task(self) -> StagePartition:
        return StagePartition(self.stage, self.partition)


class RunId(NamedTuple):
    """Which run an epoch was committed by. A later run of the same epoch is greater, and replaces an earlier one."""

    generation: Generation
    run: Run


_JOB_ID = re.compile(r"[0-9a-f]{32}")


def checked_job_id(text: str) -> JobId:
    """The id of a job, which becomes a part of paths and names: of no other form than those that are drawn."""
    if not _JOB_ID.fullmatch(text):
        raise WorkerError(
            f"{text[:60]!r} is not the id of a job, which has 32 hexadecimal digits. Run the same version of anabranch "
            "everywhere, and see whether somebody has changed job.json in the checkpoint."
        )
    return JobId(text)
