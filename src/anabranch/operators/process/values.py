"""How one field of a state variable travels: from user code to state, and back, in Spark's own Python types.

State that user code reads has the types Spark gives it, whether it was stored an epoch or a line ago: dates,
naive datetimes in the time zone of the process, decimals of the declared scale, lists, dicts and Rows.
"""

from __future__ import annotations

import ctypes
import datetime
import decimal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.sql import types as spark
from pyspark.sql.types import Row

Convert = Callable[[Any], Any]

#: One object for every NaN, so that a NaN in a map key equals itself.
_NAN = float("nan")


@dataclass(frozen=True)
class ValueCodec:
    """The conversions of one Spark type. None never reaches them; a conversion that is None changes nothing."""

    #: Spark's name of the type, for messages.
    name: str
    #: From what user code passes to what it will read; raises TypeError or ValueError if that is impossible.
    admit: Convert
    #: Values of exactly this Python type need no ``admit``.
    exact: type | None = None
    #: From what Arrow gives to what user code reads.
    restore: Convert | None = None
    #: From what user code reads to what Arrow takes.
    export: Convert | None = None
    #: A copy that user code may change; None if values cannot be changed.
    copy: Convert | None = None
    #: To something hashable, and back: map keys live in a dict.
    freeze: Convert | None = None
    thaw: Convert | None = None


def value_codec(data_type: spark.DataType) -> ValueCodec:
    """Returns the conversions of a Spark type. Raises TypeError for a type that state cannot hold."""
    if isinstance(data_type, spark.ArrayType):
        return _array(data_type)
    if isinstance(data_type, spark.MapType):
        return _map(data_type)
    if isinstance(data_type, spark.StructType):
        return _struct(data_type)
    if isinstance(data_type, spark.DecimalType):
        return _decimal(data_type)
    for kind, codec in _SIMPLE.items():
        if type(data_type) is kind or (kind is spark.StringType and isinstance(data_type, kind)):
            return codec
    raise TypeError(f"a state variable cannot hold the type {data_type.simpleString()}")


def _refuse(value: Any) -> Any:
    raise TypeError(f"got {value!r}, a {type(value).__name__}")


def _admit_integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return int(_refuse(value))


def _admit_double(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return float(_refuse(value))


def _admit_float(value: Any) -> float:
    return ctypes.c_float(_admit_double(value)).value


def _admit_string(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return str(_refuse(value))


def _admit_binary(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    return bytes(_refuse(value))


def _admit_date(value: Any) -> datetime.date:
    if isinstance(value, datetime.date) and value == value:
        return datetime.date(value.year, value.month, value.day)
    return _refuse(value)  # type: ignore[no-any-return]


def _is_datetime(value: Any) -> bool:
    # pandas' NaT calls itself a datetime, but does not equal itself.
    return isinstance(value, datetime.datetime) and value == value


def _admit_timestamp(value: Any) -> datetime.datetime:
    if not _is_datetime(value):
        _refuse(value)
    return value if value.tzinfo is None else value.astimezone().replace(tzinfo=None)  # type: ignore[no-any-return]


def _admit_timestamp_ntz(value: Any) -> datetime.datetime:
    if not _is_datetime(value):
        _refuse(value)
    return value.replace(tzinfo=None)  # type: ignore[no-any-return]


def _restore_timestamp(value: datetime.datetime) -> datetime.datetime:
    return value.astimezone().replace(tzinfo=None)


def _export_timestamp(value: datetime.datetime) -> datetime.datetime:
    return value.astimezone(datetime.UTC)


def _freeze_float(value: float) -> float:
    return value if value == value else _NAN


_SIMPLE: dict[type[spark.DataType], ValueCodec] = {
    spark.NullType: ValueCodec("void", _refuse),
    spark.BooleanType: ValueCodec("boolean", _refuse, exact=bool),
    spark.ByteType: ValueCodec("tinyint", _admit_integer, exact=int),
    spark.ShortType: ValueCodec("smallint", _admit_integer, exact=int),
    spark.IntegerType: ValueCodec("int", _admit_integer, exact=int),
    spark.LongType: ValueCodec("bigint", _admit_integer, exact=int),
    spark.FloatType: ValueCodec("float", _admit_float, freeze=_freeze_float),
    spark.DoubleType: ValueCodec("double", _admit_double, exact=float, freeze=_freeze_float),
    spark.StringType: ValueCodec("string", _admit_string, exact=str),
    spark.BinaryType: ValueCodec("binary", _admit_binary, exact=bytes),
    spark.DateType: ValueCodec("date", _admit_date, exact=datetime.date),
    spark.TimestampType: ValueCodec(
        "timestamp", _admit_timestamp, restore=_restore_timestamp, export=_export_timestamp
    ),
    spark.TimestampNTZType: ValueCodec("timestamp_ntz", _admit_timestamp_ntz),
    spark.TimeType: ValueCodec("time", _refuse, exact=datetime.time),
    spark.DayTimeIntervalType: ValueCodec("interval day to second", _refuse, exact=datetime.timedelta),
}


def _decimal(data_type: spark.DecimalType) -> ValueCodec:
    step = decimal.Decimal(1).scaleb(-data_type.scale)
    limit = decimal.Decimal(1).scaleb(data_type.precision - data_type.scale)
    context = decimal.Context(prec=78, rounding=decimal.ROUND_HALF_UP)

    def admit(value: Any) -> decimal.Decimal:
        if isinstance(value, int) and not isinstance(value, bool):
            value = decimal.Decimal(value)
        if not isinstance(value, decimal.Decimal) or not value.is_finite():
            _refuse(value)
        rounded = context.quantize(value, step)
        if rounded.copy_abs() >= limit:
            raise ValueError(f"{value} does not fit")
        return rounded

    return ValueCodec(data_type.simpleString(), admit)


def _array(data_type: spark.ArrayType) -> ValueCodec:
    element = value_codec(data_type.elementType)
    admit_element = _or_none(element.admit, element.exact)

    def admit(value: Any) -> list[Any]:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__"):
            _refuse(value)
        return [admit_element(item) for item in value]

    def freeze(value: list[Any]) -> tuple[Any, ...]:
        return tuple(map(_or_none(element.freeze), value))

    def thaw(value: tuple[Any, ...]) -> list[Any]:
        return list(map(_or_none(element.thaw), value))

    return ValueCodec(
        data_type.simpleString(),
        admit,
        restore=_each(element.restore) if element.restore else None,
        export=_each(element.export) if element.export else None,
        copy=_each(element.copy) if element.copy else list,
        freeze=freeze,
        thaw=thaw,
    )


def _map(data_type: spark.MapType) -> ValueCodec:
    key = value_codec(data_type.keyType)
    item = value_codec(data_type.valueType)
    admit_key, admit_item = _or_none(key.admit, key.exact), _or_none(item.admit, item.exact)
    restore_key, restore_item = _or_none(key.restore), _or_none(item.restore)
    export_key, export_item = _or_none(key.export), _or_none(item.export)
    copy_item = _or_none(item.copy)

    def admit(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _refuse(value)
        if None in value:
            raise TypeError("a key of the map is None")
        return {admit_key(k): admit_item(v) for k, v in value.items()}

    def restore(value: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return {restore_key(k): restore_item(v) for k, v in value}

    def export(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
        return [(export_key(k), export_item(v)) for k, v in value.items()]

    def copy(value: dict[Any, Any]) -> dict[Any, Any]:
        return {k: copy_item(v) for k, v in value.items()}

    return ValueCodec(data_type.simpleString(), admit, restore=restore, export=export, copy=copy)


def _struct(data_type: spark.StructType) -> ValueCodec:
    names = list(data_type.names)
    fields = [value_codec(field.dataType) for field in data_type.fields]
    admits = [_or_none(field.admit, field.exact) for field in fields]
    restores = [_or_none(field.restore) for field in fields]
    exports = [_or_none(field.export) for field in fields]
    copies = [_or_none(field.copy) for field in fields]
    freezes = [_or_none(field.freeze) for field in fields]
    thaws = [_or_none(field.thaw) for field in fields]

    def admit(value: Any) -> Row:
        if isinstance(value, dict):
            items = [value.get(name) for name in names]
        elif isinstance(value, tuple | list):
            items = list(value)
        elif hasattr(value, "__dict__"):
            items = [value.__dict__.get(name) for name in names]
        else:
            _refuse(value)
        if len(items) != len(names):
            raise TypeError(f"got {len(items)} items for {len(names)} fields")
        return row_of(apply(admits, items))

    def apply(converts: list[Convert], items: Any) -> tuple[Any, ...]:
        return tuple(convert(item) for convert, item in zip(converts, items, strict=True))

    def row_of(items: tuple[Any, ...]) -> Row:
        row = Row(*items)
        row.__fields__ = names
        return row

    def restore(value: dict[str, Any]) -> Row:
        return row_of(apply(restores, value.values()))

    return ValueCodec(
        data_type.simpleString(),
        admit,
        restore=restore,
        export=lambda value: apply(exports, value),
        copy=(lambda value: row_of(apply(copies, value))) if any(field.copy for field in fields) else None,
        freeze=lambda value: apply(freezes, value),
        thaw=lambda value: row_of(apply(thaws, value)),
    )


def _or_none(convert: Convert | None, exact: type | None = None) -> Convert:
    if convert is None:
        return _same
    return lambda value: value if value is None or type(value) is exact else convert(value)


def _each(convert: Convert) -> Convert:
    return lambda values: [None if value is None else convert(value) for value in values]


def _same(value: Any) -> Any:
    return value
