"""Timers in a task: which fire, when, in which order, for which keys, and what is left of them."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

import datetime as dt
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from anabranch.core.errors import EpochError
from anabranch.operators.process.program import FrameSettings, TimeMode
from anabranch.operators.process.timers import TIMERS
from support.process_model import ModelState, fields, run_epochs

KEY = pa.schema([("id", pa.string())])
OUTPUT = fields(id="string", seen="string")


class Alarm(StatefulProcessor):
    """Rows register and delete timers; a timer that fires may do so as well, by rules that a model can follow."""

    def __init__(self, *, pandas: bool = False) -> None:
        self.pandas = pandas

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.fired = handle.getValueState("fired", fields(n="long"))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        steps = (
            [(row.step, row.at) for row in rows]
            if not self.pandas
            else [(step, at) for frame in rows for step, at in zip(frame["step"], frame["at"], strict=True)]
        )
        for step, at in steps:
            {"set": self.handle.registerTimer, "unset": self.handle.deleteTimer}[step](at)
        yield self.row(key, f"rows {list(self.handle.listTimers())}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        at = expiredTimerInfo.getExpiryTimeInMs()
        n = (self.fired.get() or (0,))[0] + 1
        self.fired.update((n,))
        for step, time in follow_up(at):
            {"set": self.handle.registerTimer, "unset": self.handle.deleteTimer}[step](time)
        assert timerValues.getCurrentWatermarkInMs() >= at
        yield self.row(key, f"timer {at} {n} {list(self.handle.listTimers())}")

    def row(self, key: Any, text: str) -> Any:
        return pd.DataFrame({"id": [key[0]], "seen": [text]}) if self.pandas else Row(id=key[0], seen=text)


def follow_up(at: int) -> list[tuple[str, int]]:
    """What a timer does when it fires: itself again, one before it, one after it, or the end of the next one."""
    return {1: [("set", at)], 2: [("set", at - 1)], 3: [("set", at + 3)], 4: [("unset", at + 1)]}.get(at % 6, [])


def run(epochs: list[list[tuple[str, str, int]]], times: list[int], **more: Any) -> tuple[ModelState, list[Any]]:
    rows = [[{"id": key, "step": step, "at": at} for key, step, at in epoch] for epoch in epochs]
    return run_epochs(
        Alarm(pandas="frames" in more), rows, key=KEY, output=OUTPUT, time_mode=TimeMode.EVENT_TIME, times=times, **more
    )


def model(epochs: list[list[tuple[str, str, int]]], times: list[int]) -> tuple[list[dict[str, list[str]]], Any]:
    """The same, key by key, in sets: what each key sees in each epoch, and the timers that are left."""
    timers: dict[str, set[int]] = {}
    fired: dict[str, int] = {}
    outputs = []
    for epoch, now in zip(epochs, times, strict=True):
        seen: dict[str, list[str]] = {}
        for key, step, at in epoch:
            mine = timers.setdefault(key, set())
            (mine.add if step == "set" else mine.discard)(at)
        for key in {key for key, *_ in epoch}:
            seen[key] = [f"rows {sorted(timers[key])}"]
        for key, mine in timers.items():
            for at in sorted(at for at in mine if at <= now):
                fired[key] = fired.get(key, 0) + 1
                for step, time in follow_up(at):
                    (mine.add if step == "set" else mine.discard)(time)
                seen.setdefault(key, []).append(f"timer {at} {fired[key]} {sorted(mine)}")
                mine.discard(at)
        outputs.append(seen)
    return outputs, timers


def by_key(output: list[dict[str, str]]) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {}
    for row in output:
        seen.setdefault(row["id"], []).append(row["seen"])
    return seen


def stored(state: ModelState, key: str) -> set[int]:
    return {at for (at,), _ in state.map(TIMERS, key)}


step = st.tuples(st.sampled_from("abc"), st.sampled_from(["set", "set", "unset"]), st.integers(0, 40))


@pytest.mark.parametrize("frames", [None, FrameSettings()], ids=["rows", "pandas"])
@settings(max_examples=80, deadline=None)
@given(
    epochs=st.lists(st.lists(step, max_size=8), min_size=1, max_size=5),
    moves=st.lists(st.integers(0, 15), min_size=5, max_size=5),
    collide=st.booleans(),
)
def test_timers_fire_as_in_the_model(
    frames: FrameSettings | None, epochs: list[list[tuple[str, str, int]]], moves: list[int], collide: bool
) -> None:
    times = [sum(moves[: number + 1]) for number in range(len(epochs))]
    more = {"frames": frames} if frames else {}
    state, outputs = run(epochs, times, hash_of=(lambda _: 7) if collide else None, **more)
    expected, timers = model(epochs, times)
    assert [by_key(output) for output in outputs] == expected
    for key in "abc":
        assert stored(state, key) == timers.get(key, set())


def test_keys_without_rows_come_with_the_others_and_only_if_timers_of_theirs_are_due() -> None:
    state, outputs = run([[("a", "set", 10), ("b", "set", 30)], [("b", "set", 40)], [], []], [0, 9, 12, 12])
    assert [by_key(output) for output in outputs] == [
        {"a": ["rows [10]"], "b": ["rows [30]"]},
        {"b": ["rows [30, 40]"]},
        {"a": ["timer 10 1 [10]"]},
        {},
    ]
    read = [keys.column("id").to_pylist() for keys in state.reads]
    assert read == [["a", "b"], ["b"], [], []]
    assert [keys.column("id").to_pylist() for keys in state.due] == [[], [], ["a"], []]
    assert state.writes[-1] == {}
    assert stored(state, "b") == {30, 40}


def test_many_timers_of_many_keys_fire_in_windows() -> None:
    keys = [str(number) for number in range(12_000)]
    epochs = [[(key, "set", at) for key in keys for at in (5, 11)], []]
    state, outputs = run(epochs, [0, 20])
    assert len(outputs[1]) == 24_000
    assert all(seen[0].startswith("timer 5 1 ") for seen in by_key(outputs[1]).values())
    assert state.entries[TIMERS] == {}
    assert state.value("fired", "77") == (2,)


def test_keys_of_timers_are_rows_with_the_types_of_state() -> None:
    """As Spark gives them; in handleInputRows, times have a time zone."""

    class Noting(Alarm):
        seen: Any = None

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
            self.seen = key
            return iter(())

    utc = pa.timestamp("us", "UTC")
    rows = pa.table(
        {
            "id": ["a"],
            "at_time": pa.array([dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)], utc),
            "step": ["set"],
            "at": [5],
        }
    )
    key = pa.schema([("id", pa.string()), ("at_time", utc)])
    noting = Noting()
    run_epochs(noting, [rows, []], key=key, output=OUTPUT, time_mode=TimeMode.EVENT_TIME, times=[0, 9])
    assert isinstance(noting.seen, Row)
    assert noting.seen.id == "a"
    assert noting.seen.at_time.tzinfo is None


def test_a_key_field_may_have_the_name_that_timers_use() -> None:
    key = pa.schema([("expiry_ms", pa.int64())])
    rows = [{"expiry_ms": 3, "step": "set", "at": 5}]

    class Numbered(Alarm):
        def row(self, key: Any, text: str) -> Any:
            return Row(id=str(key.expiry_ms if isinstance(key, Row) else key[0]), seen=text)

    _, outputs = run_epochs(Numbered(), [rows, []], key=key, output=OUTPUT, time_mode=TimeMode.EVENT_TIME, times=[0, 9])
    assert outputs[1] == [{"id": "3", "seen": "timer 5 1 [5]"}]


@pytest.mark.parametrize("pandas", [False, True])
def test_failures_of_timers_name_the_key_and_show_user_code(pandas: bool) -> None:
    class Failing(Alarm):
        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
            raise KeyError("gone")

    with pytest.raises(EpochError) as caught:
        run_epochs(
            Failing(pandas=pandas),
            [[{"id": "a", "step": "set", "at": 5}]],
            key=KEY,
            output=OUTPUT,
            time_mode=TimeMode.PROCESSING_TIME,
            times=[9],
            frames=FrameSettings() if pandas else None,
        )
    assert "Stage stage1: Failing failed in handleExpiredTimer for key Row(id='a'): KeyError: 'gone'" in str(
        caught.value
    )
    assert 'raise KeyError("gone")' in str(caught.value)
    assert "anabranch/operators" not in str(caught.value)


@pytest.mark.parametrize("moment", [1.5, "12", None, 2**63])
def test_what_is_no_moment_is_refused(moment: Any) -> None:
    class Odd(Alarm):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            self.handle.registerTimer(moment)
            return iter(())

    with pytest.raises(EpochError, match=r"The time of a timer is .* Pass a whole number of milliseconds"):
        run_epochs(Odd(), [[{"id": "a"}]], key=KEY, output=OUTPUT, time_mode=TimeMode.PROCESSING_TIME, times=[9])


def test_output_of_a_timer_that_does_not_fit_is_refused_with_its_key() -> None:
    class Odd(Alarm):
        def row(self, key: Any, text: str) -> Any:
            return 5 if key[0] == "b" and text.startswith("timer") else super().row(key, text)

    rows = [{"id": key, "step": "set", "at": 5} for key in ("a", "b", "c")]
    with pytest.raises(EpochError, match=r"Stage stage1: for key Row\(id='b'\), the processor yielded 5, a int"):
        run_epochs(Odd(), [rows, []], key=KEY, output=OUTPUT, time_mode=TimeMode.EVENT_TIME, times=[0, 9])


def test_timers_belong_to_keys() -> None:
    class Early(Alarm):
        def close(self) -> None:
            if type(self.handle).__name__ == "LocalHandle":
                self.handle.registerTimer(1)

    with pytest.raises(EpochError, match=r"failed in close.*Timers: there is no key"):
        run_epochs(Early(), [[]], key=KEY, output=OUTPUT, time_mode=TimeMode.PROCESSING_TIME, times=[9])
