"""Requests and answers as they travel: turned into JSON, and checked field by field when they arrive.

A request is a Flight action, or a ticket, whose kind is the name of its type in snake case. Tables travel beside it.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, get_args

import msgspec
import pyarrow as pa

from anabranch.core.errors import WorkerError
from anabranch.core.requests import REQUESTS, Request
from anabranch.core.schemas import decode_schema, encode_schema

A = TypeVar("A")

#: The header of every call that holds the token: binary, because a token may be made of anything.
TOKEN_HEADER = "anabranch-token-bin"
#: In a ticket: the kind of the request.
_KIND = "kind"

#: The tables of a Read: the keys whose state is asked for; and by key group how many more rows than keys the task has.
KEYS = "keys"
FURTHER_ROWS = "further rows"
#: Prefixes of the names of tables in the answer to a read: other rows of the groups, rows that are due, and the entries
#: of other keys with such rows. These keys are in the table that has nothing but the prefix for a name.
REST = "rest."
EXPIRED = "expired."
DUE = "due."
#: The one table of the answer to FetchKeys.
ENTRIES = "entries"


def kind_of(request_type: type[Request[Any]]) -> str:
    """What a type of requests is called on the way."""
    return _KINDS[request_type]


def encode(message: Any) -> dict[str, Any]:
    """A request or an answer as JSON."""
    document: dict[str, Any] = msgspec.to_builtins(message, enc_hook=_encoded)
    return document


def decode(kind: str, document: Any) -> Request[Any]:
    """Makes a request from what came over the network, or raises a WorkerError that says what is wrong with it."""
    if kind not in _TYPES:
        raise WorkerError(f"Unknown request {kind!r}. Make sure that driver and workers run the same version.")
    request: Request[Any] = _converted(document, _TYPES[kind], f"The request {kind!r}")
    return request


def decode_answer(request: Request[A], document: Any) -> A:
    """Makes the answer to a request from what came over the network."""
    kind = type(request)
    answer: A = _converted(document, _ANSWERS[kind], f"The answer to {_KINDS[kind]!r}")
    return answer


def encode_ticket(request: Request[Any]) -> bytes:
    """A request as a Flight ticket."""
    return msgspec.json.encode({_KIND: _KINDS[type(request)], **encode(request)})


def decode_ticket(document: Any) -> Request[Any]:
    """Makes a request from a ticket, as `decode`."""
    if not isinstance(document, dict) or not isinstance(document.get(_KIND), str):
        raise WorkerError("The ticket cannot be read. Run the same version of anabranch everywhere.")
    return decode(document.pop(_KIND), document)


def _converted(document: Any, wanted: Any, what: str) -> Any:
    try:
        return msgspec.convert(document, wanted, dec_hook=_decoded)
    except (msgspec.ValidationError, UnicodeError, pa.ArrowException, OSError) as error:
        raise WorkerError(f"{what} cannot be read: {error}. Run the same version of anabranch everywhere.") from None


def _encoded(value: Any) -> Any:
    if isinstance(value, pa.Schema):
        return encode_schema(value)
    raise NotImplementedError(f"{type(value).__name__} does not travel.")


def _decoded(wanted: type, value: Any) -> Any:
    if wanted is pa.Schema and isinstance(value, str):
        return decode_schema(value)
    raise TypeError(f"Expected a {wanted.__name__}")


def _answer_type(request_type: type[Request[Any]]) -> Any:
    """The type that stands in brackets behind the base class."""
    (base,) = vars(request_type)["__orig_bases__"]
    return get_args(base)[0]


_KINDS = {each: re.sub(r"(?<!^)(?=[A-Z])", "_", each.__name__).lower() for each in REQUESTS}
_TYPES = {kind: each for each, kind in _KINDS.items()}
_ANSWERS = {each: _answer_type(each) for each in REQUESTS}
