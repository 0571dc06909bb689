"""Arrow types and schemas in Spark's words, for messages and for telling whether two of them mean the same."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import types

_WORDS = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.null(): "void",
    pa.timestamp("us"): "timestamp_ntz",
    pa.duration("us"): "interval day to second",
}


def schema_in_words(schema: pa.Schema) -> str:
    """``(user bigint, window struct<start: timestamp, end: timestamp>)``"""
    return "(" + ", ".join(f"{field.name} {type_in_words(field.type)}" for field in schema) + ")"


def type_in_words(data_type: pa.DataType) -> str:
    """The same words mean the same data: what may be null and the display time zone of timestamps do not count."""
    if data_type in _WORDS:
        return _WORDS[data_type]
    if types.is_decimal128(data_type):
        return f"decimal({data_type.precision},{data_type.scale})"
    if types.is_timestamp(data_type) and data_type.unit == "us":
        return "timestamp"
    if types.is_list(data_type):
        return f"array<{type_in_words(data_type.value_type)}>"
    if types.is_map(data_type):
        return f"map<{type_in_words(data_type.key_type)}, {type_in_words(data_type.item_type)}>"
    if types.is_struct(data_type):
        return "struct<" + ", ".join(f"{f.name}: {type_in_words(f.type)}" for f in data_type.fields) + ">"
    return str(data_type)
