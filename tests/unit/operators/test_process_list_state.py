"""List state in the hands of a processor, over several epochs: what it reads, and what is sent."""

from typing import Any

import numpy as np
import pytest
from pyspark.errors import PySparkRuntimeError

from anabranch.core.schemas import Op
from support.process_script import LIST, Act, Scripted, run, sent


def test_a_list_lives_from_epoch_to_epoch() -> None:
    state, seen = run(
        {"a": "all exists put all exists"},
        {"a": "append all extend"},
        {"a": "all"},
        {"a": "put"},
        {"a": "clear all exists"},
        {"a": "all"},
        all=LIST,
        exists=lambda p: p.list.exists(),
        put=lambda p: p.list.put([(1, "p"), [2, "q"]]),
        append=lambda p: p.list.appendValue((np.int32(3), "r")),
        extend=lambda p: p.list.appendList(iter([(4, None), (None, None)])),
        clear=lambda p: p.list.clear(),
    )
    assert seen[0] == ["[]", "False", "None", "[(1, 'p'), (2, 'q')]", "True"]
    assert seen[1] == ["None", "[(1, 'p'), (2, 'q'), (3, 'r')]", "None"]
    assert seen[2] == ["[(1, 'p'), (2, 'q'), (3, 'r'), (4, None), (None, None)]"]
    assert seen[4:] == [["None", "[]", "False"], ["[]"]]
    assert sent(state, "l", 0) == [(Op.PUT, "a", 0, 1, "p"), (Op.PUT, "a", 1, 2, "q")]
    assert sent(state, "l", 1) == [
        (Op.PUT, "a", 2, 3, "r"),
        (Op.PUT, "a", 3, 4, None),
        (Op.PUT, "a", 4, None, None),
    ]
    assert sent(state, "l", 2) == []
    assert sent(state, "l", 3) == [
        (Op.CLEAR, "a", None, None, None),
        (Op.PUT, "a", 0, 1, "p"),
        (Op.PUT, "a", 1, 2, "q"),
    ]
    assert sent(state, "l", 4) == [(Op.CLEAR, "a", None, None, None)]


def test_appending_after_a_clear_starts_again() -> None:
    state, seen = run(
        {"a": "append append"},
        {"a": "append clear append append all", "b": "append clear"},
        append=lambda p: p.list.appendValue((7, "x")),
        clear=lambda p: p.list.clear(),
        all=LIST,
    )
    assert seen[1][-1] == "[(7, 'x'), (7, 'x')]"
    assert sent(state, "l") == [
        (Op.CLEAR, "a", None, None, None),
        (Op.PUT, "a", 0, 7, "x"),
        (Op.PUT, "a", 1, 7, "x"),
    ]
    assert state.elements("l", "a") == [(7, "x"), (7, "x")]


def test_appending_without_reading_does_not_rewrite() -> None:
    put: Act = lambda p: p.list.put([(i, "s") for i in range(100)])  # noqa: E731
    state, _ = run({"a": "put", "b": "put"}, {"b": "append"}, put=put, append=lambda p: p.list.appendValue((1, "t")))
    assert sent(state, "l") == [(Op.PUT, "b", 100, 1, "t")]


def test_a_list_may_change_while_it_is_read() -> None:
    def grow(processor: Scripted) -> list[Any]:
        seen = []
        for element in processor.list.get():
            seen.append(element)
            processor.list.appendValue((len(seen) + 10, "new"))
        return seen

    def late(processor: Scripted) -> list[Any]:
        iterator = processor.list.get()
        processor.list.put([(100, "z")])
        return list(iterator)

    _, seen = run(
        {"a": "put grow all late"}, put=lambda p: p.list.put([(1, "a"), (2, "b")]), grow=grow, all=LIST, late=late
    )
    assert seen[0][1:] == [
        "[(1, 'a'), (2, 'b')]",
        "[(1, 'a'), (2, 'b'), (11, 'new'), (12, 'new')]",
        "[(100, 'z')]",
    ]


@pytest.mark.parametrize("method", ["put", "appendList"])
@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ([], PySparkRuntimeError),
        (None, TypeError),
        ([None], TypeError),
        ([(1, "a"), (1,)], PySparkRuntimeError),
        ([("a", 1)], TypeError),
    ],
)
def test_lists_that_do_not_fit_are_refused_whole(method: str, given: Any, kind: type[Exception]) -> None:
    def attempt(processor: Scripted) -> str:
        with pytest.raises(kind, match="State variable l") as caught:
            getattr(processor.list, method)(given)
        return str(caught.value)

    state, seen = run({"a": "put attempt all"}, put=lambda p: p.list.put([(1, "a")]), attempt=attempt, all=LIST)
    assert seen[0][2] == "[(1, 'a')]"
    assert state.elements("l", "a") == [(1, "a")]
