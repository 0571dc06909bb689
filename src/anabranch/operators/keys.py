"""Which types can be keys, and how a stage's key is named and typed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import GROUP, HASH, INDEX, OP, POSITION

#: Columns of rows of state that are not the user's.
RESERVED = frozenset({HASH, GROUP, OP, POSITION, INDEX})
_KEY_TYPES = (NumericType, StringType, BinaryType, BooleanType, DateType, TimestampType, TimestampNTZType)


def key_name(i: int) -> str:
    """Returns the name of a key column inside Spark's plan, where the user's own names may be taken."""
    return f"_key{i}"


def key_names(count: int) -> list[str]:
    """Returns the names of this many key columns."""
    return [key_name(i) for i in range(count)]


def unique_names(names: Sequence[str], taken: Collection[str]) -> list[str]:
    """Returns the names with numbers behind those that are taken, or come a second time."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in taken or candidate in found:
            number += 1
            candidate = f"{name}.{number}"
        found.append(candidate)
    return found


def check_key_fields(fields: Sequence[StructField]) -> None:
    """Refuses keys whose equality is not that of their bytes."""
    for field in fields:
        _check(field.name, field.dataType)
        if field.name in RESERVED:
            raise UnsupportedError(
                f"The key column {field.name!r} has a name that Anabranch uses itself. Rename it with alias()."
            )
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            raise UnsupportedError(f"Two key columns are called {name!r}. Give one of them another name with alias().")


def _check(name: str, kind: DataType) -> None:
    if isinstance(kind, StructType):
        for field in kind.fields:
            _check(f"{name}.{field.name}", field.dataType)
    elif not isinstance(kind, _KEY_TYPES):
        raise UnsupportedError(
            f"The key column {name!r} is of type {kind.simpleString()}, which cannot be a key. Use numbers, strings, "
            "binary, booleans, dates, timestamps, decimals, or structs of them; to_json() makes a string of others."
        )
    elif isinstance(kind, StringType) and not kind.isUTF8BinaryCollation():
        raise UnsupportedError(
            f"The key column {name!r} has the collation {kind.collation}, under which different strings are equal. "
            "Group by a normalised form, for example F.lower(column).cast('string')."
        )


def normalised(column: Column, kind: DataType) -> Column:
    """Returns a key column with one form of each number: Spark takes 0.0 and -0.0 for one key, and all NaN for one."""
    if not isinstance(kind, DoubleType | FloatType):
        return column
    zero, nan = F.lit(0.0).cast(kind), F.lit(float("nan")).cast(kind)
    return F.when(column == 0, zero).when(F.isnan(column), nan).otherwise(column)


def with_keys(rows: DataFrame, columns: Sequence[Column], fields: Sequence[StructField]) -> DataFrame:
    """Returns the rows with their key in front, under the names of key columns."""
    keys = [normalised(c, f.dataType).alias(key_name(i)) for i, (c, f) in enumerate(zip(columns, fields, strict=True))]
    return rows.select(*keys, "*")


def arrow_schema(fields: Sequence[StructField]) -> pa.Schema:
    """Makes an Arrow schema of fields, as state and change files carry them: everything nullable, times in UTC."""
    return to_arrow_schema(StructType([nullable_field(f) for f in fields]), timezone="UTC").remove_metadata()


def nullable_field(field: StructField) -> StructField:
    """Allows nulls at every depth of a field: what is never null in one epoch's plan may be in another's."""
    return StructField(field.name, _nullable(field.dataType), True)


def _nullable(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return StructType([nullable_field(field) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType), True)
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType), True)
    return kind
