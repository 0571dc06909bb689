"""What a worker answers: one frozen type for each kind of answer. `core.requests` says which request gets which."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from anabranch.core.ids import Epoch, JobId, StageAttempt, StageNumber, WorkerId
from anabranch.core.state_files import ChangeFile


class Refusal(StrEnum):
    """Why a worker does not do what it was asked to."""

    FENCED = "fenced"  #: a newer generation has opened the job; the sender must stop
    NOT_OPEN = "not_open"  #: the sender's generation has not opened the job here; open it first
    WRONG_EPOCH = "wrong_epoch"  #: the request is for an epoch or a run that is not the current one
    NOT_SEALED = "not_sealed"  #: an attempt is not there, or not complete
    INCOMPLETE = "incomplete"  #: an earlier part of the attempt's changes has not come
    WRONG_STEP = "wrong_step"  #: the epoch is prepared already, not prepared yet, or committed already


class Done(Struct, frozen=True):
    """The request has been carried out, and there is nothing more to say but what tables may say."""


class WorkerHealth(Struct, frozen=True, kw_only=True):
    """A worker is alive."""

    worker: WorkerId
    pid: int
    #: Where it keeps state.
    store: str
    #: The jobs that it takes part in, but for those whose state here is of no use.
    jobs: frozenset[JobId]
    #: Whether it has been told to stop, and waits until others have its key groups.
    leaving: bool = False


class Opened(Struct, frozen=True, kw_only=True):
    """The worker takes part in the job."""

    #: The key groups whose state of the epoch is here already.
    groups: tuple[int, ...]


class TransferProgress(Struct, frozen=True, kw_only=True):
    """How far the key groups of an assignment are, and what has been brought since the job was opened."""

    #: The number of the assignment that was carried out last.
    assignment: int
    #: How many key groups are still on their way, and how many are kept for others.
    pending_groups: int
    frozen_groups: int
    #: What came on demand, and what came in the background.
    fetched_rows: int = 0
    fetched_bytes: int = 0
    drained_rows: int = 0
    drained_bytes: int = 0


class Assigned(Struct, frozen=True, kw_only=True):
    """The worker holds the key groups that it was given."""

    #: How many came and went.
    adopted: int
    dropped: int
    progress: TransferProgress


class SharedOffer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Key groups that nobody uses, in a store that workers share."""

    incarnation: str
    groups: tuple[int, ...]
    #: Of each of these key groups. A store that has an older version of one was set back.
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.versions) != len(self.groups):
            raise ValueError("offers key groups without a version of each")


class HandedOver(Struct, frozen=True, kw_only=True):
    """The worker has given up key groups, and left these in the shared store."""

    offers: tuple[SharedOffer, ...]


class RouteTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A route as tasks need it: for each key group the index of its owner, and the address of each owner."""

    workers: tuple[WorkerId, ...]
    addresses: tuple[str, ...]
    owners: tuple[int, ...]


class SealedAttempts(Struct, frozen=True, kw_only=True):
    """The attempts whose changes are complete on a worker."""

    attempts: frozenset[StageAttempt]


class VariableChanges(Struct, frozen=True, kw_only=True):
    """How much an epoch changes one state variable."""

    stage: Annotated[StageNumber, Meta(ge=0, description="the number of a stage")]
    variable: str
    put: Annotated[int, Meta(ge=0, description="changes that set an entry")]
    removed: Annotated[int, Meta(ge=0, description="changes that remove something")]


class DroppedRows(Struct, frozen=True, kw_only=True):
    """Rows that the tasks of a stage have dropped because they came too late."""

    stage: Annotated[StageNumber, Meta(ge=0, description="the number of a stage")]
    rows: Annotated[int, Meta(ge=0)]


class Flushed(Struct, frozen=True, kw_only=True):
    """Changes are durable: the files, each with the epoch that it belongs to."""

    files: tuple[tuple[Epoch, ChangeFile], ...]


class Prepared(Struct, frozen=True, kw_only=True):
    """The chosen changes are ready to be committed."""

    #: What has become durable with the request: changes of this epoch, and of those before it that were not durable.
    files: tuple[tuple[Epoch, ChangeFile], ...] = ()
    #: How many changes there are, in all and by state variable, and how many rows came too late.
    rows: int = 0
    variables: tuple[VariableChanges, ...] = ()
    late: tuple[DroppedRows, ...] = ()


class HeldVariable(Struct, frozen=True, kw_only=True):
    """What a worker holds of one state variable."""

    stage: Annotated[StageNumber, Meta(ge=0, description="the number of a stage")]
    variable: str
    rows: Annotated[int, Meta(ge=0, description="of the key groups that the worker owns")]
    bytes: Annotated[int, Meta(ge=0, description="of all that the worker holds")]


class HeldState(Struct, frozen=True, kw_only=True):
    """What a worker holds of a job."""

    progress: TransferProgress
    #: The key groups that were asked for lately, each with how many of its keys, and further rows.
    load: tuple[tuple[int, float], ...]
    variables: tuple[HeldVariable, ...]
