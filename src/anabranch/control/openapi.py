"""The OpenAPI description of the HTTP API, made from the table of endpoints and the answers' schemas."""

from __future__ import annotations

from typing import Any

from anabranch.control.http_endpoints import ENDPOINTS, Endpoint, Field

API_VERSION = "1"
#: The states of a rescale, of which the last three are final.
RESCALE_STATES = ("waiting", "migrating", "done", "failed", "replaced")
#: A worker that drains still serves what it has not handed over.
WORKER_STATES = ("joining", "serving", "draining")


def _object(doc: str, required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    """Further fields are allowed: answers grow, and clients ignore what they do not know."""
    return {"type": "object", "description": doc, "properties": properties, "required": list(required)}


_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}

#: What each answer has at least.
SCHEMAS: dict[str, dict[str, Any]] = {
    "Index": _object(
        "The job, and the paths of the API by name.",
        ("job", "links"),
        job={"$ref": "#/components/schemas/Job"},
        links={"type": "object", "additionalProperties": _TEXT},
    ),
    "Job": _object(
        "The job as a whole; epoch is the last committed one, -1 before the first.",
        ("id", "epoch", "workers"),
        id=_TEXT,
        name={"type": ["string", "null"]},
        epoch={"type": "integer", "minimum": -1},
        durableEpoch={"type": "integer", "minimum": -1},
        routeVersion=_COUNT,
        keyGroups=_COUNT,
        workers=_COUNT,
        rescale={
            "anyOf": [{"$ref": "#/components/schemas/Rescale"}, {"type": "null"}],
            "description": "The rescale that was asked for last.",
        },
    ),
    "Stage": _object(
        "A stateful stage.", ("number", "name", "parallelism"), number=_COUNT, name=_TEXT, parallelism=_COUNT
    ),
    "Worker": _object(
        "A state worker.",
        ("id", "address"),
        id=_TEXT,
        address=_TEXT,
        state={"enum": list(WORKER_STATES)},
        pid=_COUNT,
        keyGroups=_COUNT,
        rows=_COUNT,
        bytes=_COUNT,
    ),
    "Route": _object("A route.", ("version",), version=_COUNT),
    "Epoch": _object("The report of an epoch.", ("epoch",), epoch=_COUNT),
    "Rescale": _object(
        "How far a rescale is: the key groups that move, and those of them that have not arrived.",
        ("number", "state"),
        number=_COUNT,
        state={"enum": list(RESCALE_STATES)},
        what=_TEXT,
        message={"type": "string", "description": "Why it failed, or what it was replaced by."},
        workers={"type": ["integer", "null"]},
        groupsMoving=_COUNT,
        groupsPending=_COUNT,
        seconds={"type": "number", "minimum": 0},
    ),
    "Migration": _object(
        "A change of the route, and how much of the state that it moves has arrived.",
        ("number", "done"),
        number=_COUNT,
        done={"type": "boolean"},
        routeVersion=_COUNT,
        groupsMoving=_COUNT,
        groupsPending=_COUNT,
        seconds={"type": "number", "minimum": 0},
    ),
    "Savepoint": _object("A savepoint that is complete.", ("epoch",), epoch=_COUNT),
    "Stopping": _object("The job is about to stop.", ("stopping",), stopping={"const": True}),
    "Health": _object("The API answers.", ("status",), status={"const": "ok"}),
    "OpenApi": {"type": "object", "description": "An OpenAPI document."},
    "Error": _object("What went wrong, and what to do.", ("error",), error=_TEXT),
}

_REFUSALS = {
    "400": "The request is wrong, or asks for what cannot be done.",
    "401": "A token is needed, or the one that was sent is wrong.",
    "403": "A request from a web page, under a foreign name, or a change by GET from another machine.",
    "409": "The job is in no state for this.",
    "413": "The body is too large.",
    "500": "An error of the server; its log has the details.",
    "503": "A worker cannot be reached, the server has too much to do, or the job is stopping.",
}


def description() -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Anabranch job control",
            "version": API_VERSION,
            "description": "A running job: what it does, and how to rescale, save and stop it.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "The job's anabranch.token."}
            },
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    parameters = [_parameter(field, "path") for field in endpoint.in_path]
    parameters += [_parameter(field, "query") for field in endpoint.in_query]
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": parameters,
        "responses": {
            str(endpoint.status): {"description": "Done.", "content": _json(endpoint.answer, many=endpoint.many)},
            **{status: {"description": doc, "content": _json("Error")} for status, doc in _REFUSALS.items()},
        },
        # An empty requirement: from loopback the token is not always needed.
        "security": [{}] if endpoint.is_public else [{"token": []}, {}],
    }
    if endpoint.in_body:
        operation["requestBody"] = {
            "required": any(field.required for field in endpoint.in_body) or bool(endpoint.one_of),
            "content": {"application/json": {"schema": _body(endpoint)}},
        }
    return operation


def _parameter(field: Field, place: str) -> dict[str, Any]:
    return {
        "name": field.name,
        "in": place,
        "required": field.required,
        "description": field.doc,
        "schema": field.schema(),
    }


def _body(endpoint: Endpoint) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: field.schema() | {"description": field.doc} for field in endpoint.in_body},
        "required": [field.name for field in endpoint.in_body if field.required],
        "additionalProperties": False,
    }
    if endpoint.one_of:
        schema["anyOf"] = [{"required": [name]} for name in endpoint.one_of]
    return schema


def _json(schema: str, *, many: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"$ref": f"#/components/schemas/{schema}"}
    return {"application/json": {"schema": {"type": "array", "items": reference} if many else reference}}
