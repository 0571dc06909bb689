"""Recorded operations: replayed as they were given, shown in few words, sorted into those that read once and others."""

from typing import Any

import pytest

from anabranch.engine.segments import ONE_TO_ONE, Operation, Segment


class Recorder:
    """A DataFrame that tells how its methods were called."""

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments, **keywords: (method, arguments, keywords)


def test_an_operation_is_replayed_with_its_arguments() -> None:
    operation = Operation("join", ("other", "k"), {"how": "left"})
    assert operation.apply(Recorder()) == ("join", ("other", "k"), {"how": "left"})  # type: ignore[arg-type]


def test_an_operation_is_shown_in_few_words() -> None:
    assert str(Operation("join", ("x",), {"how": "left"})) == "join('x', how='left')"
    shown = str(Operation("selectExpr", ("a" * 100,)))
    assert shown.endswith("…)")
    assert len(shown) < 80


@pytest.mark.parametrize(
    "method", ["coalesce", "union", "unionByName", "join", "crossJoin", "orderBy", "repartitionByRange"]
)
def test_operations_that_merge_partitions_or_read_twice_are_not_one_to_one(method: str) -> None:
    assert method not in ONE_TO_ONE
    assert not Segment(None, (Operation("filter"), Operation(method))).one_to_one  # type: ignore[arg-type]


def test_every_other_method_of_a_stream_is_one_to_one() -> None:
    from anabranch.api.stream import STATELESS_METHODS

    merging = {
        "coalesce",
        "crossJoin",
        "join",
        "repartitionByRange",
        "union",
        "unionAll",
        "unionByName",
        "withWatermark",
    }
    assert set(STATELESS_METHODS) - ONE_TO_ONE == merging
    assert Segment(None, (Operation("filter"), Operation("select"))).one_to_one  # type: ignore[arg-type]
