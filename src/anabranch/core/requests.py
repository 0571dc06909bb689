"""What the driver and its tasks ask of a worker in an epoch, and what the worker's machine makes of it.

An epoch that is run again keeps its number, so a *run* tells its runs apart: the driver counts the runs of all epochs
within its generation. A request of an older run, however late it arrives, changes nothing; nor does a repeated one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from anabranch.core.errors import WorkerError
from anabranch.core.ids import NO_EPOCH, Attempt, Epoch, Generation, Partition, StageNumber

#: Counts the runs of epochs within a generation, from 0.
Run = NewType("Run", int)

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


class Refusal(StrEnum):
    """Why a worker does not do what it was asked to."""

    FENCED = "fenced"  #: a newer generation has opened the job; the sender must stop
    NOT_OPEN = "not_open"  #: the sender's generation has not opened the job here; open it first
    WRONG_EPOCH = "wrong_epoch"  #: the request is for an epoch or a run that is not the current one
    NOT_SEALED = "not_sealed"  #: an attempt is not there, or not complete
    WRONG_STEP = "wrong_step"  #: the epoch is prepared already, not prepared yet, or committed already


# ---------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, kw_only=True)
class Request:
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Open(Request):
    """Take part in the job, whose state is that of the newest epoch that Spark committed.

    The epoch is folded at once. Key groups that come from elsewhere come as of this epoch, and would have no way back
    to an earlier one.
    """

    committed_epoch: Epoch
    #: From that epoch's manifest. None if, and only if, nothing is committed yet.
    committed_by: RunId | None

    def __post_init__(self) -> None:
        if (self.committed_by is None) != (self.committed_epoch == NO_EPOCH):
            raise WorkerError(
                f"Epoch {self.committed_epoch} cannot have been committed by {self.committed_by}; "
                "open the job with the run that the epoch's manifest names."
            )


@dataclass(frozen=True, kw_only=True)
class EpochRequest(Request):
    epoch: Epoch
    run: Run


@dataclass(frozen=True, kw_only=True)
class Begin(EpochRequest):
    """Run an epoch. It proves that Spark has committed the one before."""


@dataclass(frozen=True, kw_only=True)
class Read(EpochRequest):
    """A task wants the state from before the epoch."""


@dataclass(frozen=True, kw_only=True)
class Stage(EpochRequest):
    """An attempt begins to send its changes; ``sealed`` if they come whole, with this request."""

    attempt: StageAttempt
    sealed: bool = False


@dataclass(frozen=True, kw_only=True)
class Seal(EpochRequest):
    """An attempt has sent all of its changes."""

    attempt: StageAttempt


@dataclass(frozen=True, kw_only=True)
class ReportSeals(EpochRequest):
    """The driver wants to know which attempts are sealed here."""


@dataclass(frozen=True, kw_only=True)
class Prepare(EpochRequest):
    """Make the changes of the chosen attempts durable; they are all those that concern this worker."""

    chosen: frozenset[StageAttempt]


@dataclass(frozen=True, kw_only=True)
class Commit(EpochRequest):
    """The epoch's manifest is written: the prepared changes are part of the state."""


@dataclass(frozen=True, kw_only=True)
class Abort(EpochRequest):
    """The run has failed; nothing of it counts."""


# ------------------------------------------------------------------------------------------------ instructions


class Instruction:
    """What the process around the machine is to do, in the order given. No instructions: it is done already."""


@dataclass(frozen=True)
class ServeState(Instruction):
    """Answer the read with the state as of this epoch."""

    epoch: Epoch


@dataclass(frozen=True)
class AcceptChanges(Instruction):
    """Take in what the attempt sends."""

    attempt: StageAttempt


@dataclass(frozen=True)
class DiscardAttempt(Instruction):
    """Forget what the attempt has sent."""

    attempt: StageAttempt


@dataclass(frozen=True)
class AnswerSeals(Instruction):
    """Answer with the attempts that are sealed here."""

    attempts: frozenset[StageAttempt]


@dataclass(frozen=True)
class WriteChangeFiles(Instruction):
    """Write the attempts' changes to the checkpoint, under a name that holds epoch and run, and answer with the files.

    It comes again when the request is repeated; writing the same files again is harmless, and so is answering from
    memory.
    """

    epoch: Epoch
    run: RunId
    attempts: tuple[StageAttempt, ...]


@dataclass(frozen=True)
class AddLayer(Instruction):
    """Put the prepared changes on top of the state, as a layer of their own."""

    epoch: Epoch


@dataclass(frozen=True)
class DropLayersAfter(Instruction):
    """Drop every layer that is later than this epoch."""

    epoch: Epoch


@dataclass(frozen=True)
class FoldUpTo(Instruction):
    """Merge the layers up to this epoch into the base: they will not be rolled back any more."""

    epoch: Epoch


@dataclass(frozen=True)
class ResetState(Instruction):
    """Forget all local state: it is not that of this epoch. It comes back from its sources or the checkpoint."""

    epoch: Epoch


@dataclass(frozen=True)
class Refuse(Instruction):
    """Change nothing and answer with the reason."""

    reason: Refusal
    message: str
