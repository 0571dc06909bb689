"""Schema evolution: which changes of its fields a state variable survives, and old columns in the types of today.

Fields are matched by name. They may be added, if they may be null, be put in another order, and get a wider type that
holds every old value exactly; the same inside structs, arrays and the values of maps. Whole fields of a variable may be
dropped, if the query wants that. Each of these steps can follow any other, so a file of any age is brought to the
layout of today in one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from anabranch.core.errors import CheckpointError
from anabranch.core.schemas import MEANING

#: The wider types that hold each value of a type exactly.
_WIDER: Mapping[pa.DataType, frozenset[pa.DataType]] = {
    pa.int8(): frozenset({pa.int16(), pa.int32(), pa.int64(), pa.float64()}),
    pa.int16(): frozenset({pa.int32(), pa.int64(), pa.float64()}),
    pa.int32(): frozenset({pa.int64(), pa.float64()}),
    pa.float32(): frozenset({pa.float64()}),
}


def obstacles(before: Iterable[pa.Field], now: Iterable[pa.Field], *, fill: bool = False) -> Iterator[str]:
    """Yields why values of the fields of before cannot be read as values of those of now; nothing if they can.

    New fields have to allow nulls, unless ``fill`` says that they are to be filled with nulls all the same.
    """
    return _field_obstacles("", before, now, fill)


def droppable(before: Iterable[pa.Field], now: Iterable[pa.Field]) -> list[pa.Field]:
    """Returns the fields that are gone and may be: others do not depend on what they mean."""
    kept = _numbered(now)
    return [
        field for name, field in _numbered(before).items() if name not in kept and MEANING not in (field.metadata or {})
    ]


def to_layout(
    table: pa.Table,
    target: pa.Schema,
    path_for_errors: str,
    *,
    fixed_columns: int = 0,
    dropped: Collection[str] = (),
) -> pa.Table:
    """Returns the table with the columns of ``target``, found by name; lacking ones are null, widened ones are cast.

    Those that were ``dropped`` may be there, and are left out. The first ``fixed_columns``, such as the key, have to be
    there, in their place, as they are. What may be null is not looked at: the values of a change that clears or deletes
    are, whatever the type of the state says.
    """
    table = table.drop_columns([name for name in table.column_names[fixed_columns:] if name in dropped])
    fixed = [schema_in_words(pa.schema(list(schema)[:fixed_columns])) for schema in (table.schema, target)]
    if fixed[0] != fixed[1]:
        raise _misfit(path_for_errors, f"its first columns are {fixed[0]} instead of {fixed[1]}")
    found = list(obstacles(table.schema, target, fill=True))
    if found:
        raise _misfit(path_for_errors, ", ".join(f"column {obstacle}" for obstacle in found))
    columns = dict(zip(_numbered(table.schema), table.columns, strict=True))
    return pa.table(
        [
            _column_as(columns[name], field.type) if name in columns else pa.nulls(table.num_rows, field.type)
            for name, field in _numbered(target).items()
        ],
        schema=target,
    )


def _numbered(fields: Iterable[pa.Field]) -> dict[tuple[str, int], pa.Field]:
    """Numbers fields by name and occurrence: a value field may be called like a column of ours, which comes first."""
    seen: Counter[str] = Counter()
    numbered = {}
    for field in fields:
        numbered[field.name, seen[field.name]] = field
        seen[field.name] += 1
    return numbered


def _field_obstacles(within: str, before: Iterable[pa.Field], now: Iterable[pa.Field], fill: bool) -> Iterator[str]:
    old_fields, new_fields = _numbered(before), _numbered(now)
    for name, old in old_fields.items():
        path = f"{within}{old.name}"
        if name not in new_fields:
            yield f"{path} is not in this query"
            continue
        new = new_fields[name]
        was, means = ((field.metadata or {}).get(MEANING, b"").decode(errors="replace") for field in (old, new))
        if was and means and was != means:
            yield f"{path} is {was} in the checkpoint and {means} in this query"
        # A column holds nulls in any case, where a change clears or deletes. What is inside of one does not.
        yield from _inner_obstacles(path, old, new, fill) if within else _type_obstacles(path, old.type, new.type, fill)
    for name, new in new_fields.items():
        if name not in old_fields and not new.nullable and not fill:
            yield f"{within}{new.name} is new and may not be null"


def _inner_obstacles(path: str, before: pa.Field, now: pa.Field, fill: bool) -> Iterator[str]:
    if before.nullable and not now.nullable and not fill:
        yield f"{path} may be null in the checkpoint and may not in this query"
    yield from _type_obstacles(path, before.type, now.type, fill)


def _type_obstacles(path: str, before: pa.DataType, now: pa.DataType, fill: bool) -> Iterator[str]:
    if types.is_struct(before) and types.is_struct(now):
        yield from _field_obstacles(f"{path}.", before.fields, now.fields, fill)
    elif types.is_list(before) and types.is_list(now):
        yield from _inner_obstacles(f"{path}.element", before.value_field, now.value_field, fill)
    elif types.is_map(before) and types.is_map(now) and _same(before.key_type, now.key_type):
        yield from _inner_obstacles(f"{path}.value", before.item_field, now.item_field, fill)
    elif not _same(before, now) and not _is_wider(before, now):
        yield f"{path} cannot change from {type_in_words(before)} to {type_in_words(now)}"


def _same(before: pa.DataType, now: pa.DataType) -> bool:
    return type_in_words(before) == type_in_words(now)


def _is_wider(before: pa.DataType, now: pa.DataType) -> bool:
    if types.is_decimal128(before) and types.is_decimal128(now):
        digits = before.precision - before.scale, now.precision - now.scale
        return bool(now.scale >= before.scale and digits[1] >= digits[0])
    return now in _WIDER.get(before, ())


def _column_as(column: pa.ChunkedArray, now: pa.DataType) -> pa.ChunkedArray:
    if column.type == now:
        return column
    return pa.chunked_array([_retyped(_converted(chunk, now), now) for chunk in column.chunks], now)


def _converted(array: pa.Array, now: pa.DataType) -> pa.Array:
    """Returns the array in the memory of the new type; _retyped adds what may be null, time zones and maps."""
    if _same(array.type, now):
        return array
    if types.is_struct(now):
        return _converted_struct(array, now)
    if types.is_map(now):
        return _converted_list(_retyped(array, _entries(array.type)), _entries(now))
    if types.is_list(now):
        return _converted_list(array, now)
    return array.cast(now)


def _converted_struct(array: pa.StructArray, now: pa.StructType) -> pa.Array:
    # Flattened, the fields of a null struct are null: what else they may hold need not fit the new type.
    children = dict(zip(_numbered(array.type.fields), array.flatten(), strict=True))
    arrays = [
        _converted(children[name], field.type) if name in children else pa.nulls(len(array), field.type)
        for name, field in _numbered(now.fields).items()
    ]
    return pa.StructArray.from_arrays(arrays, names=[field.name for field in now.fields], mask=array.is_null())


def _converted_list(array: pa.ListArray, now: pa.ListType) -> pa.Array:
    # Flattened, only the elements that belong to the array are left, also if it is a slice of a larger one.
    offsets = np.zeros(len(array) + 1, np.int32)
    np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(), out=offsets[1:])
    elements = _converted(array.flatten(), now.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), elements, mask=array.is_null())


def _entries(map_type: pa.MapType) -> pa.ListType:
    """Returns the type of a map in memory: a list of keys with values."""
    return pa.list_(pa.struct([("key", map_type.key_type), ("value", map_type.item_type)]))


def _retyped(array: pa.Array, now: pa.DataType) -> pa.Array:
    return array if array.type == now else pa.array(_Retyped(array, now))


class _Retyped:
    """Gives the same memory another type, by Arrow's C interface.

    A cast would do, but for fields inside a struct that now may not be null: it takes those of a null struct amiss.
    """

    def __init__(self, array: pa.Array, data_type: pa.DataType) -> None:
        self._array = array
        self._type = data_type

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        del requested_schema  # a wish, and it is the one that comes true
        return self._type.__arrow_c_schema__(), self._array.__arrow_c_array__()[1]


def _misfit(path: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"The state in {path} does not fit this query: {reason}. Start the query as it was when the file was written, "
        f"or use a new checkpoint."
    )


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
