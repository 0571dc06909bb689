"""Which types can be keys, and how a stage's key is named and typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import GROUP, HASH, INDEX, OP, POSITION

#: Spark's mark of a column with a watermark, in the field's metadata.
WATERMARK = "spark.watermarkDelayMs"
#: Columns of rows of state that are not the user's.
RESERVED = frozenset({HASH, GROUP, OP, POSITION, INDEX})
_KEY_TYPES = (NumericType, StringType, BinaryType, BooleanType, DateType, TimestampType, TimestampNTZType)


class StageName(Protocol):
    """Number, name and parallelism that the user gave to the stage."""

    @property
    def number(self) -> StageNumber: ...
    @property
    def name(self) -> str: ...
    @property
    def parallelism(self) -> int | None: ...


def key_name(i: int) -> str:
    """The name of a key column inside Spark's plan, where the user's own names may be taken."""
    return f"_key{i}"


def check_key_fields(fields: Sequence[StructField]) -> None:
    """Refuse keys whose equality is not that of their bytes."""
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


def normalised(column: Column, field: StructField) -> Column:
    """Spark takes 0.0 and -0.0 for one key, and all NaN for one."""
    if not isinstance(field.dataType, DoubleType | FloatType):
        return column
    zero, nan = F.lit(0.0).cast(field.dataType), F.lit(float("nan")).cast(field.dataType)
    return F.when(column == 0, zero).when(F.isnan(column), nan).otherwise(column)


def with_keys(rows: DataFrame, columns: Sequence[Column], fields: Sequence[StructField]) -> DataFrame:
    """The rows with their key in front, under the names of key columns."""
    keys = [normalised(c, f).alias(key_name(i)) for i, (c, f) in enumerate(zip(columns, fields, strict=True))]
    return rows.select(*keys, "*")


def arrow_schema(fields: Sequence[StructField]) -> pa.Schema:
    """Spark fields as an Arrow schema, as state and change files carry them: everything nullable, times in UTC."""
    return to_arrow_schema(StructType([nullable_field(f) for f in fields]), timezone="UTC").remove_metadata()


def nullable_field(field: StructField) -> StructField:
    """The field with nulls allowed at every depth: what is never null in one epoch's plan may be in another's."""
    return StructField(field.name, _nullable(field.dataType), True)


def _nullable(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return StructType([nullable_field(field) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType), True)
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType), True)
    return kind
