"""What all state variables have in common: their key, their place, and one write."""

import re
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from anabranch.core.errors import EpochError
from anabranch.core.schemas import OP, Op, VariableKind
from anabranch.operators.process.variable import StateRequest
from support.process_model import fields, run_epochs
from support.process_script import EXISTS, GET, ITEMS, KEY, LIST, OUTPUT, Act, Scripted, run, set_value


def test_state_belongs_to_the_current_key() -> None:
    state, _ = run(
        {"a": "set append x", "b": "get"},
        {"b": "set2"},
        set=set_value(1),
        set2=set_value(2),
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
        set_value(1),
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
    ],
)
def test_without_a_time_mode_there_are_no_timers(act: Act, named: str) -> None:
    with pytest.raises(EpochError) as caught:
        run({"a": "act"}, act=act)
    message = str(caught.value)
    assert "Scripted failed in handleInputRows for key ('a',): UnsupportedError: Stage stage1: " in message
    assert f"{named} with timeMode 'none' is not supported. Use timeMode 'processingTime'" in message
    assert f"line {act.__code__.co_firstlineno}, in <lambda>\n    (lambda p: " in message


def test_state_is_deleted_in_init_only() -> None:
    with pytest.raises(EpochError, match=r"deleteIfExists\('v'\) was called after init"):
        run({"a": "act"}, act=lambda p: p.handle.deleteIfExists("v"))


def test_state_variables_are_asked_for_in_init_only() -> None:
    with pytest.raises(EpochError, match="state variable late was asked for after init"):
        run({"a": "late"}, late=lambda p: p.handle.getValueState("late", fields(x="long")))


class Deleting(Scripted):
    """Asks for state and then deletes it, all in init."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.gone_value = handle.getValueState("gone value", fields(x="long"))
        self.gone_list = handle.getListState("gone list", fields(x="long"))
        self.gone_map = handle.getMapState("gone map", fields(x="long"), fields(x="long"))
        for name in ("gone value", "gone list", "gone map"):
            handle.deleteIfExists(name)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda p: p.gone_value.exists(), "Error checking value state exists: .*gone value was deleted in init"),
        (lambda p: p.gone_value.update((1,)), "Error updating value state"),
        (lambda p: p.gone_list.appendValue((1,)), "Error updating value state"),
        (lambda p: next(p.gone_list.get()), "Error getting value state"),
        (lambda p: p.gone_map.containsKey((1,)), "Error checking if map state contains key"),
        (lambda p: p.gone_map.clear(), "Error clearing map state: .*gone map was deleted"),
    ],
)
def test_what_init_has_deleted_cannot_be_used_and_is_not_stored(act: Act, says: str) -> None:
    def attempt(processor: Any) -> None:
        with pytest.raises(PySparkRuntimeError, match=says):
            act(processor)
        processor.value.update((7,))

    state, _ = run_epochs(Deleting({"go": attempt}), [[{"id": "a", "step": "go"}]], key=KEY, output=OUTPUT)
    assert state.value("v", "a") == (7,)
    assert not any(name.startswith("gone") for name in state.entries)


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


class Moody(StatefulProcessor):
    """Asks in the way of the driver for as long as it is asked by the driver."""

    def __init__(self, driver: Any, task: Any) -> None:
        self.ways = {"_RecordingHandle": driver, "LocalHandle": task}

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.ways[type(handle).__name__](handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        del key, rows, timerValues
        yield from ()

    def close(self) -> None:
        pass


def value(schema: Any) -> Any:
    return lambda handle: handle.getValueState("v", schema)


@pytest.mark.parametrize(
    ("driver", "task", "says"),
    [
        (
            value(fields(n="long")),
            value(fields(n="long", last="string")),
            "Stage stage1: the state variable v was declared as a value of struct<n:bigint> when the query was built, "
            "and init asks for a value of struct<n:bigint,last:string> in a task. Let init ask for the same",
        ),
        (
            lambda handle: handle.getMapState("m", fields(k="long"), fields(n="long")),
            lambda handle: handle.getMapState("m", fields(k="string"), fields(n="long")),
            "m was declared as a map of struct<k:bigint> to struct<n:bigint> when",
        ),
        (
            value(fields(n="long")),
            lambda handle: handle.getListState("v", fields(n="long")),
            "and init asks for a list of struct<n:bigint> in a task",
        ),
        (value(fields(n="long")), lambda _: None, "v was declared when the query was built, and init does not ask for"),
        (
            value(fields(n="long")),
            lambda handle: (value(fields(n="long"))(handle), handle.deleteIfExists("v")),
            "v was declared when the query was built, and init does not ask for it in a task",
        ),
    ],
    ids=["schema", "map key", "kind", "missing", "deleted"],
)
def test_state_that_is_another_in_a_task_is_refused_with_both_sides(driver: Any, task: Any, says: str) -> None:
    with pytest.raises(EpochError, match=re.escape(says)):
        run_epochs(Moody(driver, task), [[{"id": "a"}]], key=KEY, output=OUTPUT)


def test_the_same_schema_may_be_written_with_other_spaces() -> None:
    texts = [
        StateRequest(VariableKind.VALUE, (text,)) for text in ("n BIGINT,\n    last STRING", "n BIGINT, last STRING")
    ]
    assert texts[0].same_as(texts[1])
    assert not texts[0].same_as(StateRequest(VariableKind.VALUE, ("n BIGINT",)))


def test_all_changes_of_many_windows_go_in_one_write() -> None:
    rows = [{"id": str(number), "step": "set"} for number in range(25_000)]
    state, outputs = run_epochs(Scripted({"set": set_value(1)}), [rows, rows], key=KEY, output=OUTPUT)
    assert [len(output) for output in outputs] == [25_000, 25_000]
    assert [len(write["v"]) for write in state.writes] == [25_000, 25_000]
    assert len(state.reads) == 2
    assert set(state.writes[0]["v"].column(OP).to_pylist()) == {Op.PUT}
    assert len(state.entries["v"]) == 25_000
