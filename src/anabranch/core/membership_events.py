"""What happens to the workers of a job, and what the membership machine makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.routes import Route


class RescaleState(StrEnum):
    """How far a rescale is."""

    WAITING = "waiting"  #: for new workers, or for the next epoch
    MIGRATING = "migrating"  #: the new route is in force, and state follows
    DONE = "done"
    FAILED = "failed"
    REPLACED = "replaced"  #: a newer request came before this one took effect


@dataclass(frozen=True)
class Wish:
    """A rescale that was asked for, under the number of its handle."""

    rescale: int
    #: None: as many as there are.
    workers: int | None = None
    #: By stage.
    parallelism: Mapping[int, int] = field(default_factory=dict)
    #: The worker that is to leave, if one was named.
    leaving: WorkerId | None = None


# ------------------------------------------------------------------------------------------------------ events


class Event:
    """Something that happened."""


@dataclass(frozen=True)
class RescaleWanted(Event):
    """Somebody wants other workers or another parallelism; with neither, the load is shared out anew."""

    wish: Wish


@dataclass(frozen=True)
class WorkerCame(Event):
    """A worker that was started elsewhere wants to take part."""

    worker: WorkerId
    rescale: int


@dataclass(frozen=True)
class DrainWanted(Event):
    """A worker is to hand over all that it has, and to leave."""

    worker: WorkerId
    rescale: int


@dataclass(frozen=True)
class WorkerMissed(Event):
    """A worker was found lost."""

    worker: WorkerId


@dataclass(frozen=True)
class WorkerStarted(Event):
    """A worker that was to be started is ready to be let in."""

    worker: WorkerId


@dataclass(frozen=True)
class StartFailed(Event):
    """A worker that was to be started could not be."""

    message: str


@dataclass(frozen=True)
class ChangeBegun(Event):
    """No epoch runs, and Spark has committed all that did: workers and route may change before this epoch."""

    next_epoch: Epoch


@dataclass(frozen=True)
class StartedAtOnce(Event):
    """The worker that StartWorkerNow asked for is there."""

    worker: WorkerId


@dataclass(frozen=True)
class LoadMeasured(Event):
    """How many keys and further rows each key group had lately; None: too few to tell anything."""

    load: tuple[float, ...] | None


@dataclass(frozen=True)
class RouteSaved(Event):
    """The route that SaveRoute named is durable."""


@dataclass(frozen=True)
class GroupsAssigned(Event):
    """All workers have their key groups."""


@dataclass(frozen=True)
class AssigningLost(Event):
    """A worker did not answer while key groups were assigned. Who it was is found out by LookForLosses."""

    message: str


@dataclass(frozen=True)
class LossesLookedFor(Event):
    """Every worker has been asked whether it is well; for each that is not, WorkerMissed has come."""


@dataclass(frozen=True)
class ChangeFailed(Event):
    """Something other than a worker failed, such as the storage: the change is given up, and what it was for waits."""


@dataclass(frozen=True)
class ProgressTold(Event):
    """A worker says how many of its key groups are on their way since an assignment."""

    worker: WorkerId
    assignment: int
    pending_groups: int


@dataclass(frozen=True)
class JobEnded(Event):
    """The query has ended: nothing that waits is fulfilled any more."""

    message: str


# ------------------------------------------------------------------------------------------------ instructions


class Instruction:
    """What the process around the machine is to do, in the order given."""


@dataclass(frozen=True)
class StartWorkers(Instruction):
    """Start so many workers in the background; each is followed by WorkerStarted or StartFailed."""

    count: int


@dataclass(frozen=True)
class StartWorkerNow(Instruction):
    """Start a worker and wait for it, because there is none left."""


@dataclass(frozen=True)
class RemoveWorker(Instruction):
    """A worker is lost: close the connection, and make sure that it is gone."""

    worker: WorkerId


@dataclass(frozen=True)
class LetIn(Instruction):
    """A worker takes part from now on."""

    worker: WorkerId


@dataclass(frozen=True)
class MeasureLoad(Instruction):
    """Ask the workers for the load of their key groups."""


@dataclass(frozen=True)
class SaveRoute(Instruction):
    """Make a route durable. It is in force only after that."""

    route: Route


@dataclass(frozen=True)
class AssignGroups(Instruction):
    """Give every worker its key groups under the route in force. Former owners are those of ``before``."""

    number: int
    route: Route
    before: Route


@dataclass(frozen=True)
class LookForLosses(Instruction):
    """Ask every worker whether it is well."""


@dataclass(frozen=True)
class Depart(Instruction):
    """A worker owns nothing any more, and keeps some key groups for their new owners."""

    worker: WorkerId


@dataclass(frozen=True)
class ChangeMade(Instruction):
    """The change is over: begin the migration of what moves."""

    number: int
    next_epoch: Epoch
    lost: tuple[WorkerId, ...]
    joined: tuple[WorkerId, ...]
    left: tuple[WorkerId, ...]
    moved: int
    #: The rescales that have taken effect.
    rescales: tuple[int, ...]


@dataclass(frozen=True)
class FailChange(Instruction):
    """The change cannot be made; the query ends with this message."""

    message: str


@dataclass(frozen=True)
class FinishMigration(Instruction):
    """All state has arrived: workers may let go of what they keep for others, and these leave."""

    number: int
    departing: tuple[WorkerId, ...]


@dataclass(frozen=True)
class TakeLeave(Instruction):
    """A worker is not needed any more."""

    worker: WorkerId


@dataclass(frozen=True)
class NoteLoss(Instruction):
    """A worker is newly known to be lost: nobody need wait for it. Its part goes to others with the next change."""

    worker: WorkerId


@dataclass(frozen=True)
class LoseDeparting(Instruction):
    """A worker that keeps key groups for others is lost: what they still need comes from the checkpoint."""

    worker: WorkerId


@dataclass(frozen=True)
class EndRescale(Instruction):
    """A rescale is over before it took effect."""

    rescale: int
    state: RescaleState
    message: str


@dataclass(frozen=True)
class TakeOver(Instruction):
    """A rescale also does what those that it replaces were to do."""

    rescale: int
    parallelism: Mapping[int, int]
