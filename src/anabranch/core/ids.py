"""The names of things: one type for each kind of number, so that two of them cannot be swapped."""

import re
from typing import NewType

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

NO_EPOCH = Epoch(-1)
_JOB_ID = re.compile(r"[0-9a-f]{32}")


def checked_job_id(text: str) -> JobId:
    """The id of a job, which becomes a part of paths and names: of no other form than those that are drawn."""
    if not _JOB_ID.fullmatch(text):
        raise WorkerError(
            f"{text[:60]!r} is not the id of a job, which has 32 hexadecimal digits. Run the same version of anabranch "
            "everywhere, and see whether somebody has changed job.json in the checkpoint."
        )
    return JobId(text)
