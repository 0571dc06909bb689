"""What happens to the driver's epochs, and what the driver's machine makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from anabranch.core.answers import Refusal
from anabranch.core.ids import Epoch, Run, StageAttempt, StagePartition, WorkerId
from anabranch.core.state_files import ChangeFile


class Failure(StrEnum):
    """Why an epoch failed."""

    FENCED = "fenced"  #: a newer driver has taken over; this one must stop, and must not let Spark commit the epoch
    REFUSED = "refused"  #: a worker is lost, or not where the driver thinks it is; run the epoch again without it
    INCOMPLETE = "incomplete"  #: some tasks' changes are missing, however often they run
    SINK = "sink"  #: Spark's job, or the sink's write, failed
    MANIFEST = "manifest"  #: the manifest may not have been written


# ------------------------------------------------------------------------------------------------------ events


class EpochEvent:
    """Something that happened."""


@dataclass(frozen=True)
class EpochBegun(EpochEvent):
    """Spark hands over an epoch, for the first time or again."""

    epoch: Epoch
    workers: frozenset[WorkerId]
    #: The workers that own the key groups of each task, from the route.
    owners: Mapping[StagePartition, frozenset[WorkerId]]


@dataclass(frozen=True)
class RunEvent(EpochEvent):
    """Something that belongs to a run. Of a run that is over, it is ignored."""

    run: Run


@dataclass(frozen=True)
class WorkerBegan(RunEvent):
    worker: WorkerId


@dataclass(frozen=True)
class TasksRan(RunEvent):
    """The tasks that RunMissing asked for have finished, or tasks have that run apart from the sink's write."""


@dataclass(frozen=True)
class SinkWritten(RunEvent):
    """Spark's job has finished, the sink's write included."""


@dataclass(frozen=True)
class SinkFailed(RunEvent):
    message: str


@dataclass(frozen=True)
class SealsReported(RunEvent):
    worker: WorkerId
    attempts: frozenset[StageAttempt]


@dataclass(frozen=True)
class WorkerPrepared(RunEvent):
    worker: WorkerId
    #: What the manifest is to say of the worker's change files.
    files: tuple[tuple[Epoch, ChangeFile], ...]


@dataclass(frozen=True)
class ManifestWritten(RunEvent):
    """The commit point."""


@dataclass(frozen=True)
class ManifestFailed(RunEvent):
    """The manifest was not written, or nobody knows; ``fenced`` if a newer generation has been claimed."""

    message: str
    fenced: bool = False


@dataclass(frozen=True)
class WorkerCommitted(RunEvent):
    worker: WorkerId


@dataclass(frozen=True)
class WorkerRefused(RunEvent):
    worker: WorkerId
    reason: Refusal
    message: str


# ------------------------------------------------------------------------------------------------ instructions


@dataclass(frozen=True)
class EpochInstruction:
    """What the process around the machine is to do."""

    epoch: Epoch
    run: Run


@dataclass(frozen=True)
class BeginOn(EpochInstruction):
    worker: WorkerId


@dataclass(frozen=True)
class RunTasks(EpochInstruction):
    """Start Spark's job, the sink's write included: every worker is ready for its tasks."""


@dataclass(frozen=True)
class RunMissing(EpochInstruction):
    """Run these tasks (again), apart from the sink."""

    tasks: frozenset[StagePartition]


@dataclass(frozen=True)
class CollectSeals(EpochInstruction):
    worker: WorkerId


@dataclass(frozen=True)
class PrepareOn(EpochInstruction):
    worker: WorkerId
    #: The part of the epoch's choice that concerns the worker.
    chosen: frozenset[StageAttempt]


@dataclass(frozen=True)
class WriteManifest(EpochInstruction):
    """Write the manifest under a name that holds epoch, generation and run; of several, the greatest run counts."""

    files: tuple[tuple[Epoch, ChangeFile], ...]


@dataclass(frozen=True)
class CommitOn(EpochInstruction):
    worker: WorkerId


@dataclass(frozen=True)
class AbortOn(EpochInstruction):
    worker: WorkerId


@dataclass(frozen=True)
class FinishEpoch(EpochInstruction):
    """The epoch is part of the state: let Spark commit it. The lost workers' groups come from the checkpoint."""

    lost: frozenset[WorkerId]


@dataclass(frozen=True)
class FailEpoch(EpochInstruction):
    """Nothing of the run counts: do not let Spark commit it."""

    reason: Failure
    message: str
    #: The workers that were lost or refused.
    workers: frozenset[WorkerId] = frozenset()
