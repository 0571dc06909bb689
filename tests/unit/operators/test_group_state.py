"""applyInPandasWithState in a task: what the function is given, and what becomes of its state and its time-outs."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from anabranch.core.errors import EpochError
from anabranch.core.ids import StageNumber
from anabranch.operators.process.declare import declare_state
from anabranch.operators.process.groupstate import GroupProgram, GroupRunner, GroupStateProcessor
from anabranch.operators.process.program import FrameSettings, TimeMode
from anabranch.operators.process.timers import TIMERS
from support.process_model import ModelState, batches_of, fields, rows_in

KEY = pa.schema([("id", pa.int32())])
OUTPUT = fields(id="integer", seen="string")
MODES = {
    GroupStateTimeout.NoTimeout: TimeMode.NONE,
    GroupStateTimeout.ProcessingTimeTimeout: TimeMode.PROCESSING_TIME,
    GroupStateTimeout.EventTimeTimeout: TimeMode.EVENT_TIME,
}
Seen = Callable[[Any, list[pd.DataFrame], GroupState], Any]


class Groups:
    """Runs a function epoch by epoch, on the state that it leaves."""

    def __init__(self, see: Seen, timeout: str = GroupStateTimeout.NoTimeout, *, has_watermark: bool = True) -> None:
        def function(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            yield pd.DataFrame({"id": [key[0]], "seen": [repr(see(key, list(frames), state))]})

        columns = ("id", "n")
        processor = GroupStateProcessor(function, fields(total="long"), timeout, columns, has_watermark=has_watermark)
        spec = declare_state(processor, KEY, StageNumber(1), "sums", MODES[timeout]).spec
        frames = FrameSettings(rows_max=3, widened=False)
        self.program = GroupProgram(spec, processor, OUTPUT, frames, MODES[timeout])
        self.state = ModelState(spec)

    def epoch(self, rows: Any = (), *, now: int = 1000, watermark: int | None = None) -> dict[int, str]:
        batches = batches_of(rows, self.program.spec) if rows else []
        times = self.program.times(now, watermark)
        output = rows_in(GroupRunner.run_task(batches, self.program, self.state, times))
        assert len({row["id"] for row in output}) == len(output), "a key is called once in an epoch"
        return {row["id"]: row["seen"] for row in output}


def rows_of(*rows: tuple[int | None, int | None]) -> pa.Table:
    ids, numbers = zip(*rows, strict=True)
    return pa.table({"id": pa.array(ids, pa.int32()), "n": pa.array(numbers, pa.int16())})


def add(key: Any, frames: list[pd.DataFrame], state: GroupState) -> Any:
    del key
    total = (state.getOption or (0,))[0] + sum(int(frame["n"].sum()) for frame in frames)
    state.update((np.int64(total),))
    return state.get, state.exists


def test_state_lives_from_epoch_to_epoch() -> None:
    groups = Groups(add)
    assert groups.epoch(rows_of((1, 5), (2, 7), (1, 6))) == {1: "((11,), True)", 2: "((7,), True)"}
    assert groups.epoch(rows_of((1, 1))) == {1: "((12,), True)"}
    assert groups.state.value("state", 2) == (7,)
    assert groups.epoch() == {}


def test_keys_and_frames_have_the_types_that_spark_gives_them() -> None:
    def tell(key: Any, frames: list[pd.DataFrame], state: GroupState) -> Any:
        kinds = [[str(kind) for kind in frame.dtypes] for frame in frames]
        return type(key[0]).__name__, [len(frame) for frame in frames], kinds, state.getCurrentProcessingTimeMs()

    seen = Groups(tell).epoch(rows_of((1, 1), (2, 1), (1, 2), (1, 3), (2, None), (1, 4)), now=77)
    assert seen == {
        1: repr(("int32", [3, 1], [["int32", "int16"]] * 2, 77)),
        2: repr(("int32", [2], [["int32", "float64"]], 77)),
    }


def test_a_null_in_one_key_does_not_change_the_others() -> None:
    keys: list[Any] = []
    groups = Groups(lambda key, frames, state: keys.append(key[0]))  # noqa: ARG005
    groups.program.processor.function = lambda key, frames, state: keys.append(key[0]) or []  # type: ignore[attr-defined] # noqa: ARG005
    groups.epoch(rows_of((1, 1), (None, 1)))
    assert sorted(type(key).__name__ for key in keys) == ["float64", "int32"]


def test_a_key_times_out_once_after_its_time_if_no_rows_come() -> None:
    def wait(key: Any, frames: list[pd.DataFrame], state: GroupState) -> Any:
        del key
        if state.hasTimedOut:
            seen = "out", [list(frame.columns) for frame in frames], [len(frame) for frame in frames], state.getOption
            state.update(state.get)
            return seen
        state.update((1,))
        state.setTimeoutTimestamp(int(frames[0]["n"].iloc[0]))
        return state.getCurrentWatermarkMs()

    groups = Groups(wait, GroupStateTimeout.EventTimeTimeout)
    assert groups.epoch(rows_of((1, 50), (2, 60), (3, 90))) == {1: "0", 2: "0", 3: "0"}
    assert groups.epoch(watermark=50) == {}
    # Rows of a key push its time-out back, also if it would be due.
    assert groups.epoch(rows_of((1, 80)), watermark=61) == {1: "61", 2: "('out', [['id', 'n']], [0], (1,))"}
    assert groups.epoch(watermark=80) == {}
    assert groups.epoch(watermark=81) == {1: "('out', [['id', 'n']], [0], (1,))"}
    assert groups.epoch(watermark=85) == {}
    assert groups.state.value("state", 1) == (1,)
    assert [len(groups.state.map(TIMERS, key)) for key in (1, 2, 3)] == [0, 0, 1]


def test_a_call_that_updates_without_setting_a_time_out_ends_it() -> None:
    def first_only(key: Any, frames: list[pd.DataFrame], state: GroupState) -> Any:
        del key, frames
        first = not state.exists
        state.update((1,))
        if first:
            state.setTimeoutDuration(10)
        return state.hasTimedOut

    groups = Groups(first_only, GroupStateTimeout.ProcessingTimeTimeout)
    groups.epoch(rows_of((1, 1), (2, 1)), now=100)
    groups.epoch(rows_of((1, 1)), now=105)
    assert groups.epoch(now=110) == {}
    assert groups.epoch(now=111) == {2: "True"}
    assert groups.epoch(now=500) == {}


def test_a_call_that_does_nothing_leaves_the_time_out_as_it_is() -> None:
    calls: list[tuple[int, bool]] = []

    def first_only(key: Any, frames: list[pd.DataFrame], state: GroupState) -> Any:
        del frames
        calls.append((int(key[0]), state.hasTimedOut))
        if not state.exists:
            state.update((1,))
            state.setTimeoutDuration(10)

    def calls_of_epoch(rows: Any = (), *, now: int) -> list[tuple[int, bool]]:
        calls.clear()
        batches = batches_of(rows, groups.program.spec) if rows else []
        list(GroupRunner.run_task(batches, groups.program, groups.state, groups.program.times(now, None)))
        return list(calls)

    groups = Groups(first_only, GroupStateTimeout.ProcessingTimeTimeout)
    calls_of_epoch(rows_of((1, 1)), now=100)
    assert calls_of_epoch(rows_of((1, 1)), now=105) == [(1, False)]
    assert calls_of_epoch(now=110) == []
    # As in PySpark, which finds it due again and again.
    assert calls_of_epoch(now=111) == [(1, True)]
    assert calls_of_epoch(rows_of((1, 1)), now=112) == [(1, False), (1, True)]
    assert calls_of_epoch(now=500) == [(1, True)]


def test_state_that_is_removed_may_still_time_out() -> None:
    def forget(key: Any, frames: list[pd.DataFrame], state: GroupState) -> Any:
        del key, frames
        seen = state.exists, state.hasTimedOut
        state.update((1,))
        state.remove()
        if not state.hasTimedOut:
            state.setTimeoutDuration(10)
        return *seen, state.exists

    groups = Groups(forget, GroupStateTimeout.ProcessingTimeTimeout)
    assert groups.epoch(rows_of((1, 1)), now=100) == {1: "(False, False, False)"}
    assert groups.state.value("state", 1) is None
    assert groups.epoch(now=111) == {1: "(False, True, False)"}
    assert groups.state.entries == {"state": {}, TIMERS: {}}


@pytest.mark.parametrize(
    ("timeout", "act", "says"),
    [
        (GroupStateTimeout.NoTimeout, lambda s: s.setTimeoutDuration(5), "set timeout duration"),
        (GroupStateTimeout.EventTimeTimeout, lambda s: s.setTimeoutDuration(5), "set timeout duration"),
        (GroupStateTimeout.EventTimeTimeout, lambda s: s.setTimeoutTimestamp(5), "INVALID_TIMEOUT_TIMESTAMP"),
        (GroupStateTimeout.NoTimeout, lambda s: s.get, "STATE_NOT_EXISTS"),
        (GroupStateTimeout.NoTimeout, lambda s: s.update((1, 2)), "1 are required while 2 values"),
    ],
)
def test_mistakes_name_stage_function_and_key(timeout: str, act: Any, says: str) -> None:
    groups = Groups(lambda key, frames, state: act(state), timeout)  # noqa: ARG005
    with pytest.raises(EpochError, match=rf"Stage sums: function failed in the call for key \(.*1\)?,\): .*{says}"):
        groups.epoch(rows_of((1, 1)), watermark=10)


def test_the_watermark_is_there_only_if_there_is_one() -> None:
    groups = Groups(lambda key, frames, state: state.getCurrentWatermarkMs(), has_watermark=False)  # noqa: ARG005
    with pytest.raises(EpochError, match="setting watermark"):
        groups.epoch(rows_of((1, 1)))


def test_a_single_frame_is_not_taken_for_many() -> None:
    groups = Groups(add)
    groups.program.processor.function = lambda *_: pd.DataFrame({"id": [1], "seen": ["x"]})  # type: ignore[attr-defined]
    with pytest.raises(EpochError, match="returned a DataFrame; return an iterable of them"):
        groups.epoch(rows_of((1, 1)))
