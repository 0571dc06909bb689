"""State variables in the hands of a processor, over several epochs: what it reads, and what is sent."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from process_model import ModelState, fields, run_epochs
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import ArrayType, MapType, StringType, StructType

from anabranch.core.errors import EpochError, UnsupportedError
from anabranch.core.schemas import OP, Op

KEY = pa.schema([("id", pa.string())])
OUTPUT = fields(id="string", seen="string")
Act = Callable[["Scripted"], Any]


class Scripted(StatefulProcessor):
    """Does for each row what the row's step says, and yields what came of it."""

    def __init__(self, steps: dict[str, Act], value: StructType | None = None) -> None:
        self.steps = steps
        self.fields = value or fields(n="long")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.value = handle.getValueState("v", self.fields)
        self.list = handle.getListState("l", fields(x="integer", y="string"))
        self.map = handle.getMapState("m", fields(k="string"), fields(a="integer", b="string"))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            yield Row(id=key[0], seen=repr(self.steps[row.step](self)))


def run(*epochs: dict[str, str], value: StructType | None = None, **steps: Act) -> tuple[ModelState, list[list[str]]]:
    """Each epoch says for each key which steps it takes; the state, and what each epoch saw for key ``a``."""
    rows = [[{"id": key, "step": step} for key, names in epoch.items() for step in names.split()] for epoch in epochs]
    state, outputs = run_epochs(Scripted(steps, value), rows, key=KEY, output=OUTPUT)
    return state, [[row["seen"] for row in output if row["id"] == "a"] for output in outputs]


def sent(state: ModelState, variable: str, epoch: int = -1) -> list[tuple[Any, ...]]:
    """What was sent for a variable: op, key, sub-key and value."""
    table = state.writes[epoch].get(variable)
    return [] if table is None else [tuple(row.values())[1:] for row in table.to_pylist()]


GET: Act = lambda p: p.value.get()  # noqa: E731
EXISTS: Act = lambda p: p.value.exists()  # noqa: E731


def test_a_value_lives_from_epoch_to_epoch() -> None:
    add: Act = lambda p: p.value.update(((p.value.get() or (0,))[0] + 1,))  # noqa: E731
    state, seen = run(
        {"a": "get exists add add get exists"}, {"a": "get add"}, {"a": "get"}, add=add, get=GET, exists=EXISTS
    )
    assert seen == [["None", "False", "None", "None", "(2,)", "True"], ["(2,)", "None"], ["(3,)"]]
    assert state.value("v", "a") == (3,)
    assert [sent(state, "v", epoch) for epoch in range(3)] == [[(Op.PUT, "a", 2)], [(Op.PUT, "a", 3)], []]


def test_only_changed_values_are_sent() -> None:
    state, _ = run({"a": "set", "b": "set", "c": "get"}, {"a": "get", "b": "set", "c": "get"}, set=_set(1), get=GET)
    assert sent(state, "v") == [(Op.PUT, "b", 1)]
    assert set(state.writes[-1]) == {"v"}


def _set(value: Any) -> Act:
    return lambda p: p.value.update((value,))


def test_a_cleared_value_is_gone() -> None:
    clear: Act = lambda p: p.value.clear()  # noqa: E731
    state, seen = run(
        {"a": "set", "b": "set"},
        {"a": "clear get exists"},
        {"a": "get"},
        set=_set(1),
        clear=clear,
        get=GET,
        exists=EXISTS,
    )
    assert seen[1:] == [["None", "None", "False"], ["None"]]
    assert sent(state, "v", 1) == [(Op.DELETE, "a", None)]
    assert state.value("v", "b") == (1,)


def test_a_value_that_was_set_and_cleared_again_sends_nothing() -> None:
    clear: Act = lambda p: p.value.clear()  # noqa: E731
    state, _ = run({"a": "set clear", "b": "clear", "c": "set"}, set=_set(1), clear=clear)
    assert sent(state, "v") == [(Op.PUT, "c", 1)]


def test_a_value_of_nulls_exists() -> None:
    state, seen = run({"a": "set"}, {"a": "get exists"}, set=_set(None), get=GET, exists=EXISTS)
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

    state, seen = run({"a": "set attempt get"}, set=_set(1), attempt=attempt, get=GET)
    assert "State variable v" in seen[0][1]
    assert says in seen[0][1]
    assert seen[0][2] == "(1,)"
    assert state.value("v", "a") == (1,)


def test_a_number_too_large_for_its_field_fails_the_epoch() -> None:
    with pytest.raises(EpochError, match="state variable v, field n: 9223372036854775808 is not a bigint"):
        run({"a": "set"}, set=_set(2**63))


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


LIST: Act = lambda p: list(p.list.get())  # noqa: E731


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


ITEMS: Act = lambda p: sorted(p.map.iterator())  # noqa: E731


def test_a_map_lives_from_epoch_to_epoch() -> None:
    state, seen = run(
        {"a": "items exists get has x y get has items exists"},
        {"a": "get keys values x2 drop items"},
        {"a": "items drop gone"},
        x=lambda p: p.map.updateValue(("x",), (1, "one")),
        x2=lambda p: p.map.updateValue(["x"], (2, None)),
        y=lambda p: p.map.updateValue(("y",), (9, "nine")),
        drop=lambda p: p.map.removeKey(("y",)),
        gone=lambda p: p.map.removeKey(("never",)),
        get=lambda p: p.map.getValue(("x",)),
        has=lambda p: (p.map.containsKey(("x",)), p.map.containsKey(("z",))),
        keys=lambda p: sorted(p.map.keys()),
        values=lambda p: sorted(p.map.values()),
        exists=lambda p: p.map.exists(),
        items=ITEMS,
    )
    both = "[(('x',), (1, 'one')), (('y',), (9, 'nine'))]"
    assert seen[0] == [
        "[]",
        "False",
        "None",
        "(False, False)",
        "None",
        "None",
        "Row(a=1, b='one')",
        "(True, False)",
        both,
        "True",
    ]
    assert seen[1][:3] == ["Row(a=1, b='one')", "[('x',), ('y',)]", "[(1, 'one'), (9, 'nine')]"]
    assert seen[1][5] == seen[2][0] == "[(('x',), (2, None))]"
    assert sent(state, "m", 0) == [(Op.PUT, "a", "x", 1, "one"), (Op.PUT, "a", "y", 9, "nine")]
    assert sent(state, "m", 1) == [(Op.PUT, "a", "x", 2, None), (Op.DELETE, "a", "y", None, None)]
    assert sent(state, "m", 2) == []


def test_a_cleared_map_sends_one_change() -> None:
    state, seen = run(
        {"a": "x y", "b": "x"},
        {"a": "y clear exists x items", "b": "drop x", "c": "x clear"},
        {"a": "clear"},
        x=lambda p: p.map.updateValue(("x",), (1, "one")),
        y=lambda p: p.map.updateValue(("y",), (2, "two")),
        drop=lambda p: p.map.removeKey(("x",)),
        clear=lambda p: p.map.clear(),
        exists=lambda p: p.map.exists(),
        items=ITEMS,
    )
    assert seen[1] == ["None", "None", "False", "None", "[(('x',), (1, 'one'))]"]
    clear, *puts = sent(state, "m", 1)
    assert clear == (Op.CLEAR, "a", None, None, None)
    assert sorted(puts) == [(Op.PUT, "a", "x", 1, "one"), (Op.PUT, "b", "x", 1, "one")]
    assert sent(state, "m", 2) == [(Op.CLEAR, "a", None, None, None)]
    assert state.map("m", "a") == []


def test_a_map_may_change_while_it_is_read() -> None:
    def drain(processor: Scripted) -> int:
        for key in processor.map.keys():  # noqa: SIM118
            processor.map.removeKey(key)
        return len(list(processor.map.iterator()))

    state, seen = run(
        {"a": "x y"},
        {"a": "drain"},
        x=lambda p: p.map.updateValue(("x",), (1, "one")),
        y=lambda p: p.map.updateValue((None,), (1, "one")),
        drain=drain,
    )
    assert seen[1] == ["0"]
    assert sorted(sent(state, "m"), key=str) == [(Op.DELETE, "a", "x", None, None), (Op.DELETE, "a", None, None, None)]


@pytest.mark.parametrize(
    ("key", "value"),
    [(None, (1, "x")), (("c",), None), (("c",), (1,)), (("c", "d"), (1, "x")), ((1.5,), (1, "x")), (("c",), ("x", 1))],
)
def test_map_entries_that_do_not_fit_are_refused(key: Any, value: Any) -> None:
    def attempt(processor: Scripted) -> str:
        with pytest.raises(PySparkException, match="State variable m") as caught:
            processor.map.updateValue(key, value)
        return str(caught.value)

    state, _ = run({"a": "attempt"}, attempt=attempt)
    assert state.writes == [{}]


class OddKeys(StatefulProcessor):
    """A map whose keys are floats, lists and structs, and whose values are maps."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        struct = fields(s="string", n="long")
        self.map = handle.getMapState(
            "m", fields(f="double", l=ArrayType(StringType()), s=struct), fields(v=MapType(StringType(), StringType()))
        )

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            odd = (float("nan"), ["a", "b"], {"s": "x", "n": row.n})
            value = self.map.getValue(odd)
            self.map.updateValue(odd, ({} if value is None else value[0] | {str(len(value[0])): "v"},))
        yield Row(id=key[0], seen=repr(sorted(self.map.iterator(), key=repr)))


def test_map_keys_may_be_of_any_type() -> None:
    rows = [{"id": "a", "n": 1}, {"id": "a", "n": 2}, {"id": "a", "n": 1}]
    state, outputs = run_epochs(OddKeys(), [rows, rows], key=KEY, output=OUTPUT)
    assert outputs[1][0]["seen"] == (
        "[((nan, ['a', 'b'], Row(s='x', n=1)), ({'0': 'v', '1': 'v', '2': 'v'},)), "
        "((nan, ['a', 'b'], Row(s='x', n=2)), ({'0': 'v'},))]"
    )
    assert len(state.map("m", "a")) == 2


def test_state_belongs_to_the_current_key() -> None:
    state, _ = run(
        {"a": "set append x", "b": "get"},
        {"b": "set2"},
        set=_set(1),
        set2=_set(2),
        get=GET,
        append=lambda p: p.list.appendValue((1, "l")),
        x=lambda p: p.map.updateValue(("x",), (1, "m")),
    )
    assert (state.value("v", "a"), state.value("v", "b")) == ((1,), (2,))
    assert (state.elements("l", "a"), state.elements("l", "b")) == ([(1, "l")], [])
    assert (state.map("m", "a"), state.map("m", "b")) == ([(("x",), (1, "m"))], [])


class Misplaced(Scripted):
    """Uses its state where there is no key."""

    def __init__(self, where: str, act: Act) -> None:
        super().__init__({"go": lambda p: None})  # noqa: ARG005
        self.where, self.act, self.closes = where, act, 0

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        if self.where == "init" and type(handle).__name__ == "LocalHandle":
            self.act(self)

    def close(self) -> None:
        self.closes += 1
        if self.where == "close" and type(self.handle).__name__ == "LocalHandle":
            self.act(self)


@pytest.mark.parametrize("where", ["init", "close"])
@pytest.mark.parametrize(
    "act",
    [
        GET,
        EXISTS,
        _set(1),
        lambda p: p.value.clear(),
        LIST,
        lambda p: p.list.put([(1, "a")]),
        lambda p: p.list.appendValue((1, "a")),
        lambda p: p.list.clear(),
        ITEMS,
        lambda p: p.map.getValue(("a",)),
        lambda p: p.map.updateValue(("a",), (1, "b")),
        lambda p: p.map.clear(),
    ],
)
def test_without_a_key_there_is_no_state(where: str, act: Act) -> None:
    with pytest.raises(EpochError, match=rf"failed in {where}.*there is no key.*only in handleInputRows"):
        run_epochs(Misplaced(where, act), [[{"id": "a", "step": "go"}]], key=KEY, output=OUTPUT)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda p: p.handle.registerTimer(1), "registerTimer"),
        (lambda p: p.handle.deleteTimer(1), "deleteTimer"),
        (lambda p: list(p.handle.listTimers()), "listTimers"),
        (lambda p: p.handle.deleteIfExists("v"), "deleteIfExists"),
    ],
)
def test_what_is_not_supported_is_refused_while_rows_are_handled_too(act: Act, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        run({"a": "act"}, act=act)


def test_state_variables_are_asked_for_in_init_only() -> None:
    with pytest.raises(EpochError, match="state variable late was asked for after init"):
        run({"a": "late"}, late=lambda p: p.handle.getValueState("late", fields(x="long")))


class Unsteady(Scripted):
    """Asks for other state in a task than it did when the query was built."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        if type(handle).__name__ == "LocalHandle":
            self.steps["ask"](handle)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda handle: handle.getValueState("w", fields(x="long")), "w was not declared"),
        (lambda handle: handle.getListState("v", fields(x="long")), "v already exists"),
    ],
)
def test_init_must_ask_for_what_was_declared(ask: Any, says: str) -> None:
    with pytest.raises(EpochError, match=says):
        run_epochs(Unsteady({"ask": ask}), [[{"id": "a", "step": "x"}]], key=KEY, output=OUTPUT)


def test_all_changes_of_many_windows_go_in_one_write() -> None:
    rows = [{"id": str(number), "step": "set"} for number in range(25_000)]
    state, outputs = run_epochs(Scripted({"set": _set(1)}), [rows, rows], key=KEY, output=OUTPUT)
    assert [len(output) for output in outputs] == [25_000, 25_000]
    assert [len(write["v"]) for write in state.writes] == [25_000, 25_000]
    assert len(state.reads) == 2
    assert set(state.writes[0]["v"].column(OP).to_pylist()) == {Op.PUT}
    assert len(state.entries["v"]) == 25_000
