"""Requests: there and back, and every field checked when it arrives."""

import dataclasses
import json
from typing import Any

import pytest

from anabranch.core.errors import WorkerError
from anabranch.wire.messages import Assign, Prepare, Read, Request, Write, decode

EXAMPLES: dict[type, Any] = {int: 3, str: "x", bool: True, list: [], dict: {}}


def example_of(kind: type[Request]) -> dict[str, Any]:
    hints = {field.name: field.type for field in dataclasses.fields(kind)}
    special = {"job": "0" * 32, **({"due": None} if kind is Read else {})}
    return {
        name: special.get(name, EXAMPLES[{"int": int, "str": str, "bool": bool}.get(text, _container(text))])
        for name, text in hints.items()
    }  # type: ignore[arg-type]


def _container(text: Any) -> type:
    return list if str(text).startswith("list") else dict


@pytest.mark.parametrize("kind", sorted(Request.kinds))
def test_every_request_comes_back_as_it_was(kind: str) -> None:
    request = Request.kinds[kind](**example_of(Request.kinds[kind]))
    assert decode(kind, json.loads(json.dumps(request.header()))) == request


@pytest.mark.parametrize("kind", sorted(Request.kinds))
def test_every_field_is_checked(kind: str) -> None:
    header = example_of(Request.kinds[kind])
    for name, value in header.items():
        wrong: Any = "three" if isinstance(value, int) else 3
        with pytest.raises(WorkerError, match=f"The field '{name}' of the request '{kind}' is not of type"):
            decode(kind, {**header, name: wrong})
    with pytest.raises(WorkerError, match=r"unknown fields \['extra'\]"):
        decode(kind, {**header, "extra": 1})


def test_a_truth_value_is_no_number_and_null_is_nothing() -> None:
    header = example_of(Write)
    for wrong in (True, None, 1.0):
        with pytest.raises(WorkerError, match="'epoch'"):
            decode("write", {**header, "epoch": wrong})
    with pytest.raises(WorkerError, match="'last'"):
        decode("write", {**header, "last": 1})


def test_lists_are_checked_to_their_items() -> None:
    assign, prepare = example_of(Assign), example_of(Prepare)
    assert decode("assign", {**assign, "groups": [1, 2], "changes": [{"a": None}]})
    for name, wrong in [("groups", [1, "2"]), ("groups", {"0": 1}), ("changes", [1])]:
        with pytest.raises(WorkerError, match=f"'{name}'"):
            decode("assign", {**assign, name: wrong})
    assert decode("prepare", {**prepare, "chosen": [[1, 2, 3]]})
    with pytest.raises(WorkerError, match="'chosen'"):
        decode("prepare", {**prepare, "chosen": [[1, 2, None]]})


def test_a_field_that_is_missing_is_named_unless_it_has_a_default() -> None:
    header = example_of(Write)
    assert decode("write", {name: value for name, value in header.items() if name != "late"}) == Write(
        **{**header, "late": 0}
    )
    del header["chunk"]
    with pytest.raises(WorkerError, match=r"'write' lacks the field 'chunk'. Run the same version"):
        decode("write", header)


@pytest.mark.parametrize("kind", ["", "nothing", "Health", "__init__"])
def test_an_unknown_request_is_refused(kind: str) -> None:
    with pytest.raises(WorkerError, match="Unknown request"):
        decode(kind, {})
