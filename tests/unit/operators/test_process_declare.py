"""What a processor declares when a query is built, and what is refused there."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

import threading
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    ValueState,
)
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    LongType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
    YearMonthIntervalType,
)

from anabranch.core.errors import UnsupportedError
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.operators.process.declare import check_output_mode, checked_time_mode, declare_state
from anabranch.operators.process.program import TimeMode
from support.process_model import fields

KEY = pa.schema([("id", pa.string())])
COUNT = fields(count="long")


class Processor(StatefulProcessor):
    """Declares what a test tells it to."""

    def __init__(self, declare: Any) -> None:
        self.declare = declare
        self.calls: list[str] = []

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.calls.append("init")
        self.found = self.declare(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        yield from ()

    def close(self) -> None:
        self.calls.append("close")


def declare(what: Any) -> StageSpec:
    return declare_state(Processor(what), KEY, StageNumber(3), "orders").spec


def test_state_variables_of_every_kind_are_declared_in_the_order_of_init() -> None:
    def init(handle: StatefulProcessorHandle) -> None:
        handle.getMapState("carts", fields(item="string"), fields(amount="integer", price=DecimalType(10, 2)))
        handle.getValueState("count", COUNT)
        handle.getListState("seen", fields(at=TimestampType(), local=TimestampNTZType()))

    spec = declare(init)
    assert (spec.number, spec.name, spec.key) == (3, "orders", KEY)
    assert spec.variables == (
        VariableSpec(
            "carts",
            VariableKind.MAP,
            pa.schema([("amount", pa.int32()), ("price", pa.decimal128(10, 2))]),
            pa.schema([("item", pa.string())]),
        ),
        VariableSpec("count", VariableKind.VALUE, pa.schema([("count", pa.int64())])),
        VariableSpec(
            "seen", VariableKind.LIST, pa.schema([("at", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us"))])
        ),
    )
    assert StageSpec.from_json(spec.to_json()) == spec


def test_schemas_may_be_strings(spark: SparkSession) -> None:
    del spark  # whose parser reads them

    def init(handle: StatefulProcessorHandle) -> None:
        handle.getValueState("v", "a BIGINT, b STRUCT<x: INT, y: ARRAY<STRING>>")
        handle.getMapState("m", "k DATE", "v DECIMAL(5,1)")

    value, mapped = declare(init).variables
    inner = pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))])
    assert [field.name for field in value.value] == ["a", "b"]
    assert value.value.field("b").type.equals(inner)
    assert (mapped.map_key, mapped.value) == (pa.schema([("k", pa.date32())]), pa.schema([("v", pa.decimal128(5, 1))]))


def test_the_users_processor_is_left_as_it_was() -> None:
    processor = Processor(lambda handle: handle.getValueState("count", COUNT))
    declare_state(processor, KEY, StageNumber(0), "orders")
    assert processor.calls == []
    assert not hasattr(processor, "found")


def test_the_copy_is_closed_after_init() -> None:
    class Closing(Processor):
        def close(self) -> None:
            raise RuntimeError(f"closed after {self.calls}")

    with pytest.raises(RuntimeError, match=r"closed after \['init'\]"):
        declare_state(Closing(lambda handle: handle.getValueState("count", COUNT)), KEY, StageNumber(0), "orders")


def test_handles_are_those_of_spark() -> None:
    def init(handle: StatefulProcessorHandle) -> None:
        assert isinstance(handle, StatefulProcessorHandle)
        assert isinstance(handle.getValueState("v", COUNT), ValueState)
        assert isinstance(handle.getListState("l", COUNT), ListState)
        assert isinstance(handle.getMapState("m", COUNT, COUNT), MapState)

    assert [variable.name for variable in declare(init).variables] == ["v", "l", "m"]


def test_a_processor_without_state_is_fine() -> None:
    assert declare(lambda handle: None).variables == ()  # noqa: ARG005


@pytest.mark.parametrize(
    ("init", "named"),
    [
        (lambda h: h.getValueState("count", COUNT, 1000), "ttlDurationMs of the state variable count"),
        (lambda h: h.getListState("seen", COUNT, ttlDurationMs=7), "ttlDurationMs of the state variable seen"),
        (lambda h: h.getMapState("m", COUNT, COUNT, 5), "ttlDurationMs of the state variable m"),
        (lambda h: h.registerTimer(5), "registerTimer"),
        (lambda h: h.deleteTimer(5), "deleteTimer"),
        (lambda h: h.listTimers(), "listTimers"),
        (lambda h: [h.getValueState("x", COUNT), h.getListState("x", COUNT)], "a second state variable x"),
        (lambda h: h.getValueState(" x", COUNT), "' x'"),
        (lambda h: h.getValueState("", COUNT), "''"),
        (lambda h: h.getValueState("x", LongType()), "LongType"),
        (lambda h: h.getValueState("x", StructType()), "state variable x"),
        (lambda h: h.getValueState("x", StructType([StructField("a", LongType())] * 2)), "two fields of one name"),
        (lambda h: h.getValueState("x", fields(_hash="long")), "_hash"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(init: Any, named: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        declare(init)
    assert named in str(caught.value)
    assert "orders" in str(caught.value)
    assert str(caught.value).endswith((".", "'."))


@pytest.mark.parametrize(
    "kind", [YearMonthIntervalType(), CalendarIntervalType(), VariantType(), ArrayType(YearMonthIntervalType())]
)
def test_types_that_state_cannot_hold_are_refused(kind: DataType) -> None:
    with pytest.raises(UnsupportedError, match="state variable odd"):
        declare(lambda handle: handle.getValueState("odd", fields(x=kind)))


def test_an_interval_can_be_held() -> None:
    (variable,) = declare(lambda handle: handle.getValueState("i", fields(x=DayTimeIntervalType()))).variables
    assert variable.value.field("x").type == pa.duration("us")


def test_a_processor_that_cannot_be_sent_is_refused() -> None:
    processor = Processor(lambda handle: None)  # noqa: ARG005
    processor.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"cannot be sent to tasks.*in init"):
        declare_state(processor, KEY, StageNumber(0), "orders")


def test_names_of_the_key_must_not_be_taken() -> None:
    with pytest.raises(UnsupportedError, match="_index"):
        declare_state(Processor(lambda h: None), pa.schema([("_index", pa.int64())]), StageNumber(0), "s")  # noqa: ARG005


@pytest.mark.parametrize("output_mode", ["append", "Update", "COMPLETE"])
@pytest.mark.parametrize("time_mode", ["none", "None", "ProcessingTime", "eventTime", "EVENTTIME"])
def test_modes_are_read_in_any_case(time_mode: str, output_mode: str) -> None:
    check_output_mode(output_mode)
    assert checked_time_mode(time_mode).value.lower() == time_mode.lower()


def test_unknown_modes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="timeMode 'never' is unknown"):
        checked_time_mode("never")
    with pytest.raises(UnsupportedError, match="outputMode 'retract'"):
        check_output_mode("retract")


def declare_timed(what: Any, mode: TimeMode) -> StageSpec:
    return declare_state(Processor(what), KEY, StageNumber(3), "orders", mode).spec


def test_time_to_live_and_timers_are_part_of_the_declared_state() -> None:
    def init(handle: StatefulProcessorHandle) -> None:
        handle.getValueState("count", COUNT, 1000)
        handle.getListState("seen", COUNT, ttlDurationMs=0)
        handle.getMapState("m", COUNT, COUNT, 5)

    spec = declare_timed(init, TimeMode.PROCESSING_TIME)
    assert [(variable.name, variable.value.names) for variable in spec.variables] == [
        ("count", ["count", "_expiry_ms"]),
        ("seen", ["count"]),
        ("m", ["count", "_expiry_ms"]),
        ("_timers", []),
    ]
    assert StageSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("init", "mode", "says"),
    [
        (lambda h: h.getValueState("x", COUNT, 9), TimeMode.EVENT_TIME, "ttlDurationMs of .* x with .*'eventTime'"),
        (lambda h: h.getValueState("x", COUNT, -1), TimeMode.PROCESSING_TIME, "ttlDurationMs -1 of .* x .*positive"),
        (lambda h: h.getValueState("_timers", COUNT), TimeMode.NONE, "named _timers"),
        (lambda h: h.getValueState("x", fields(_expiry_ms="long")), TimeMode.NONE, "_expiry_ms"),
        (lambda h: h.registerTimer(5), TimeMode.EVENT_TIME, "registerTimer in init"),
        (lambda h: h.listTimers(), TimeMode.PROCESSING_TIME, "listTimers in init"),
    ],
)
def test_what_goes_by_time_is_refused_where_it_cannot(init: Any, mode: TimeMode, says: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"Stage orders: .*{says}"):
        declare_timed(init, mode)


def test_a_deleted_variable_is_not_declared() -> None:
    spec = declare(lambda h: [h.deleteIfExists("old"), h.getValueState("new", COUNT)])
    assert [variable.name for variable in spec.variables] == ["new"]


def test_what_is_deleted_after_it_was_asked_for_is_not_declared() -> None:
    spec = declare(lambda h: [h.getValueState("x", COUNT), h.getListState("y", COUNT), h.deleteIfExists("x")])
    assert [variable.name for variable in spec.variables] == ["y"]


def test_what_is_deleted_cannot_be_asked_for_afterwards() -> None:
    with pytest.raises(UnsupportedError, match=r"deleteIfExists\('x'\).*Use a new name for what starts empty"):
        declare(lambda h: [h.deleteIfExists("x"), h.getValueState("x", COUNT)])
