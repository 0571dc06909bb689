"""The reports of a job: every document that it tells about itself, each field declared and described once.

HTTP answers with their OpenAPI description, progress reports, `query.status` and the tables of commands are derived
from these classes. A field whose Meta has a title is a column of the tables, under that title.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from anabranch.core.answers import DroppedRows, HeldVariable, VariableChanges
from anabranch.core.ids import WorkerId
from anabranch.core.membership_events import RescaleState

Count = Annotated[int, Meta(ge=0)]
#: A field that may be left out.
OptionalCount = Count | UnsetType
Positive = Annotated[int, Meta(ge=1)]
EpochOrNone = Annotated[int, Meta(ge=-1)]
#: A worker that drains still serves what it has not handed over.
WorkerState = Literal["joining", "serving", "draining"]


class JsonReport(Struct, frozen=True, kw_only=True, rename="camel"):
    """A document of named fields. Clients ignore the fields that they do not know."""


class ChangeReport(JsonReport, frozen=True, kw_only=True):
    """Workers that were lost, started or left before an epoch."""

    lost: list[WorkerId]
    started: list[WorkerId]
    left: list[WorkerId]
    key_groups: Annotated[Count, Meta(description="key groups that have another owner since")]
    route_version: Annotated[Count, Meta(description="the route since then")]
    duration_ms: Annotated[Count, Meta(description="how long the change took")]


class EpochReport(JsonReport, frozen=True, kw_only=True):
    """A committed epoch."""

    epoch: Count
    run: Annotated[Count, Meta(description="counts how often epochs were run by this driver, repetitions included")]
    route_version: Count
    workers: Count
    durable_epoch: Annotated[
        EpochOrNone, Meta(description="the last epoch that was safe when this one ended; -1: none yet")
    ]
    repairs: Annotated[list[ChangeReport], Meta(description="changes because of lost workers")]
    changes: Annotated[list[ChangeReport], Meta(description="all changes among workers before this epoch")]
    migrating: Annotated[bool, Meta(description="whether state was on its way to new owners")]
    changed_rows: Annotated[Count, Meta(description="entries of state that were set or removed")]
    changed_bytes: Annotated[Count, Meta(description="the size of the change files")]
    changed_variables: Annotated[list[VariableChanges], Meta(description="by state variable")]
    dropped_rows: Annotated[list[DroppedRows], Meta(description="by stage, rows that came too late")]
    late_rows: (
        Annotated[Count, Meta(description="late rows that were written to where writeStream.lateRows says")] | UnsetType
    ) = UNSET
    duration_ms: Annotated[dict[str, Count], Meta(description="how long each step took")]
    watermark_ms: Annotated[int | None, Meta(description="the watermark, in milliseconds since 1970")]


class WorkerReport(JsonReport, frozen=True, kw_only=True):
    """A state worker. Of one that joins or drains, not all is said."""

    id: Annotated[str, Meta(title="worker")]
    address: Annotated[str, Meta(title="address", description="host:port")]
    state: Annotated[WorkerState, Meta(title="state")] | UnsetType = UNSET
    key_groups: Annotated[OptionalCount, Meta(title="key groups", description="key groups that it owns")] = UNSET
    pending_groups: Annotated[OptionalCount, Meta(description="those of them that have not all arrived")] = UNSET
    frozen_groups: Annotated[OptionalCount, Meta(description="key groups that it keeps for their new owners")] = UNSET
    load: Annotated[
        OptionalCount, Meta(description="keys that it was asked for lately, and further rows of theirs")
    ] = UNSET
    rows: Annotated[OptionalCount, Meta(title="rows", description="entries of state")] = UNSET
    bytes: Annotated[OptionalCount, Meta(title="size", description="their size")] = UNSET
    pid: Annotated[OptionalCount, Meta(title="pid", description="its process on its machine")] = UNSET
    variables: Annotated[list[HeldVariable] | UnsetType, Meta(description="by state variable")] = UNSET


class StageReport(JsonReport, frozen=True, kw_only=True):
    """A stage, with state or without."""

    number: Annotated[Count, Meta(title="stage")]
    name: Annotated[str, Meta(title="name")]
    stateful: Annotated[bool, Meta(description="whether it has a key and state")]
    operations: Annotated[list[str], Meta(description="what it does")]
    parallelism: Annotated[Count, Meta(title="parallelism", description="its partitions; 0: as many as Spark chooses")]


class Moves(JsonReport, frozen=True, kw_only=True):
    """How much state a rescale or migration moves."""

    groups_moving: Annotated[Count, Meta(title="key groups moving", description="key groups that change their owner")]
    groups_pending: Annotated[Count, Meta(title="not yet there", description="those of them that have not arrived")]
    rows_fetched: Annotated[Count, Meta(description="entries of state that came because they were needed")]
    rows_drained: Annotated[Count, Meta(description="entries of state that came in the background")]
    bytes_fetched: Annotated[Count, Meta(description="the size of those that were needed")]
    bytes_drained: Annotated[Count, Meta(description="the size of those that came in the background")]
    change_ms: Annotated[
        Count, Meta(description="how long the change of the route held up the epoch that it came before")
    ]
    seconds: Annotated[
        float, Meta(ge=0, title="seconds", description="since it began; of one that is over, until then")
    ]


class RescaleReport(Moves, frozen=True, kw_only=True):
    """What was asked for, and how far it is."""

    number: Annotated[Count, Meta(title="rescale", description="counts the rescales of this driver")]
    what: Annotated[str, Meta(title="what", description="in words")]
    state: Annotated[RescaleState, Meta(title="state", description="the last three are final")]
    message: Annotated[str, Meta(description="why it failed or cannot complete, or what it was replaced by")]
    workers: Annotated[Positive | None, Meta(description="how many to have; null: as many as before")]
    parallelism: Annotated[
        dict[int, Count], Meta(description="by the number of the stage, how many partitions to have")
    ]
    started_epoch: Annotated[Count | None, Meta(description="the first epoch under the new route")]


class MigrationReport(Moves, frozen=True, kw_only=True):
    """A change of the route, and how much of the state that it moves has arrived."""

    number: Annotated[Count, Meta(title="migration")]
    strategy: Annotated[str, Meta(description="how state follows: the setting anabranch.migration")]
    route_version: Annotated[Count, Meta(title="route", description="the route since then")]
    first_epoch: Annotated[Count, Meta(description="the first epoch under that route")]
    started_at: Annotated[float, Meta(ge=0, description="in seconds since 1970")]
    joined: list[WorkerId]
    left: list[WorkerId]
    done: Annotated[bool, Meta(description="whether all state has arrived")]


class RouteReport(JsonReport, frozen=True, kw_only=True):
    """Which worker owns which key groups."""

    version: Count
    first_epoch: Annotated[Count, Meta(description="the epoch from which on it is in force")]
    workers: Annotated[list[WorkerId], Meta(description="ids")]
    owners: Annotated[list[Count], Meta(description="for each key group, the position of its owner in workers")]
    key_groups: Annotated[dict[WorkerId, Count], Meta(description="how many key groups each worker owns")]


class JobReport(JsonReport, frozen=True, kw_only=True):
    """The job as a whole."""

    id: Annotated[str, Meta(description="of Spark's query, the same after a restart")]
    run_id: Annotated[str, Meta(description="of this run of the query")]
    name: Annotated[str | None, Meta(description="the name of the query, if it has one")]
    checkpoint: Annotated[str, Meta(description="where the job's checkpoint is")]
    epoch: Annotated[EpochOrNone, Meta(description="the last committed epoch; -1: none yet")]
    durable_epoch: Annotated[EpochOrNone, Meta(description="the last epoch that is safe whatever dies; -1: none yet")]
    route_version: Annotated[Count, Meta(description="the route in force")]
    key_groups: Count
    workers: Annotated[Count, Meta(description="how many workers have key groups")]
    migrating: Annotated[bool, Meta(description="whether state is on its way to new owners")]
    rescale: Annotated[RescaleReport | None, Meta(description="the rescale that was asked for last")]


class StatusReport(JsonReport, frozen=True, kw_only=True):
    """The workers of a query, as `query.status` tells them."""

    workers: list[WorkerId]
    route_version: Count
    repairs: Annotated[Count, Meta(description="how many changes were made because of lost workers")]
    last_repair: ChangeReport | None
    migrating: bool
    last_snapshot: Annotated[Count | None, Meta(description="the epoch of the newest snapshot")]


class SavepointReport(JsonReport, frozen=True, kw_only=True):
    """A savepoint that is complete."""

    epoch: Annotated[Count, Meta(description="the epoch it is as of")]
    path: str


def as_json(document: Any) -> Any:
    """Reports, and lists and dictionaries of them, as what JSON is made of."""
    return msgspec.to_builtins(document, str_keys=True, enc_hook=_plain)


def properties(kind: type[Struct]) -> dict[str, dict[str, Any]]:
    """The fields of a Struct under their names in JSON, each with its JSON Schema: own fields before inherited ones."""
    own = {field.encode_name for field in msgspec.structs.fields(kind) if field.name in kind.__annotations__}
    declared: dict[str, dict[str, Any]] = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return dict(sorted(declared.items(), key=lambda each: each[0] not in own))


def _plain(value: Any) -> Any:
    """NumPy's numbers, as JSON has them."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} cannot be sent as JSON")
    return item()
