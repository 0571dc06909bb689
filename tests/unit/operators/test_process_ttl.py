"""Time to live: what has expired is not seen any more, is removed, and lives again once it is set again."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from anabranch.core.errors import EpochError
from anabranch.operators.process.program import TimeMode
from support.process_model import ModelState, fields, run_epochs

KEY = pa.schema([("id", pa.string())])
OUTPUT = fields(id="string", seen="string")
TTL_MS = 10


class Mortal(StatefulProcessor):
    """Takes the steps that its rows describe, on state that lives for a time and state that does not."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("v", fields(n="long"), TTL_MS)
        self.list = handle.getListState("l", fields(n="long"), TTL_MS)
        self.map = handle.getMapState("m", fields(k="string"), fields(n="long"), TTL_MS)
        self.kept = handle.getValueState("kept", fields(n="long"))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            self.act(row.step, row.k, row.n)
            yield Row(id=key[0], seen=repr(self.seen()))

    def act(self, step: str, k: str, n: int) -> None:
        match step:
            case "set":
                self.value.update((n,))
                self.kept.update((n,))
            case "unset":
                self.value.clear()
            case "put":
                self.list.put([(i,) for i in range(n + 1)])
            case "append":
                self.list.appendValue((n,))
            case "empty":
                self.list.clear()
            case "enter":
                self.map.updateValue((k,), (n,))
            case "remove":
                self.map.removeKey((k,))
            case "wipe":
                self.map.clear()

    def seen(self) -> Any:
        return (
            self.value.exists(),
            self.value.get(),
            self.list.exists(),
            list(self.list.get()),
            sorted(self.map.iterator()),
            self.map.exists(),
            self.kept.get(),
        )


class Model:
    """The state of one key, each entry with the time at which it is over."""

    def __init__(self) -> None:
        self.value: tuple[int, int] | None = None
        self.list: list[tuple[int, int]] = []
        self.map: dict[str, tuple[int, int]] = {}
        self.kept: int | None = None

    def act(self, step: str, k: str, n: int, now: int) -> None:
        until = now + TTL_MS
        match step:
            case "set":
                self.value, self.kept = (n, until), n
            case "unset":
                self.value = None
            case "put":
                self.list = [(i, until) for i in range(n + 1)]
            case "append":
                self.list.append((n, until))
            case "empty":
                self.list = []
            case "enter":
                self.map[k] = (n, until)
            case "remove":
                self.map.pop(k, None)
            case "wipe":
                self.map = {}

    def forget(self, now: int) -> None:
        self.value = self.value if self.value and self.value[1] > now else None
        self.list = [(n, until) for n, until in self.list if until > now]
        self.map = {k: (n, until) for k, (n, until) in self.map.items() if until > now}

    def seen(self) -> Any:
        value = (self.value[0],) if self.value else None
        elements = [(n,) for n, _ in self.list]
        items = sorted(((k,), (n,)) for k, (n, _) in self.map.items())
        kept = None if self.kept is None else (self.kept,)
        return value is not None, value, bool(elements), elements, items, bool(items), kept


def run(epochs: list[list[dict[str, Any]]], times: list[int], **more: Any) -> tuple[ModelState, list[Any]]:
    return run_epochs(Mortal(), epochs, key=KEY, output=OUTPUT, time_mode=TimeMode.PROCESSING_TIME, times=times, **more)


STEPS = ["set", "unset", "put", "append", "append", "empty", "enter", "enter", "remove", "wipe", "look"]
step = st.fixed_dictionaries(
    {
        "id": st.sampled_from("abc"),
        "step": st.sampled_from(STEPS),
        "k": st.sampled_from("xyz"),
        "n": st.integers(0, 3),
    }
)


@settings(max_examples=120, deadline=None)
@given(
    epochs=st.lists(st.lists(step, max_size=8), min_size=1, max_size=6),
    moves=st.lists(st.integers(0, 8), min_size=6, max_size=6),
    collide=st.booleans(),
)
def test_state_lives_as_in_the_model(epochs: list[list[dict[str, Any]]], moves: list[int], collide: bool) -> None:
    times = [1000 + sum(moves[: number + 1]) for number in range(len(epochs))]
    state, outputs = run(epochs, times, hash_of=(lambda _: 7) if collide else None)
    models = {key: Model() for key in "abc"}
    for rows, now, output in zip(epochs, times, outputs, strict=True):
        for key, model in models.items():
            model.forget(now)
            expected = []
            for row in rows:
                if row["id"] == key:
                    model.act(row["step"], row["k"], row["n"], now)
                    expected.append(repr(model.seen()))
            assert [row["seen"] for row in output if row["id"] == key] == expected
    # What has expired is gone from the state as well, also of keys that had no rows.
    for key, model in models.items():
        assert state.value("v", key) == model.value
        assert [value for _, value in sorted(state.map("l", key))] == model.list
        assert {k: value for (k,), value in state.map("m", key)} == model.map


def test_an_update_starts_the_time_again() -> None:
    def row(step: str) -> list[dict[str, Any]]:
        return [{"id": "a", "step": step, "k": "x", "n": 1}]

    state, outputs = run([row("set"), row("set"), row("look"), row("look"), []], [0, 9, 18, 19, 30])
    assert [epoch[0]["seen"].split(",")[0] for epoch in outputs[:4]] == ["(True", "(True", "(True", "(False"]
    assert state.value("v", "a") is None
    assert state.value("kept", "a") == (1,)
    assert [sorted(write) for write in state.writes] == [["kept", "v"], ["kept", "v"], [], ["v"], []]


@pytest.mark.parametrize(("ttl_ms", "words"), [(None, ""), (TTL_MS + 1, f" that lives for {TTL_MS + 1} ms")])
def test_init_must_ask_for_the_time_to_live_that_was_declared(ttl_ms: int | None, words: str) -> None:
    class Unsteady(Mortal):
        def init(self, handle: StatefulProcessorHandle) -> None:
            handle.getValueState("v", fields(n="long"), ttl_ms if type(handle).__name__ == "LocalHandle" else TTL_MS)

    says = f"declared as a value of struct<n:bigint> that lives for {TTL_MS} ms .* of struct<n:bigint>{words} in a"
    with pytest.raises(EpochError, match=says):
        run_epochs(Unsteady(), [[]], key=KEY, output=OUTPUT, time_mode=TimeMode.PROCESSING_TIME, times=[0])
