"""What is asked of a worker: one frozen type for each request, which names the type of its answer.

A request of an older run, however late it arrives, changes nothing; nor does a repeated one.
"""

from __future__ import annotations

from typing import Any, Generic, Never, TypeVar

from msgspec import Struct

from anabranch.core.answers import (
    Assigned,
    Done,
    Flushed,
    HandedOver,
    HeldState,
    Opened,
    Prepared,
    RouteTable,
    SealedAttempts,
    SharedOffer,
    TransferProgress,
    WorkerHealth,
)
from anabranch.core.errors import WorkerError
from anabranch.core.ids import (
    NO_EPOCH,
    Attempt,
    Epoch,
    Generation,
    JobId,
    Partition,
    Run,
    RunId,
    StageAttempt,
    StageNumber,
    checked_job_id,
)
from anabranch.core.keygroups import MAX_KEY_GROUPS
from anabranch.core.schemas import StageSpec
from anabranch.core.state_files import ChangeFile, SnapshotFile

#: The type of a request's answer. Never: rows come as a stream, or not at all.
A = TypeVar("A")


class Request(Struct, Generic[A], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of a worker."""


class JobRequest(Request[A], frozen=True, kw_only=True):
    """What every request about a job carries."""

    job: JobId
    generation: Generation

    def __post_init__(self) -> None:
        checked_job_id(self.job)


class EpochRequest(JobRequest[A], frozen=True, kw_only=True):
    """What every request about an epoch carries: its number, and which run of it this is."""

    epoch: Epoch
    run: Run


# --------------------------------------------------------------------------------------------------- taking part


class Health(Request[WorkerHealth], frozen=True, kw_only=True):
    """Is the worker alive, and what does it take part in?"""


class OpenJob(JobRequest[Opened], frozen=True, kw_only=True):
    """Take part in the job, whose state is that of the newest epoch that Spark committed.

    The epoch is folded at once. Key groups that come from elsewhere come as of this epoch, and would have no way back
    to an earlier one.
    """

    key_groups: int
    committed_epoch: Epoch
    #: From that epoch's manifest. None if, and only if, nothing is committed yet.
    committed_by: RunId | None
    #: Every stateful stage.
    stages: tuple[StageSpec, ...]
    checkpoint: str
    #: How often the driver looks after the worker: so long it may take to notice that the worker wants to leave.
    heartbeat_ms: int = 0

    def __post_init__(self) -> None:
        checked_job_id(self.job)
        if not 1 <= self.key_groups <= MAX_KEY_GROUPS:
            raise ValueError(f"has {self.key_groups} key groups, and not 1 to {MAX_KEY_GROUPS}")
        if (self.committed_by is None) != (self.committed_epoch == NO_EPOCH):
            raise WorkerError(
                f"Epoch {self.committed_epoch} cannot have been committed by {self.committed_by}; "
                "open the job with the run that the epoch's manifest names."
            )


class CloseJob(JobRequest[Done], frozen=True, kw_only=True):
    """Forget the job and free its memory and disk."""

    #: Whether the job goes on without this worker, which has handed over all that it had.
    goes_on: bool = False


class Wipe(JobRequest[Done], frozen=True, kw_only=True):
    """Remove all that is left of a job in a store that workers share. No worker takes part in the job."""


# ------------------------------------------------------------------------------------------------ the ownership


class PeerOffer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Key groups that a worker keeps for the one that is told of it."""

    address: str
    groups: tuple[int, ...]


class Assign(JobRequest[Assigned], frozen=True, kw_only=True):
    """Hold exactly these key groups as of a committed epoch. State that is not here comes from files or other workers.

    Answers at once: state comes when it is needed, and in the background.
    """

    epoch: Epoch
    #: Counts the assignments of a generation; one that was overtaken by a later one is refused.
    number: int
    groups: tuple[int, ...]
    snapshot: tuple[SnapshotFile, ...]
    #: In the order of their epochs.
    changes: tuple[ChangeFile, ...]
    #: Whether groups that go are kept for their new owners, until Release.
    freeze: bool = False
    #: Workers that keep some of the groups for this one. All others come from files.
    peers: tuple[PeerOffer, ...] = ()
    #: Where groups are in a store that workers share, as HandOver answered.
    shared: tuple[SharedOffer, ...] = ()
    #: Whether state that other workers keep is also brought in the background. What comes from files always is.
    drain: bool = True
    #: How long to wait for another worker, before its groups come from files as well.
    peer_timeout_ms: int = 30_000


class HandOver(JobRequest[HandedOver], frozen=True, kw_only=True):
    """Give up all key groups but these, as of a committed epoch, in a store that workers share."""

    epoch: Epoch
    number: int
    keep: tuple[int, ...]


class ReportProgress(JobRequest[TransferProgress], frozen=True, kw_only=True):
    """How far are the key groups of the last assignment?

    Asked after all workers have been assigned their key groups, so what is on its way may be brought from now on.
    """


class Complete(JobRequest[TransferProgress], frozen=True, kw_only=True):
    """Bring everything that is on its way, and answer when it is here."""


class Release(JobRequest[Done], frozen=True, kw_only=True):
    """All key groups that were kept for others have arrived there. Means nothing after a later assignment."""

    #: That of the assignment after which they have arrived.
    number: int


# ----------------------------------------------------------------------------------------------------- the epoch


class Begin(EpochRequest[Done], frozen=True, kw_only=True):
    """Run an epoch. It proves that Spark has committed the one before."""

    #: The routing in force, for tasks that do not cache it.
    routing: RouteTable | None = None
    #: The newest epoch that is durable: changes up to it need not be kept to be made durable.
    durable_epoch: Epoch = NO_EPOCH
    #: How many rows may be brought in the background until the epoch ends; -1: any number.
    drain_rows: int = -1


class LookUpRoute(JobRequest[RouteTable], frozen=True, kw_only=True):
    """Which route is in force? Asked by tasks that do not cache routes."""


class Expiry(Struct, frozen=True, forbid_unknown_fields=True):
    """Which rows of a state variable are due: those in which a time is not after another one.

    The time is in a column of the variable's rows, of its key, sub-key or value, or in a field of one (else ""): a
    timestamp, which counts in microseconds, or a number that counts as the reader likes. A null is never due.
    """

    variable: str
    column: str
    field: str
    up_to: int
    #: Whether rows of key groups of which some state is still on its way are brought now. Else they are found later.
    whole: bool = True


class Read(EpochRequest[Done], frozen=True, kw_only=True):
    """The entries of the given keys in all state variables of a stage, as of the epoch before `epoch`."""

    stage: StageNumber
    #: The key groups of the task's partition that this worker owns.
    groups: tuple[int, ...]
    #: Of other keys than those asked for, only those with a hash from the first to the last of these two count. A task
    #: whose keys are too many for one message asks for the others in ranges, each with the keys of the range.
    hashes: tuple[int, int] | None = None
    #: Also answer with every other row of these groups (complete output mode).
    rest: bool = False
    #: Also answer with the rows of these groups that are due: at most one for each state variable.
    expired: tuple[Expiry, ...] = ()
    #: Also answer with every other key of these groups that has a row which is due, and with the entries of these keys.
    due: Expiry | None = None


class Write(EpochRequest[Done], frozen=True, kw_only=True):
    """Stage the changes of one task attempt, and seal it with the last chunk. Chunk 0 replaces what was staged."""

    stage: StageNumber
    partition: Partition
    attempt: Attempt
    chunk: int
    last: bool
    #: Rows that the attempt has dropped because they came too late. One of the workers that it writes to is told.
    late: int = 0

    @property
    def staged(self) -> StageAttempt:
        return StageAttempt(self.stage, self.partition, self.attempt)


class ReportSeals(EpochRequest[SealedAttempts], frozen=True, kw_only=True):
    """Which attempts are sealed here?"""


class Prepare(EpochRequest[Prepared], frozen=True, kw_only=True):
    """Make the changes of the chosen attempts durable; they are all those that concern this worker."""

    chosen: frozenset[StageAttempt]
    #: False: leave it to a later epoch.
    durable: bool = True
    #: The epochs before it, each with its run, that are to be made durable along with it.
    deferred: tuple[tuple[Epoch, Run], ...] = ()


class Commit(EpochRequest[TransferProgress], frozen=True, kw_only=True):
    """The epoch's manifest is written: the prepared changes are part of the state from now on."""


class Abort(EpochRequest[Done], frozen=True, kw_only=True):
    """The run has failed; nothing of it counts."""


class Flush(JobRequest[Flushed], frozen=True, kw_only=True):
    """Make these committed epochs durable, each with its run. Refused if one is not here."""

    deferred: tuple[tuple[Epoch, Run], ...]


# -------------------------------------------------------------------------------------------------- a look inside


class Describe(JobRequest[HeldState], frozen=True, kw_only=True):
    """What does this worker hold of the job?"""


class Scan(JobRequest[Never], frozen=True, kw_only=True):
    """All rows of one state variable as of a committed epoch."""

    epoch: Epoch
    stage: StageNumber
    variable: str


# ------------------------------------------------------------------------------------------ from worker to worker


class PeerRequest(JobRequest[A], frozen=True, kw_only=True):
    """What a worker asks of another one that keeps key groups for it."""

    #: The epoch as of which they were frozen.
    as_of: Epoch
    stage: StageNumber
    variable: str


class FetchKeys(PeerRequest[Done], frozen=True, kw_only=True):
    """The entries of the given keys, of key groups that are kept for their new owner."""


class FetchGroups(PeerRequest[Never], frozen=True, kw_only=True):
    """All rows of key groups that are kept for their new owner."""

    groups: tuple[int, ...]
    #: Only those of keys that the last epochs changed, and only if epochs tend to change the same keys again.
    recent: bool = False
    #: Whether nobody waits for them.
    can_wait: bool = False


class FetchDue(PeerRequest[Never], frozen=True, kw_only=True):
    """The entries of all keys with a row that is due, of key groups that are kept for their new owner."""

    groups: tuple[int, ...]
    #: Where rows have their time, as in an Expiry.
    column: str
    field: str
    #: The first and the last time that counts.
    since: int
    up_to: int


#: Requests that carry tables, and are answered with tables.
Exchange = Read | Write | FetchKeys
#: Requests whose answer is a stream of rows.
RowRequest = Scan | FetchGroups | FetchDue
#: Every request that a worker answers.
REQUESTS: tuple[type[Request[Any]], ...] = (
    *(Health, OpenJob, CloseJob, Wipe),
    *(Assign, HandOver, ReportProgress, Complete, Release),
    *(Begin, LookUpRoute, Read, Write, ReportSeals, Prepare, Commit, Abort, Flush),
    *(Describe, Scan),
    *(FetchKeys, FetchGroups, FetchDue),
)
