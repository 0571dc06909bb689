"""Reading a request: its values, checked against the table of endpoints, or a sentence that says what is wrong."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request

from anabranch.control.http.endpoints import Endpoint, Field

BODY_BYTES_MAX = 64 * 1024
#: A body is short, so whoever takes longer is not sending it.
BODY_TIMEOUT_S = 10.0


class RequestError(Exception):
    """A request that is wrong; the text says what to do."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


async def read_values(request: Request, endpoint: Endpoint) -> dict[str, Any]:
    """All values of a request, from path, query and body."""
    values = dict(request.path_params)
    _check(values, endpoint.in_path)
    values |= _query(request, endpoint)
    body = await _body(request)
    _check_names(body, endpoint.in_body, "field of the body", _hint(endpoint))
    _check(body, endpoint.in_body)
    if endpoint.one_of and not any(name in body for name in endpoint.one_of):
        raise RequestError(400, f"Say what to change: {_in_words(endpoint.one_of)}. Send {_example(endpoint)}.")
    return values | body


def nearest(word: str, candidates: Iterable[str], what: str) -> str:
    """A sentence that names the valid word that was probably meant, or all of them."""
    known = list(candidates)
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Valid {what}: {', '.join(known)}."


def _query(request: Request, endpoint: Endpoint) -> dict[str, Any]:
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    _check_names(names, endpoint.in_query, "parameter of the query", "Leave out everything from the ? on.")
    for name in names:
        if names.count(name) > 1:
            raise RequestError(400, f"{name} is given {names.count(name)} times. Give it once.")
    texts = dict(given)
    values = {field.name: field.from_text(texts[field.name]) for field in endpoint.in_query if field.name in texts}
    _check(values, endpoint.in_query)
    defaults = {field.name: field.default for field in endpoint.in_query if field.default is not None}
    return defaults | values


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


def _check_names(names: Iterable[str], fields: Sequence[Field], what: str, if_none: str) -> None:
    known = [field.name for field in fields]
    for name in names:
        if name not in known:
            advice = nearest(name, known, "ones") if known else if_none
            raise RequestError(400, f"{name[:60]!r} is not a {what}. {advice}")


def _check(values: dict[str, Any], fields: Sequence[Field]) -> None:
    for field in fields:
        if field.name in values:
            if fault := field.fault(values[field.name]):
                raise RequestError(400, fault)
        elif field.required:
            raise RequestError(400, f"{field.name} is missing: {field.doc}, such as {field.example!r}.")


def _hint(endpoint: Endpoint) -> str:
    """For a body that should not be there."""
    if endpoint.in_query:
        values = "&".join(f"{field.name}={field.example}" for field in endpoint.in_query)
        return f"Send no body, and give values in the address: {endpoint.path}?{values}."
    return "Send no body."


def _example(endpoint: Endpoint) -> str:
    return json.dumps({field.name: field.example for field in endpoint.in_body if field.name in endpoint.one_of})


def _in_words(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
