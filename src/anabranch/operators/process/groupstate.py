"""A StatefulProcessor around the function of applyInPandasWithState: its state is a value, its time-out a timer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import StructType

from anabranch.operators.process.frames import FrameRunner, scalar_keys
from anabranch.operators.process.program import Program
from anabranch.operators.process.task import DueTimer, Key
from anabranch.operators.process.timers import LocalTimers

#: The state variable.
STATE = "state"

Function = Callable[[tuple[Any, ...], Iterator[pd.DataFrame], GroupState], Iterable[pd.DataFrame]]


class GroupStateProcessor(StatefulProcessor):
    """Calls a function with the state of each key that has rows, then of each that has timed out."""

    def __init__(
        self, function: Function, schema: StructType, timeout: str, columns: tuple[str, ...], *, has_watermark: bool
    ) -> None:
        self.function = function
        self._schema = schema
        self._timeout = timeout
        self._columns = columns
        self._has_watermark = has_watermark

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._value = handle.getValueState(STATE, self._schema)

    def handleInputRows(self, key: Any, rows: Any, timerValues: TimerValues) -> Iterator[Any]:
        return self._call(key, rows, timerValues, timed_out=False)

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: ARG002
    ) -> Iterator[Any]:
        # Not no frame, but one without rows, as Spark does it.
        return self._call(key, iter((pd.DataFrame(columns=list(self._columns)),)), timerValues, timed_out=True)

    def _call(
        self, key: tuple[Any, ...], frames: Iterator[pd.DataFrame], times: TimerValues, *, timed_out: bool
    ) -> Iterator[pd.DataFrame]:
        state = self._state(times, timed_out=timed_out)
        results = self.function(key, frames, state)
        if isinstance(results, pd.DataFrame):
            raise TypeError("the function returned a DataFrame; return an iterable of them, or yield them")
        yield from results
        self._keep(state)

    def _state(self, times: TimerValues, *, timed_out: bool) -> GroupState:
        value: Any = self._value.get()
        return GroupState(
            optionalValue=value,
            batchProcessingTimeMs=times.getCurrentProcessingTimeInMs(),
            eventTimeWatermarkMs=times.getCurrentWatermarkInMs(),
            timeoutConf=self._timeout,
            hasTimedOut=timed_out,
            watermarkPresent=self._has_watermark,
            defined=value is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self._schema,
        )

    def _keep(self, state: GroupState) -> None:
        """Stores what the function has made of the state.

        A call that updates or removes it sets the time-out anew, or there is none any more. One that does neither, and
        sets no time-out, leaves the old one as it is, also if that is due: PySpark writes nothing then.
        """
        sets_timeout = state._timeout_timestamp != GroupState.NO_TIMESTAMP
        if not (state._updated or state._removed or sets_timeout):
            return
        if state._updated:
            self._value.update(state.get)
        elif state._removed:
            self._value.clear()
        if self._timeout == GroupStateTimeout.NoTimeout:
            return
        for expiry_ms in self._handle.listTimers():
            self._handle.deleteTimer(expiry_ms)
        if sets_timeout:
            self._handle.registerTimer(int(state._timeout_timestamp))


@dataclass(frozen=True)
class GroupProgram(Program):
    """The program of applyInPandasWithState."""

    @property
    def name(self) -> str:
        assert isinstance(self.processor, GroupStateProcessor)
        return getattr(self.processor.function, "__name__", type(self.processor.function).__name__)

    def place(self, method: str, key: object) -> str:
        what = "the time-out of" if method == "handleExpiredTimer" else "the call for"
        return f"{what} key {key!r}"

    def times(self, processing_time_ms: int, watermark_ms: int | None) -> TimerValues:
        """Returns the times in every time mode: a GroupState tells them regardless of its time-out."""
        return TimerValues(processing_time_ms, watermark_ms or 0)

    def due_up_to_ms(self, times: TimerValues) -> int | None:
        """Returns the moment before the time: a key times out after its time, not at it."""
        up_to_ms = super().due_up_to_ms(times)
        return None if up_to_ms is None else up_to_ms - 1


class GroupRunner(FrameRunner):
    """Keys are what a Series of them has, with rows and without. Time-outs are ended by the calls, not after them."""

    def row_keys(self, keys: pa.Table) -> list[Key]:
        return scalar_keys(keys, self.program.frames)

    def timer_keys(self, keys: pa.Table) -> list[Key]:
        return scalar_keys(keys, self.program.frames)

    def expire(self, due: Iterator[DueTimer], timers: LocalTimers) -> Iterator[pa.RecordBatch]:
        del timers
        return super().expire(due, _Lasting(self.cursor))


class _Lasting(LocalTimers):
    """A timer that has fired stays, unless the call that it led to has deleted it."""

    def delete(self, expiryTimestampMs: int) -> None:
        """Leaves the timer: the runner does not delete it here."""
