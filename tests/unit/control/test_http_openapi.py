"""The OpenAPI description is valid, says what the server does, and nothing else."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from anabranch.control.http.access import Access
from anabranch.control.http.app import ControlApp
from anabranch.control.http.endpoints import ENDPOINTS, Endpoint, Values, description
from anabranch.control.http.requests import fits
from anabranch.control.http.server import ControlServer
from anabranch.core.reports import properties
from anabranch.wire.credentials import Credentials
from support.described import assert_described
from support.http_asking import ask
from support.http_job import MemoryJob

FIELDS = [(each.takes, name) for each in ENDPOINTS for name in properties(each.takes)]


def test_the_description_is_openapi() -> None:
    OpenAPIV31SpecValidator(description()).validate()  # type: ignore[arg-type]


def test_every_route_is_described_and_every_description_has_a_route() -> None:
    app = ControlApp(MemoryJob(), Access(token="", host="localhost"))
    routes = {route.path for route in app.routes if isinstance(route, Route)}
    assert routes == set(description()["paths"])
    described = {(method.upper(), path) for path, item in description()["paths"].items() for method in item}
    assert described == {(each.method, each.path) for each in ENDPOINTS}
    assert len(ENDPOINTS) == len({each.name for each in ENDPOINTS}) == len(described)


def test_every_endpoint_has_somebody_to_answer_it() -> None:
    assert {each.name for each in ENDPOINTS if each.call is None} == {"index", "health", "openapi", "stop"}


def test_every_answer_is_described_and_every_schema_used() -> None:
    document = description()
    schemas = document["components"]["schemas"]
    assert {"Job", "Stage", "Worker", "Route", "Epoch", "Rescale", "Migration", "Savepoint", "Error"} < set(schemas)
    used = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert used == set(schemas)
    answers = [operation["responses"] for item in document["paths"].values() for operation in item.values()]
    assert all(answer["content"]["application/json"]["schema"] for each in answers for answer in each.values())


def test_every_field_of_an_answer_is_described() -> None:
    for name, schema in description()["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            is_clear = field in CLEAR_NAMES or "$ref" in described
            assert is_clear or described.get("description") or described.get("title"), (name, field)


#: Fields that are described by their names and those of their reports.
CLEAR_NAMES = {
    *("lost", "started", "left", "joined", "variable", "rows", "keyGroups", "workers"),
    *("epoch", "routeVersion", "version", "strategy", "path", "stopping", "status", "error"),
}


EXAMPLES: dict[str, tuple[str, Any]] = {
    "scale": ("/scale?stage=3", None),
    "scale_by_get": ("/scale?stage=3", None),
    "rescale": ("/rescale", {"workers": 4, "parallelism": 8, "stage": 3}),
    "join": ("/workers", {"address": "10.0.0.5:7077"}),
    "drain": ("/workers/worker-1/drain", None),
    "savepoint": ("/savepoint", {"path": "savepoints/a"}),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.name)
def test_answers_are_as_described(endpoint: Endpoint) -> None:
    server = ControlServer(MemoryJob(), host="127.0.0.1", port=0, credentials=Credentials(""), strict_port=True)
    try:
        path, body = EXAMPLES.get(endpoint.name, (endpoint.path, None))
        answer = ask(server.url, endpoint.method, path, body)
    finally:
        server.close()
    assert answer.status == endpoint.status
    assert_described(endpoint.method, endpoint.path, answer.status, answer.json)
    if body is not None:
        operation = description()["paths"][endpoint.path][endpoint.method.lower()]
        jsonschema.validate(body, operation["requestBody"]["content"]["application/json"]["schema"])


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-1, 70_000),
    st.floats(allow_nan=False).filter(lambda value: not value.is_integer()),
    st.text(),
    st.sampled_from(["a:1", "a:65535", "a:65536", "[::1]:80", "clicks", "x" * 5000]),
    st.lists(st.integers(), max_size=2),
)


@pytest.mark.parametrize(("takes", "name"), FIELDS)
@given(value=VALUES)
def test_what_a_field_takes_is_what_its_schema_allows(takes: type[Values], name: str, value: Any) -> None:
    """Except that the server is stricter about characters that cannot be printed."""
    is_allowed = jsonschema.Draft202012Validator(properties(takes)[name]).is_valid(value)
    if isinstance(value, str) and not value.isprintable():
        assert not fits(takes, name, value)
    else:
        assert fits(takes, name, value) == is_allowed


@pytest.mark.parametrize(("takes", "name"), FIELDS)
def test_examples_and_defaults_are_valid(takes: type[Values], name: str) -> None:
    schema = properties(takes)[name]
    assert schema["description"]
    assert all(fits(takes, name, value) for value in schema["examples"])
    assert "default" not in schema or fits(takes, name, schema["default"])
