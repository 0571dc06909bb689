"""The names of things: one type for each kind of number, so that two of them cannot be swapped."""

from typing import NewType

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
