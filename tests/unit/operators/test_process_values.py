"""The types of state: what user code may pass, what it reads at once, and what it reads an epoch later."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

import datetime as dt
import decimal
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkTypeError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
)

from support.process_model import fields, run_epochs

KEY = pa.schema([("id", pa.string())])
D = decimal.Decimal
POINT = fields(x="integer", y="string")
MOMENT = dt.datetime(2024, 1, 2, 3, 4, 5, 6)
UTC_MOMENT = MOMENT.replace(tzinfo=dt.UTC)


class Level(IntEnum):
    HIGH = 3


class Keeper(StatefulProcessor):
    """Keeps one value, and notes what it reads of it right after, and in each later epoch."""

    def __init__(self, kind: DataType, given: Any) -> None:
        self.kind, self.given = kind, given
        self.read: list[Any] = []

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("v", fields(x=self.kind))
        self.list = handle.getListState("l", fields(x=self.kind))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        if not self.state.exists():
            self.state.update((self.given,))
            self.list.appendValue((self.given,))
        value = self.state.get()
        assert value is not None
        self.read += [value[0], next(iter(self.list.get()))[0]]
        yield Row(id=key[0])


def kept(kind: DataType, given: Any) -> Any:
    """What user code reads of a value: the same right after it was set, and later."""
    keeper = Keeper(kind, given)
    rows = [{"id": "a"}]
    run_epochs(keeper, [rows, rows, rows], key=KEY, output=fields(id="string"))
    assert len(keeper.read) == 6
    first = keeper.read[0]
    for later in keeper.read[1:]:
        assert repr(later) == repr(first)
        assert type(later) is type(first)
    return first


@pytest.mark.parametrize(
    ("kind", "given", "read"),
    [
        (BooleanType(), True, True),
        (BooleanType(), np.True_, True),
        (ByteType(), -128, -128),
        (ShortType(), np.int64(5), 5),
        (IntegerType(), Level.HIGH, 3),
        (LongType(), 2**63 - 1, 2**63 - 1),
        (FloatType(), 1.1, 1.100000023841858),
        (FloatType(), 1e300, float("inf")),
        (FloatType(), 3, 3.0),
        (DoubleType(), 2.2, 2.2),
        (DoubleType(), 3, 3.0),
        (DoubleType(), np.float32(0.5), 0.5),
        (DoubleType(), float("nan"), float("nan")),
        (DecimalType(10, 2), D("1.235"), D("1.24")),
        (DecimalType(10, 2), D("-1.235"), D("-1.24")),
        (DecimalType(10, 2), 5, D("5.00")),
        (DecimalType(38, 0), D(10**38 - 1), D(10**38 - 1)),
        (StringType(), "ünïcode", "ünïcode"),
        (StringType(), np.str_("n"), "n"),
        (StringType(), 5, "5"),
        (StringType(), True, "true"),
        (BinaryType(), b"\x00\xff", b"\x00\xff"),
        (BinaryType(), bytearray(b"q"), b"q"),
        (BinaryType(), "hi", b"hi"),
        (DateType(), dt.date(2024, 1, 2), dt.date(2024, 1, 2)),
        (DateType(), MOMENT, dt.date(2024, 1, 2)),
        (DateType(), pd.Timestamp(MOMENT), dt.date(2024, 1, 2)),
        (TimestampType(), MOMENT, MOMENT),
        (TimestampType(), pd.Timestamp(MOMENT), MOMENT),
        (TimestampNTZType(), MOMENT, MOMENT),
        (TimestampNTZType(), UTC_MOMENT, MOMENT),
        (TimestampNTZType(), dt.datetime(1, 1, 1), dt.datetime(1, 1, 1)),
        (TimeType(), dt.time(1, 2, 3, 4), dt.time(1, 2, 3, 4)),
        (DayTimeIntervalType(), dt.timedelta(days=1, microseconds=3), dt.timedelta(days=1, microseconds=3)),
        (DayTimeIntervalType(), pd.Timedelta(days=2), dt.timedelta(days=2)),
        (ArrayType(IntegerType()), [1, None, 2], [1, None, 2]),
        (ArrayType(IntegerType()), (1, 2), [1, 2]),
        (ArrayType(IntegerType()), np.array([1, 2]), [1, 2]),
        (ArrayType(DoubleType()), [1, np.float64(2.5)], [1.0, 2.5]),
        (ArrayType(ArrayType(StringType())), [["a"], [], None], [["a"], [], None]),
        (MapType(StringType(), IntegerType()), {"a": 1, "b": None}, {"a": 1, "b": None}),
        (MapType(TimestampType(), ArrayType(DateType())), {MOMENT: [dt.date(1, 1, 1)]}, {MOMENT: [dt.date(1, 1, 1)]}),
        (POINT, (1, "q"), Row(x=1, y="q")),
        (POINT, [1, None], Row(x=1, y=None)),
        (POINT, {"y": "u", "x": 4}, Row(x=4, y="u")),
        (POINT, {"x": 4}, Row(x=4, y=None)),
        (ArrayType(POINT), [(5, "a"), None], [Row(x=5, y="a"), None]),
        (
            fields(at=TimestampType(), of=MapType(StringType(), POINT), ds=ArrayType(DecimalType(5, 1))),
            (MOMENT, {"k": (1, "z")}, [D("1.25"), None]),
            Row(at=MOMENT, of={"k": Row(x=1, y="z")}, ds=[D("1.3"), None]),
        ),
        (LongType(), None, None),
        (POINT, None, None),
        (ArrayType(StringType()), None, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_is_read_in_the_type_that_spark_gives_it(kind: DataType, given: Any, read: Any) -> None:
    found = kept(kind, given)
    assert repr(found) == repr(read)
    assert type(found) is type(read)


@pytest.fixture
def _tokyo() -> Iterator[None]:
    """A process whose time zone is not that of the state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_tokyo")
def test_timestamps_are_naive_in_the_time_zone_of_the_process() -> None:
    assert kept(TimestampType(), MOMENT) == MOMENT
    assert kept(TimestampType(), UTC_MOMENT) == MOMENT + dt.timedelta(hours=9)
    assert kept(TimestampType(), pd.Timestamp(UTC_MOMENT)) == MOMENT + dt.timedelta(hours=9)
    keeper = Keeper(TimestampType(), MOMENT)
    state, _ = run_epochs(keeper, [[{"id": "a"}]], key=KEY, output=fields(id="string"))
    assert state.value("v", "a") == (UTC_MOMENT - dt.timedelta(hours=9),)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (BooleanType(), 1),
        (IntegerType(), 1.0),
        (IntegerType(), True),
        (IntegerType(), "1"),
        (DoubleType(), "1"),
        (DoubleType(), True),
        (DoubleType(), 10**400),
        (FloatType(), D(1)),
        (DecimalType(10, 2), 1.5),
        (DecimalType(10, 2), D("NaN")),
        (DecimalType(10, 2), D("123456789.5")),
        (StringType(), b"x"),
        (StringType(), 1.5),
        (StringType(), ["x"]),
        (BinaryType(), 5),
        (DateType(), "2024-01-01"),
        (DateType(), 5),
        (TimestampType(), dt.date(2024, 1, 1)),
        (TimestampType(), "2024-01-01"),
        (TimestampType(), pd.NaT),
        (TimestampNTZType(), 5),
        (DayTimeIntervalType(), 5),
        (ArrayType(IntegerType()), "12"),
        (ArrayType(IntegerType()), {1: 2}),
        (ArrayType(IntegerType()), 5),
        (ArrayType(IntegerType()), ["a"]),
        (MapType(StringType(), IntegerType()), [("a", 1)]),
        (MapType(StringType(), IntegerType()), {"a": "b"}),
        (MapType(StringType(), IntegerType()), {None: 1}),
        (POINT, (1,)),
        (POINT, (1, "a", 2)),
        (POINT, ("a", "b")),
        (POINT, 5),
        (ArrayType(POINT), [(1,)]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_of_another_type_is_refused_by_name(kind: DataType, given: Any) -> None:
    with pytest.raises(Exception, match="State variable v: field x of its value is a ") as caught:
        kept(kind, given)
    assert isinstance(caught.value.__cause__, PySparkTypeError)


@pytest.mark.parametrize(
    ("kind", "given"), [(ByteType(), 128), (IntegerType(), 2**31), (ArrayType(ShortType()), [2**15])]
)
def test_a_number_out_of_range_fails_the_epoch(kind: DataType, given: Any) -> None:
    with pytest.raises(Exception, match=r"state variable v, field x: .* is not a"):
        kept(kind, given)


class Mixed(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        schema = StructType.fromJson(fields(a="long", b=TimestampType(), c=ArrayType(POINT), id="string").jsonValue())
        self.state = handle.getValueState("v", schema)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        number = int(key[0])
        if not self.state.exists():
            self.state.update(
                (number, MOMENT if number % 2 else None, [(number, None)] * (number % 3), f"own {number}")
            )
        yield Row(id=repr(self.state.get()))


def test_fields_named_like_the_key_do_not_mix_with_it() -> None:
    rows = [{"id": str(number)} for number in range(10)]
    state, outputs = run_epochs(Mixed(), [rows, rows], key=KEY, output=fields(id="string"))
    assert sorted(row["id"] for row in outputs[0]) == sorted(row["id"] for row in outputs[1])
    assert "(4, None, [Row(x=4, y=None)], 'own 4')" in [row["id"] for row in outputs[1]]
    assert state.writes[0]["v"].schema.names[-1] == "value.id"
