"""What the Spark application asks of a state worker: one frozen dataclass for each request.

A request is a Flight action whose type is the class name in snake case; its header is the dataclass as JSON, checked
field by field when it arrives. Tables (keys, changes) travel beside the header, named after their state variable.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from anabranch.core.errors import WorkerError
from anabranch.core.ids import checked_job_id
from anabranch.core.keygroups import MAX_KEY_GROUPS

#: The tables of a Read: the keys whose state is asked for; and by key group how many more rows than keys the task has.
KEYS = "keys"
FURTHER_ROWS = "further rows"
#: The fields of an Expiry.
_EXPIRY: dict[str, type] = {"variable": str, "column": str, "field": str, "up_to": int, "whole": bool}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a worker. The token travels beside it, in the headers of the call."""

    kinds: ClassVar[dict[str, type[Request]]] = {}

    def __init_subclass__(cls) -> None:
        Request.kinds[cls.kind()] = cls

    @classmethod
    def kind(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def header(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def fault(self) -> str:
        """What is wrong with values that have the right types; nothing if they are fine."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Health(Request):
    """Is the worker alive, and what does it hold? Answers with its id, pid, store and jobs."""


@dataclass(frozen=True, kw_only=True)
class JobRequest(Request):
    """What every request about a job carries."""

    job: str
    generation: int

    def fault(self) -> str:
        checked_job_id(self.job)
        return ""


@dataclass(frozen=True, kw_only=True)
class EpochRequest(JobRequest):
    """What every request about an epoch carries: its number, and which run of it this is."""

    epoch: int
    run: int


@dataclass(frozen=True, kw_only=True)
class OpenJob(JobRequest):
    """Take part in a job from an epoch on. Answers with the key groups whose state of that epoch is here already."""

    key_groups: int
    #: The epoch whose state the job resumes from, and [generation, run] that committed it, if there is one.
    committed_epoch: int
    committed_by: list[int]
    #: StageSpec.to_json of every stateful stage.
    stages: list[dict[str, Any]]
    checkpoint: str
    #: How often the driver looks after the worker: so long it may take to notice that the worker wants to leave.
    heartbeat_ms: int = 0

    def fault(self) -> str:
        if not 1 <= self.key_groups <= MAX_KEY_GROUPS:
            return f"has {self.key_groups} key groups, and not 1 to {MAX_KEY_GROUPS}"
        return super().fault() or ("names half a run" if len(self.committed_by) not in (0, 2) else "")


@dataclass(frozen=True, kw_only=True)
class Assign(JobRequest):
    """Hold exactly these key groups as of a committed epoch. State that is not here comes from files or other workers.

    Answers at once: state comes when it is needed, and in the background.
    """

    epoch: int
    #: Counts the assignments of a generation; one that was overtaken by a later one is refused.
    number: int
    groups: list[int]
    #: SnapshotFile and ChangeFile as JSON; changes in the order of their epochs.
    snapshot: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    #: Whether groups that go are kept for their new owners, until Release.
    freeze: bool = False
    #: Workers that keep some of the groups for us: {"address": …, "groups": […]}. All others come from files.
    peers: list[dict[str, Any]] = field(default_factory=list)
    #: Where groups are in a store that workers share, as HandOver answered.
    shared: list[dict[str, Any]] = field(default_factory=list)
    #: Whether state that other workers keep is also brought in the background. What comes from files always is.
    drain: bool = True
    #: How long to wait for another worker, before its groups come from files as well.
    peer_timeout_ms: int = 30_000

    def fault(self) -> str:
        offers = [*((peer, "address") for peer in self.peers), *((place, "incarnation") for place in self.shared)]
        for offer, place in offers:
            if not _matches(offer.get(place), str) or not _matches(offer.get("groups"), list[int]):
                return f"offers key groups without {place} and groups"
        for offer in self.shared:
            versions = offer.get("versions")
            if not _matches(versions, list[int]) or len(versions or ()) != len(offer["groups"]):
                return "offers key groups without a version of each"
        return super().fault()


@dataclass(frozen=True, kw_only=True)
class HandOver(JobRequest):
    """Give up all key groups but these, as of a committed epoch, in a store that workers share.

    Answers with where they are: {"shared": [{"incarnation": …, "groups": […], "versions": […]}]}.
    """

    epoch: int
    number: int
    keep: list[int]


@dataclass(frozen=True, kw_only=True)
class Wipe(JobRequest):
    """Remove all that is left of a job in a store that workers share. No worker takes part in the job."""


@dataclass(frozen=True, kw_only=True)
class Begin(EpochRequest):
    """Epoch `epoch` begins, so Spark has committed the one before."""

    #: The routing in force, for tasks that do not cache it.
    routing: dict[str, Any]
    #: The newest epoch that is durable: changes up to it need not be kept to be made durable.
    durable_epoch: int = -1
    #: How many rows may be brought in the background until the epoch ends; -1: any number.
    drain_rows: int = -1


@dataclass(frozen=True, kw_only=True)
class LookUpRoute(JobRequest):
    """Which route is in force? Asked by tasks that do not cache routes."""


@dataclass(frozen=True, kw_only=True)
class Read(EpochRequest):
    """The entries of the given keys in all state variables of a stage, as of the epoch before `epoch`."""

    stage: int
    #: The key groups of the task's partition that this worker owns.
    groups: list[int]
    #: Of other keys than those asked for, only those with a hash from the first to the last of these two count. A task
    #: whose keys are too many for one message asks for the others in ranges, each with the keys of the range.
    hashes: list[int] = field(default_factory=list)
    #: Also answer with every other row of these groups (complete output mode).
    rest: bool = False
    #: Also answer with the rows of these groups that are due: Expiry as JSON, at most one for each state variable.
    expired: list[dict[str, Any]] = field(default_factory=list)
    #: Also answer with every other key of these groups that has a row which is due, Expiry as JSON, and with the
    #: entries of these keys.
    due: dict[str, Any] | None = None

    def fault(self) -> str:
        for wanted in [*self.expired, *([] if self.due is None else [self.due])]:
            if not {"variable", "column", "field", "up_to"} <= wanted.keys() <= _EXPIRY.keys():
                return f"asks for what is due by {sorted(wanted)}, and not by {sorted(_EXPIRY)}"
            if not all(_matches(value, _EXPIRY[name]) for name, value in wanted.items()):
                return "asks for what is due with values of the wrong types"
        return super().fault()


@dataclass(frozen=True, kw_only=True)
class Write(EpochRequest):
    """Stage the changes of one task attempt, and seal it with the last chunk. Chunk 0 replaces what was staged."""

    stage: int
    partition: int
    attempt: int
    chunk: int
    last: bool
    #: Rows that the attempt has dropped because they came too late. One of the workers that it writes to is told.
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class Seals(EpochRequest):
    """Which attempts have been sealed in `epoch`?"""


@dataclass(frozen=True, kw_only=True)
class Prepare(EpochRequest):
    """Choose the attempts ([stage, partition, attempt]) that count, and make their changes durable.

    Answers with the change files: [epoch, file], of this epoch and of those before it that were not made durable.
    """

    chosen: list[list[int]]
    #: False: leave it to a later epoch.
    durable: bool = True
    #: The epochs before it, each with its run, that are to be made durable along with it.
    deferred: list[list[int]] = field(default_factory=list)

    def fault(self) -> str:
        return super().fault() or ("" if all(len(each) == 3 for each in self.chosen) else "chooses half an attempt")


@dataclass(frozen=True, kw_only=True)
class Commit(EpochRequest):
    """The manifest is written: the prepared changes are part of the state from now on. Answers as Progress does."""


@dataclass(frozen=True, kw_only=True)
class Abort(EpochRequest):
    """Forget what was staged in `epoch`."""


@dataclass(frozen=True, kw_only=True)
class Flush(JobRequest):
    """Make these committed epochs durable, each with its run; answers as Prepare does. Refused if one is not here."""

    deferred: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Progress(JobRequest):
    """How many key groups are still on their way, how many are kept for others, and what has been brought.

    Asked after all workers have been assigned their key groups, so what is on its way may be brought from now on.
    """


@dataclass(frozen=True, kw_only=True)
class Complete(JobRequest):
    """Bring everything that is on its way, and answer when it is here."""


@dataclass(frozen=True, kw_only=True)
class Release(JobRequest):
    """All key groups that were kept for others have arrived there. Means nothing after a later assignment."""

    #: That of the assignment after which they have arrived.
    number: int


@dataclass(frozen=True, kw_only=True)
class Describe(JobRequest):
    """Rows and bytes of state that this worker holds of the job, by stage and variable; and as Progress."""


@dataclass(frozen=True, kw_only=True)
class CloseJob(JobRequest):
    """Forget the job and free its memory and disk."""

    #: Whether the job goes on without this worker, which has handed over all that it had.
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True)
class Scan(JobRequest):
    """All rows of one state variable as of a committed epoch. A Flight ticket, not an action."""

    epoch: int
    stage: int
    variable: str


@dataclass(frozen=True, kw_only=True)
class FetchKeys(JobRequest):
    """From worker to worker: the entries of the given keys, of key groups that are kept for their new owner."""

    #: The epoch as of which they were frozen.
    as_of: int
    stage: int
    variable: str


@dataclass(frozen=True, kw_only=True)
class FetchGroups(FetchKeys):
    """From worker to worker: all rows of key groups that are kept for their new owner. A Flight ticket."""

    groups: list[int]
    #: Only those of keys that the last epochs changed, and only if epochs tend to change the same keys again.
    recent: bool = False
    #: Whether nobody waits for them.
    can_wait: bool = False


@dataclass(frozen=True, kw_only=True)
class FetchDue(FetchKeys):
    """From worker to worker: the entries of all keys with a row that is due, of key groups that are kept. A ticket."""

    groups: list[int]
    #: Where rows have their time, as in an Expiry.
    column: str
    field: str
    #: The first and the last time that counts.
    since: int
    up_to: int


#: Carried out by nobody: what others have in common.
for _shared in (JobRequest, EpochRequest):
    del Request.kinds[_shared.kind()]


def decode(kind: str, header: dict[str, Any]) -> Request:
    """Make a request from what came over the network, or say what is wrong with it."""
    request_class = Request.kinds.get(kind)
    if request_class is None:
        raise WorkerError(f"Unknown request {kind!r}. Make sure that driver and workers run the same version.")
    hints = _hints(kind)
    fields = {f.name: f for f in dataclasses.fields(request_class)}
    if unknown := sorted(set(header) - set(fields)):
        raise WorkerError(f"The request {kind!r} has unknown fields {unknown}. Run the same version everywhere.")
    for name, declared in fields.items():
        if name not in header:
            if declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING:
                raise WorkerError(f"The request {kind!r} lacks the field {name!r}. Run the same version everywhere.")
        elif not _matches(header[name], hints[name]):
            raise WorkerError(f"The field {name!r} of the request {kind!r} is not of type {hints[name]}.")
    request = request_class(**header)
    if fault := request.fault():
        raise WorkerError(f"The request {kind!r} {fault}. Run the same version of anabranch everywhere.")
    return request


@cache
def _hints(kind: str) -> dict[str, Any]:
    return typing.get_type_hints(Request.kinds[kind])


def _matches(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(item, arguments[1]) for item in value.values())
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, hint)
