"""Whether an answer of the HTTP API is what its OpenAPI description says, and says nothing that is not described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema

from anabranch.control.http.endpoints import description


def assert_described(method: str, path: str, status: int, document: Any) -> None:
    """The answer to a request of this path, which is written as in the description: /workers/{worker}/drain."""
    described = description()
    responses = described["paths"][path][method.lower()]["responses"]
    schema = responses[str(status)]["content"]["application/json"]["schema"]
    jsonschema.validate(document, {**schema, "components": described["components"]})
    assert list(_unknown_fields(document, schema, described["components"]["schemas"], "answer")) == []


def _unknown_fields(document: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any], where: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for choice in schema.get("anyOf", ()) if document is not None else ():
        if choice.get("type") != "null":
            yield from _unknown_fields(document, choice, schemas, where)
    if isinstance(document, list):
        for each in document:
            yield from _unknown_fields(each, schema["items"], schemas, f"{where}[]")
    if isinstance(document, dict) and "properties" in schema:
        for name, value in document.items():
            if name in schema["properties"]:
                yield from _unknown_fields(value, schema["properties"][name], schemas, f"{where}.{name}")
            else:
                yield f"{where}.{name}"
