"""Reading a request: its values, checked against the table of endpoints, or a sentence that says what is wrong."""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request

from anabranch.control.http.endpoints import Endpoint, Values
from anabranch.core.reports import properties

BODY_BYTES_MAX = 64 * 1024
#: A body is short, so whoever takes longer is not sending it.
BODY_TIMEOUT_S = 10.0


class RequestError(Exception):
    """A request that is wrong; the text says what to do."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


async def read_values(request: Request, endpoint: Endpoint) -> Values:
    """Reads all values of a request, from path, query and body."""
    known = properties(endpoint.takes)
    values = _query(request, known if endpoint.place == "query" else ())
    body = await _body(request)
    _check_names(body, known if endpoint.place == "body" else (), "field of the body", _hint(endpoint, known))
    values |= {**request.path_params, **body}
    for field in msgspec.structs.fields(endpoint.takes):
        name, schema = field.name, known[field.name]
        if name in values and not fits(endpoint.takes, name, values[name]):
            raise RequestError(
                400, f"{name} is {_shown(values[name])}; it must be {in_words(schema)}, such as {_example(schema)!r}."
            )
        if name not in values and field.required:
            raise RequestError(400, f"{name} is missing: {schema['description']}, such as {_example(schema)!r}.")
    if endpoint.one_of and not any(name in values for name in endpoint.one_of):
        example = json.dumps({name: _example(known[name]) for name in endpoint.one_of})
        raise RequestError(400, f"Say what to change: {' or '.join(endpoint.one_of)}. Send {example}.")
    return endpoint.takes(**values)


def fits(takes: type[Values], name: str, value: Any) -> bool:
    """Tells whether a value is what a field takes."""
    try:
        msgspec.convert(value, get_type_hints(takes, include_extras=True)[name])
    except msgspec.ValidationError:
        return False
    return not isinstance(value, str) or value.isprintable()


def in_words(schema: Mapping[str, Any]) -> str:
    """What a value must be, by its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(map(in_words, schema["anyOf"]))
    if schema["type"] == "integer":
        return f"a whole number from {schema['minimum']} to {schema['maximum']}"
    return str(schema["title"])


def _example(schema: Mapping[str, Any]) -> Any:
    return schema["examples"][0]


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"


def nearest(word: str, candidates: Iterable[str], what: str) -> str:
    """A sentence that names the valid word that was probably meant, or all of them."""
    known = list(candidates)
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Valid {what}: {', '.join(known)}."


def _query(request: Request, known: Collection[str]) -> dict[str, Any]:
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    _check_names(names, known, "parameter of the query", "Leave out everything from the ? on.")
    for name in names:
        if names.count(name) > 1:
            raise RequestError(400, f"{name} is given {names.count(name)} times. Give it once.")
    # A stage that has digits only is meant by its number.
    return {name: int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text for name, text in given}


async def _body(request: Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            text = await _body_bytes(request)
    except TimeoutError:
        raise RequestError(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} s. Send it again.") from None
    except ClientDisconnect:
        raise RequestError(400, "The body ended too early. Send it again.") from None
    if not text.strip():
        return {}
    try:
        body = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError):
        raise RequestError(400, 'The body is not JSON. Send an object, such as {"workers": 4}.') from None
    if not isinstance(body, dict):
        raise RequestError(400, 'The body must be a JSON object, such as {"workers": 4}.')
    return body


async def _body_bytes(request: Request) -> bytes:
    too_large = RequestError(413, f"The body is larger than {BODY_BYTES_MAX // 1024} KiB. Send less.")
    announced = request.headers.get("content-length", "0")
    # The server has checked that it is a number.
    if int(announced) > BODY_BYTES_MAX:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise too_large
    return bytes(body)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise RequestError(400, f"{double!r} is given {names.count(double)} times. Give it once.")
    return body


def _check_names(names: Iterable[str], known: Collection[str], what: str, if_none: str) -> None:
    for name in names:
        if name not in known:
            advice = nearest(name, known, "ones") if known else if_none
            raise RequestError(400, f"{name[:60]!r} is not a {what}. {advice}")


def _hint(endpoint: Endpoint, known: Mapping[str, Mapping[str, Any]]) -> str:
    """What to do about a body that should not be there."""
    if endpoint.place == "query":
        values = "&".join(f"{name}={_example(schema)}" for name, schema in known.items())
        return f"Send no body, and give values in the address: {endpoint.path}?{values}."
    return "Send no body."
