"""Value state in the hands of a processor, over several epochs: what it reads, and what is sent."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, StringType

from anabranch.core.errors import EpochError
from anabranch.core.schemas import Op
from support.process_model import fields
from support.process_script import EXISTS, GET, Act, Scripted, run, sent, set_value


def test_a_value_lives_from_epoch_to_epoch() -> None:
    add: Act = lambda p: p.value.update(((p.value.get() or (0,))[0] + 1,))  # noqa: E731
    state, seen = run(
        {"a": "get exists add add get exists"}, {"a": "get add"}, {"a": "get"}, add=add, get=GET, exists=EXISTS
    )
    assert seen == [["None", "False", "None", "None", "(2,)", "True"], ["(2,)", "None"], ["(3,)"]]
    assert state.value("v", "a") == (3,)
    assert [sent(state, "v", epoch) for epoch in range(3)] == [[(Op.PUT, "a", 2)], [(Op.PUT, "a", 3)], []]


def test_only_changed_values_are_sent() -> None:
    state, _ = run(
        {"a": "set", "b": "set", "c": "get"}, {"a": "get", "b": "set", "c": "get"}, set=set_value(1), get=GET
    )
    assert sent(state, "v") == [(Op.PUT, "b", 1)]
    assert set(state.writes[-1]) == {"v"}


def test_a_cleared_value_is_gone() -> None:
    clear: Act = lambda p: p.value.clear()  # noqa: E731
    state, seen = run(
        {"a": "set", "b": "set"},
        {"a": "clear get exists"},
        {"a": "get"},
        set=set_value(1),
        clear=clear,
        get=GET,
        exists=EXISTS,
    )
    assert seen[1:] == [["None", "None", "False"], ["None"]]
    assert sent(state, "v", 1) == [(Op.DELETE, "a", None)]
    assert state.value("v", "b") == (1,)


def test_a_value_that_was_set_and_cleared_again_sends_nothing() -> None:
    clear: Act = lambda p: p.value.clear()  # noqa: E731
    state, _ = run({"a": "set clear", "b": "clear", "c": "set"}, set=set_value(1), clear=clear)
    assert sent(state, "v") == [(Op.PUT, "c", 1)]


def test_a_value_of_nulls_exists() -> None:
    state, seen = run({"a": "set"}, {"a": "get exists"}, set=set_value(None), get=GET, exists=EXISTS)
    assert seen[1] == ["(None,)", "True"]
    assert state.value("v", "a") == (None,)


@pytest.mark.parametrize("given", [[7], Row(7), Row(z=7), np.array([7]), (np.int64(7),), (np.int32(7),), iter([7])])
def test_a_value_may_be_given_as_anything_with_its_items(given: Any) -> None:
    state, seen = run({"a": "set get"}, set=lambda p: p.value.update(given), get=GET)
    assert seen[0][1] == "(7,)"
    assert state.value("v", "a") == (7,)


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        (None, TypeError, "None"),
        (5, TypeError, "not 5"),
        ((1, 2), PySparkRuntimeError, "1 are required while 2"),
        ((), PySparkRuntimeError, "1 are required while 0"),
        ("abc", PySparkRuntimeError, "1 are required while 3"),
        (("a",), TypeError, "'a', a str"),
        ((1.5,), TypeError, "1.5, a float"),
        ((True,), TypeError, "True, a bool"),
        ({"n": 4}, TypeError, "'n', a str"),
        (pd.DataFrame({"n": [1]}), TypeError, "'n', a str"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(given: Any, kind: type[Exception], says: str) -> None:
    def attempt(processor: Scripted) -> str:
        with pytest.raises(kind) as caught:
            processor.value.update(given)
        assert isinstance(caught.value, PySparkException)
        return str(caught.value)

    state, seen = run({"a": "set attempt get"}, set=set_value(1), attempt=attempt, get=GET)
    assert "State variable v" in seen[0][1]
    assert says in seen[0][1]
    assert seen[0][2] == "(1,)"
    assert state.value("v", "a") == (1,)


def test_a_number_too_large_for_its_field_fails_the_epoch() -> None:
    with pytest.raises(EpochError, match="state variable v, field n: 9223372036854775808 is not a bigint"):
        run({"a": "set"}, set=set_value(2**63))


def test_what_user_code_does_to_a_list_within_a_value_stays_outside() -> None:
    given = [1, 2]

    def keep(processor: Scripted) -> None:
        processor.value.update((given,))
        given.append(3)

    def spoil(processor: Scripted) -> None:
        read = processor.value.get()
        assert read is not None
        read[0].append(4)

    state, seen = run(
        {"a": "keep get spoil get"},
        {"a": "spoil get"},
        keep=keep,
        spoil=spoil,
        get=GET,
        value=fields(n=ArrayType(StringType())),
    )
    assert seen == [["None", "(['1', '2'],)", "None", "(['1', '2'],)"], ["None", "(['1', '2'],)"]]
    assert state.value("v", "a") == (["1", "2"],)
