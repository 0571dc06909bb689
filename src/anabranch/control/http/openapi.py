"""The OpenAPI description of the HTTP API, made from the table of endpoints and the answers' schemas."""

from __future__ import annotations

from typing import Any

from anabranch.control.http.answers import SCHEMAS
from anabranch.control.http.endpoints import ENDPOINTS, Endpoint, Field

API_VERSION = "1"

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
