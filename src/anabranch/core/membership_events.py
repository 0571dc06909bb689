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
class RescaleRequest:
    """A rescale that was asked for, under the number of its handle."""

    rescale: int
    #: None: as many as there are.
    workers: int | None = None
    #: By stage.
    parallelism: Mapping[int, int] = field(default_factory=dict)
    #: The worker that is to leave, if one was named.
    leaving: WorkerId | None = None


# ------------------------------------------------------------------------------------------------------ events


class MembershipEvent:
    """Something that happened."""


@dataclass(frozen=True)
class RescaleWanted(MembershipEvent):
    """Somebody wants other workers or another parallelism; with neither, the load is shared out anew."""

    request: RescaleRequest


@dataclass(frozen=True)
class WorkerCame(MembershipEvent):
    """A worker that was started elsewhere wants to take part."""

    worker: WorkerId
    rescale: int


@dataclass(frozen=True)
class DrainWanted(MembershipEvent):
    """A worker is to hand over all that it has, and to leave."""

    worker: WorkerId
    rescale: int


@dataclass(frozen=True)
class WorkerMissed(MembershipEvent):
    """A worker was found lost."""

    worker: WorkerId


@dataclass(frozen=True)
class WorkerStarted(MembershipEvent):
    """A worker that was to be started is ready to be let in."""

    worker: WorkerId


@dataclass(frozen=True)
class StartFailed(MembershipEvent):
    """A worker that was to be started could not be."""

    message: str


@dataclass(frozen=True)
class ChangeBegun(MembershipEvent):
    """No epoch runs, and Spark has committed all that did: workers and route may change before this epoch."""

    next_epoch: Epoch


@dataclass(frozen=True)
class StartedAtOnce(MembershipEvent):
    """The worker that StartWorkerNow asked for is there."""

    worker: WorkerId


@dataclass(frozen=True)
class LoadMeasured(MembershipEvent):
    """How many keys and further rows each key group had lately; None: too few to tell anything."""

    load: tuple[float, ...] | None


@dataclass(frozen=True)
class RouteSaved(MembershipEvent):
    """The route that SaveRoute named is durable."""


@dataclass(frozen=True)
class GroupsAssigned(MembershipEvent):
    """All workers have their key groups."""


@dataclass(frozen=True)
class AssigningLost(MembershipEvent):
    """A worker did not answer while key groups were assigned. Who it was is found out by LookForLosses."""

    message: str


@dataclass(frozen=True)
class LossesLookedFor(MembershipEvent):
    """Every worker has been asked whether it is well; for each that is not, WorkerMissed has come."""


@dataclass(frozen=True)
class ChangeFailed(MembershipEvent):
    """Something other than a worker failed, such as the storage: the change is given up, and what it was for waits."""


@dataclass(frozen=True)
class ProgressTold(MembershipEvent):
    """A worker says how many of its key groups are on their way since an assignment."""

    worker: WorkerId
    assignment: int
    pending_groups: int


@dataclass(frozen=True)
class JobEnded(MembershipEvent):
    """The query has ended: nothing that waits is fulfilled any more."""

    message: str


# ------------------------------------------------------------------------------------------------ instructions


class MembershipInstruction:
    """What the process around the machine is to do, in the order given."""


@dataclass(frozen=True)
class StartWorkers(MembershipInstruction):
    """Start so many workers in the background; each is followed by WorkerStarted or StartFailed."""

    count: int


@dataclass(frozen=True)
class StartWorkerNow(MembershipInstruction):
    """Start a worker and wait for it, because there is none left."""


@dataclass(frozen=True)
class RemoveWorker(MembershipInstruction):
    """A worker is lost: close the connection, and make sure that it is gone."""

    worker: WorkerId


@dataclass(frozen=True)
class LetIn(MembershipInstruction):
    """A worker takes part from now on."""

    worker: WorkerId


@dataclass(frozen=True)
class MeasureLoad(MembershipInstruction):
    """Ask the workers for the load of their key groups."""


@dataclass(frozen=True)
class SaveRoute(MembershipInstruction):
    """Make a route durable. It is in force only after that."""

    route: Route


@dataclass(frozen=True)
class AssignGroups(MembershipInstruction):
    """Give every worker its key groups under the route in force. Former owners are those of ``before``."""

    number: int
    route: Route
    before: Route


@dataclass(frozen=True)
class LookForLosses(MembershipInstruction):
    """Ask every worker whether it is well."""


@dataclass(frozen=True)
class Depart(MembershipInstruction):
    """A worker owns nothing any more, and keeps some key groups for their new owners."""

    worker: WorkerId


@dataclass(frozen=True)
class ChangeMade(MembershipInstruction):
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
class FailChange(MembershipInstruction):
    """The change cannot be made; the query ends with this message."""

    message: str


@dataclass(frozen=True)
class FinishMigration(MembershipInstruction):
    """All state has arrived: workers may let go of what they keep for others, and these leave."""

    number: int
    departing: tuple[WorkerId, ...]


@dataclass(frozen=True)
class TakeLeave(MembershipInstruction):
    """A worker is not needed any more."""

    worker: WorkerId


@dataclass(frozen=True)
class NoteLoss(MembershipInstruction):
    """A worker is newly known to be lost: nobody need wait for it. Its part goes to others with the next change."""

    worker: WorkerId


@dataclass(frozen=True)
class LoseDeparting(MembershipInstruction):
    """A worker that keeps key groups for others is lost: what they still need comes from the checkpoint."""

    worker: WorkerId


@dataclass(frozen=True)
class EndRescale(MembershipInstruction):
    """A rescale is over before it took effect."""

    rescale: int
    state: RescaleState
    message: str


@dataclass(frozen=True)
class TakeOver(MembershipInstruction):
    """A rescale also does what those that it replaces were to do."""

    rescale: int
    parallelism: Mapping[int, int]
