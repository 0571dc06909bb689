"""The table of the HTTP API: each endpoint, what it takes, does and answers; and its OpenAPI description."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from anabranch.core.reports import (
    EpochReport,
    JobReport,
    JsonReport,
    MigrationReport,
    RescaleReport,
    RouteReport,
    SavepointReport,
    StageReport,
    WorkerReport,
    properties,
)
from anabranch.core.settings import MAX_PARALLELISM, MAX_WORKERS

API_VERSION = "1"
EPOCHS_SHOWN = 20
EPOCHS_SHOWN_MAX = 1000
#: Stages are numbered from 0 at the source, and no plan comes near this many.
STAGE_NUMBER_MAX = 100_000
#: Longer names, addresses and paths are mistakes.
TEXT_CHARACTERS_MAX = 4096


class JobControl(Protocol):
    """What the HTTP API asks of a running job: see ENDPOINTS. Any thread may call any method, several at a time.

    Errors of `core.errors` reach the client with their text.
    """

    def job(self) -> JobReport: ...

    def stages(self) -> list[StageReport]: ...

    def workers(self) -> list[WorkerReport]: ...

    def route(self) -> RouteReport: ...

    def epochs(self, limit: int) -> list[EpochReport]: ...

    def migrations(self) -> list[MigrationReport]: ...

    def rescale(self, workers: int | None, parallelism: int | None, stage: int | str | None) -> RescaleReport: ...

    def scale_out(self, stage: int | str | None) -> RescaleReport: ...

    def drain(self, worker: str) -> RescaleReport: ...

    def join(self, address: str) -> WorkerReport:
        """Let a running worker take part. Of one that takes part already, say so: a worker may ask twice."""

    def savepoint(self, path: str) -> SavepointReport: ...

    def stop(self) -> None: ...


# ---------------------------------------------------------------------------------------- what endpoints take

_TEXT = Meta(min_length=1, max_length=TEXT_CHARACTERS_MAX)
#: The title says how a text must look, for the sentence that refuses others.
_StageName = Annotated[str, _TEXT, Meta(title="the name of a stage")]
_Stage = Annotated[int, Meta(ge=0, le=STAGE_NUMBER_MAX)] | _StageName
_Workers = Annotated[int, Meta(ge=1, le=MAX_WORKERS, description="how many workers the job is to have", examples=[4])]
_Parallelism = Annotated[
    int,
    Meta(ge=1, le=MAX_PARALLELISM, description="partitions of the stage, or of all stateful stages", examples=[8]),
]


class Values(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of a request to one endpoint; this one has none."""


class EpochsValues(Values, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=EPOCHS_SHOWN_MAX, description="how many epochs", examples=[5])] = EPOCHS_SHOWN


class RescaleValues(Values, frozen=True, kw_only=True):
    workers: _Workers | UnsetType = UNSET
    parallelism: _Parallelism | UnsetType = UNSET
    stage: Annotated[_Stage, Meta(description="number or name of a stateful stage", examples=[3])] | UnsetType = UNSET


class ScaleValues(Values, frozen=True, kw_only=True):
    stage: Annotated[_Stage, Meta(description="number or name of a stateful stage", examples=[3])] | UnsetType = UNSET


class ScaleByGetValues(Values, frozen=True, kw_only=True):
    stage: Annotated[
        _Stage, Meta(description="number or name of the stateful stage that needs more capacity", examples=[3])
    ]


class DrainValues(Values, frozen=True, kw_only=True):
    worker: Annotated[str, _TEXT, Meta(title="the id of a worker", description="id of a worker", examples=["worker-3"])]


class JoinValues(Values, frozen=True, kw_only=True):
    address: Annotated[
        str,
        _TEXT,
        Meta(
            title="host:port",
            description="where the driver reaches the worker, as host:port",
            examples=["10.0.0.5:7077"],
            # A port from 1 to 65535, so that it need not be checked elsewhere.
            pattern=(
                r"^(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
                r":(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
            ),
        ),
    ]


class SavepointValues(Values, frozen=True, kw_only=True):
    path: Annotated[
        str,
        _TEXT,
        Meta(
            title="a path or URL",
            description="where the savepoint goes: a new path or URL, as the driver sees it",
            examples=["savepoints/before-upgrade"],
        ),
    ]


# ---------------------------------------------------------------------------- answers that are not about the job


class IndexReport(JsonReport, frozen=True, kw_only=True):
    """The job, and the paths of the API by name."""

    job: JobReport
    links: Annotated[dict[str, str], Meta(description="paths")]


class StoppingReport(JsonReport, frozen=True, kw_only=True):
    """The job is about to stop."""

    stopping: Annotated[bool, Meta(extra_json_schema={"const": True})]


class HealthReport(JsonReport, frozen=True, kw_only=True):
    """The API answers."""

    status: Literal["ok"]


class ErrorReport(JsonReport, frozen=True, kw_only=True):
    """What went wrong, and what to do."""

    error: str


@dataclass(frozen=True)
class Endpoint:
    """One thing that can be asked of the job."""

    method: str
    path: str
    name: str
    summary: str
    #: A kind of report, or a list of one.
    answer: Any
    #: Asks the job, with the values that the endpoint takes. None: the server answers by itself.
    call: Callable[[JobControl, Any], Any] | None = None
    takes: type[Values] = Values
    #: Where the values are.
    place: Literal["path", "query", "body"] = "body"
    #: At least one of these must be given.
    one_of: tuple[str, ...] = ()
    changes: bool = False
    status: int = 200
    #: Needs no token, wherever the client is.
    is_public: bool = False


def _rescale(control: JobControl, values: RescaleValues) -> RescaleReport:
    return control.rescale(
        workers=None if values.workers is UNSET else values.workers,
        parallelism=None if values.parallelism is UNSET else values.parallelism,
        stage=None if values.stage is UNSET else values.stage,
    )


def _scale_out(control: JobControl, values: ScaleValues | ScaleByGetValues) -> RescaleReport:
    return control.scale_out(None if values.stage is UNSET else values.stage)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("GET", "/", "index", "The job, and where to find the rest.", IndexReport),
    Endpoint("GET", "/job", "job", "The job as a whole.", JobReport, lambda c, _: c.job()),
    Endpoint("GET", "/stages", "stages", "The stages of the job.", list[StageReport], lambda c, _: c.stages()),
    Endpoint("GET", "/workers", "workers", "The workers.", list[WorkerReport], lambda c, _: c.workers()),
    Endpoint("GET", "/route", "route", "Which worker owns which key groups.", RouteReport, lambda c, _: c.route()),
    Endpoint(
        "GET",
        "/epochs",
        "epochs",
        "The last epochs, newest first.",
        list[EpochReport],
        lambda c, v: c.epochs(v.limit),
        EpochsValues,
        "query",
    ),
    Endpoint(
        "GET",
        "/migrations",
        "migrations",
        "The changes of the route since the driver started, newest first.",
        list[MigrationReport],
        lambda c, _: c.migrations(),
    ),
    Endpoint("GET", "/health", "health", "Whether the API answers. Needs no token.", HealthReport, is_public=True),
    Endpoint("GET", "/openapi.json", "openapi", "This description.", dict[str, Any]),
    Endpoint(
        "POST",
        "/rescale",
        "rescale",
        "Change the number of workers, the parallelism, or both, while the job runs.",
        RescaleReport,
        _rescale,
        RescaleValues,
        one_of=("workers", "parallelism"),
        changes=True,
    ),
    Endpoint(
        "GET",
        "/scale",
        "scale_by_get",
        "Give a stage one worker's worth more capacity. GET is for this machine only.",
        RescaleReport,
        _scale_out,
        ScaleByGetValues,
        "query",
        changes=True,
    ),
    Endpoint(
        "POST",
        "/scale",
        "scale",
        "Add a worker, and give a stage one worker's worth more capacity, if one is named.",
        RescaleReport,
        _scale_out,
        ScaleValues,
        "query",
        changes=True,
    ),
    Endpoint(
        "POST",
        "/workers",
        "join",
        "Let a running worker take part in the job.",
        WorkerReport,
        lambda c, v: c.join(v.address),
        JoinValues,
        changes=True,
    ),
    Endpoint(
        "POST",
        "/workers/{worker}/drain",
        "drain",
        "Move everything away from a worker, so that it can leave.",
        RescaleReport,
        lambda c, v: c.drain(v.worker),
        DrainValues,
        "path",
        changes=True,
    ),
    Endpoint(
        "POST",
        "/savepoint",
        "savepoint",
        "Save the job in a place of its own. The answer comes when that is done.",
        SavepointReport,
        lambda c, v: c.savepoint(v.path),
        SavepointValues,
        changes=True,
    ),
    Endpoint(
        "POST",
        "/stop",
        "stop",
        "Stop the job after the epoch that is running.",
        StoppingReport,
        changes=True,
        status=202,
    ),
)

PATHS = tuple(dict.fromkeys(each.path for each in ENDPOINTS))
#: A GET that changes something must be looked at as closely as a POST.
CHANGED_BY_GET = frozenset(each.path for each in ENDPOINTS if each.changes and each.method == "GET")
PUBLIC = frozenset(each.path for each in ENDPOINTS if each.is_public)
#: Paths by name; where GET and POST do the same, under one name.
LINKS = {each.name: each.path for each in ENDPOINTS if each.path not in CHANGED_BY_GET or each.method != "GET"}

# ---------------------------------------------------------------------------------------------------- OpenAPI

_REFUSALS = {
    "400": "The request is wrong, or asks for what cannot be done.",
    "401": "A token is needed, or the one that was sent is wrong.",
    "403": "A request from a web page, under a foreign name, or a change by GET from another machine.",
    "404": "There is no such path; the sentence names the nearest.",
    "405": "The path does not know this method; the header Allow names those that it knows.",
    "408": "The body did not arrive in time.",
    "409": "The job is in no state for this.",
    "413": "The body is too large.",
    "500": "An error of the server; its log has the details.",
    "503": "A worker cannot be reached, the server has too much to do, or the job is stopping.",
}


def description() -> dict[str, Any]:
    """Describes the whole API, as an OpenAPI document."""
    kinds = [*(endpoint.answer for endpoint in ENDPOINTS), ErrorReport]
    (*answers, error), schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, answer in zip(ENDPOINTS, answers, strict=True):
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, answer, error)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Anabranch job control",
            "version": API_VERSION,
            "description": "A running job: what it does, and how to rescale, save and stop it.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "The job's anabranch.token."}
            },
        },
    }
    # Clients name their classes after schemas: Job, not JobReport.
    named: dict[str, Any] = json.loads(json.dumps(document).replace('Report"', '"'))
    return named


def _operation(endpoint: Endpoint, answer: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": [],
        "responses": {
            str(endpoint.status): {"description": "Done.", "content": _json(answer)},
            **{status: {"description": doc, "content": _json(error)} for status, doc in _REFUSALS.items()},
        },
        # An empty requirement: from loopback the token is not always needed.
        "security": [{}] if endpoint.is_public else [{"token": []}, {}],
    }
    body = msgspec.json.schema(endpoint.takes)["$defs"][endpoint.takes.__name__]
    if endpoint.place == "body" and body["properties"]:
        if endpoint.one_of:
            body["anyOf"] = [{"required": [name]} for name in endpoint.one_of]
        is_required = bool(body["required"] or endpoint.one_of)
        operation["requestBody"] = {"required": is_required, "content": _json(body)}
    else:
        for name, schema in properties(endpoint.takes).items():
            parameter = {"name": name, "in": endpoint.place, "required": name in body["required"]}
            operation["parameters"].append({**parameter, "description": schema["description"], "schema": schema})
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
