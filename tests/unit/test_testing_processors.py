"""The test kit, on processors: rows, timers, time to live, and what a processor wrongly keeps for itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, Row, StringType, StructField, StructType, TimestampType

from anabranch import UnsupportedError
from anabranch.testing import ProcessorTest


def fields(**types: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


INPUT = fields(user=StringType(), at=TimestampType(), amount=LongType())
OUTPUT = fields(user=StringType(), total=LongType())
TOTAL = fields(total=LongType())


class Totals(StatefulProcessor):
    """Totals that are given out when nothing has come for a minute of event time."""

    def __init__(self, ttl_ms: int | None = None) -> None:
        self._ttl_ms = ttl_ms
        self.calls = 0

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", TOTAL, self._ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        del timerValues
        self.calls += 1
        values = list(rows)
        before = self._total.get() if self._total.exists() else (0,)
        self._total.update((before[0] + sum(row.amount for row in values),))
        if self._ttl_ms is None:
            for timer in list(self._handle.listTimers()):
                self._handle.deleteTimer(timer)
            self._handle.registerTimer(round(max(row.at for row in values).timestamp() * 1000) + 60_000)
        yield Row(user=f"{key[0]}/{self.calls}", total=self._total.get()[0])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        del timerValues, expiredTimerInfo
        total = self._total.get()[0]
        self._total.clear()
        yield Row(user=f"{key[0]} is done", total=total)

    def close(self) -> None:
        pass


class Frames(Totals):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        del timerValues
        total = (self._total.get() or (0,))[0] + sum(int(frame["amount"].sum()) for frame in rows)
        self._total.update((total,))
        yield pd.DataFrame({"user": [key[0]], "total": [total]})


def at(minute: int) -> datetime:
    return datetime(2026, 1, 1, 0, minute)


def test_rows_make_state_and_timers_fire_when_event_time_passes() -> None:
    test = ProcessorTest(Totals(), INPUT, ["user"], OUTPUT, timeMode="eventTime")
    assert sorted(test.send([("ann", at(0), 3), ("bob", at(5), 1), ("ann", at(0), 4)])) == [
        Row(user="ann/1", total=7), Row(user="bob/2", total=1),
    ]  # fmt: skip
    assert test.advance_watermark(at(0)) == []
    assert sorted(test.state("total")) == [Row(user="ann", total=7), Row(user="bob", total=1)]
    assert test.advance_watermark(at(2)) == [Row(user="ann is done", total=7)]
    assert test.state("total") == [Row(user="bob", total=1)]
    assert test.advance_watermark(at(2)) == []
    assert test.send([{"user": "bob", "at": at(9), "amount": 1}]) == [Row(user="bob/1", total=2)]
    assert test.advance_watermark(at(6)) == []
    assert test.advance_watermark(at(10)) == [Row(user="bob is done", total=2)]


def test_rows_that_the_watermark_has_passed_are_dropped_as_in_a_query() -> None:
    test = ProcessorTest(Totals(), INPUT, ["user"], OUTPUT, timeMode="eventTime")
    test.advance_watermark(at(10))
    assert test.send([("ann", at(9), 1), ("ann", at(10), 2)]) == []
    assert test.send([("ann", at(10), 1), ("ann", at(11), 2)]) == [Row(user="ann/1", total=2)]
    # Where no timer goes by event time, nothing is late.
    test = ProcessorTest(Totals(ttl_ms=0), INPUT, ["user"], OUTPUT, timeMode="processingTime")
    test.advance_watermark(at(10))
    assert test.send([("ann", at(9), 1)]) == [Row(user="ann/1", total=1)]


def test_the_column_of_event_time_is_named_where_it_could_be_another() -> None:
    both = fields(user=StringType(), made=TimestampType(), at=TimestampType(), amount=LongType())
    with pytest.raises(UnsupportedError, match=r"Name the one that withWatermark has.*eventTime='made'"):
        ProcessorTest(Totals(), both, ["user"], OUTPUT, timeMode="eventTime")
    with pytest.raises(UnsupportedError, match="'when' is none of"):
        ProcessorTest(Totals(), both, ["user"], OUTPUT, timeMode="eventTime", eventTime="when")
    test = ProcessorTest(Totals(), both, ["user"], OUTPUT, timeMode="eventTime", eventTime="at")
    test.advance_watermark(at(10))
    assert test.send([("ann", at(0), at(11), 2), ("ann", at(11), at(0), 4)]) == [Row(user="ann/1", total=2)]


class Continued(Totals):
    """Begins with totals from elsewhere."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        del timerValues
        frame = initialState if isinstance(initialState, pd.DataFrame) else None
        self._total.update((int(frame["from"].sum()) if frame is not None else initialState["from"],))
        if self._ttl_ms is None:
            self._handle.registerTimer(round(at(5).replace(tzinfo=UTC).timestamp() * 1000))
        assert isinstance(key[0], str)


class ContinuedFrames(Continued, Frames):
    """The same, of frames."""


def test_initial_state_is_there_before_the_first_rows_and_not_again() -> None:
    given = fields(**{"from": LongType(), "user": StringType()}), [(100, "ann"), {"user": "bob", "from": 50}]
    test = ProcessorTest(Continued(), INPUT, ["user"], OUTPUT, timeMode="eventTime", initialState=given)
    assert test.state("total") == []
    assert test.send([("ann", at(9), 3)]) == [Row(user="ann/1", total=103)]
    assert sorted(test.state("total")) == [Row(user="ann", total=103), Row(user="bob", total=50)]
    assert test.advance_watermark(at(5)) == [Row(user="bob is done", total=50)]
    assert test.send([("bob", at(9), 1)]) == [Row(user="bob/1", total=1)]
    frames = ProcessorTest(
        ContinuedFrames(ttl_ms=0), INPUT, ["user"], OUTPUT, timeMode="processingTime", initialState=given, pandas=True
    )
    assert frames.send([("bob", at(0), 3)]) == [Row(user="bob", total=53)]
    for wrong in (fields(name=StringType()), fields(user=LongType())):
        with pytest.raises(UnsupportedError, match=r"initialState has the columns .* without the key struct<user:str"):
            ProcessorTest(Continued(), INPUT, ["user"], OUTPUT, initialState=(wrong, []))


def test_state_with_a_time_to_live_is_gone_after_it() -> None:
    test = ProcessorTest(Totals(ttl_ms=10_000), INPUT, ["user"], OUTPUT, timeMode="processingTime")
    test.send([("ann", at(0), 3)])
    assert test.advance_clock(9) == []
    assert [row.total for row in test.state("total")] == [3]
    test.advance_clock(2)
    assert test.state("total") == []
    assert test.send([("ann", at(0), 1)]) == [Row(user="ann/1", total=1)]


def test_frames() -> None:
    test = ProcessorTest(Frames(ttl_ms=0), INPUT, ["user"], OUTPUT, timeMode="processingTime", pandas=True)
    assert test.send([("ann", at(0), 3), ("ann", at(1), 4)]) == [Row(user="ann", total=7)]
    assert test.send([("ann", at(0), 3)]) == [Row(user="ann", total=10)]


class Limited(Totals):
    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self._limits = handle.getBroadcast("limits")  # type: ignore[attr-defined]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        yield Row(user=key[0], total=min(sum(row.amount for row in rows), self._limits[key[0]].limit))


def test_broadcast_tables_are_those_that_the_test_gives() -> None:
    limits = {"ann": Row(user="ann", limit=5)}
    test = ProcessorTest(Limited(ttl_ms=0), INPUT, ["user"], OUTPUT, timeMode="eventTime", broadcast={"limits": limits})
    assert test.send([("ann", at(0), 3), ("ann", at(0), 4)]) == [Row(user="ann", total=5)]
    limits["ann"] = Row(user="ann", limit=6)
    assert test.send([("ann", at(0), 7)]) == [Row(user="ann", total=6)]
    with pytest.raises(UnsupportedError, match="no broadcast table 'limits'"):
        ProcessorTest(Limited(ttl_ms=0), INPUT, ["user"], OUTPUT, timeMode="eventTime")


def test_what_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"The key \['nope'\] must be columns of the rows"):
        ProcessorTest(Totals(), INPUT, ["nope"], OUTPUT)
    test = ProcessorTest(Totals(), INPUT, ["user"], OUTPUT, timeMode="eventTime")
    with pytest.raises(UnsupportedError, match="no state variable 'sum'"):
        test.state("sum")
    for row in (("ann", at(0)), {"user": "ann", "at": at(0)}, "ann"):
        with pytest.raises(UnsupportedError, match=r"does not have the columns \['user', 'at', 'amount'\]"):
            test.send([("ann", at(0), 1), row])
    assert test.state("total") == []
