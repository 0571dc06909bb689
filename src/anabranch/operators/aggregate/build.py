"""Building an aggregate stage from the user's keys and columns, with Spark itself as the judge of names and types."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import ByteType, StructField, StructType

from anabranch.core.schemas import MEANING, StageSpec, VariableKind, VariableSpec
from anabranch.operators.aggregate.functions import AggregateFunction, parse, resolve
from anabranch.operators.aggregate.stage import ALL, VARIABLE, AggregateStage
from anabranch.operators.keys import RESERVED, StageName, arrow_schema, check_key_fields

#: Spark's mark of a column with a watermark.
_WATERMARK = "spark.watermarkDelayMs"


def build_aggregate(
    name: StageName, rows: DataFrame, keys: Sequence[Column], aggregates: Sequence[Column]
) -> tuple[AggregateStage, DataFrame]:
    """The stage, and an empty DataFrame with the schema of its result."""
    calls = [parse(column) for column in aggregates]
    result: StructType = rows.groupBy(*keys).agg(*aggregates).schema
    key_fields = result.fields[: len(keys)] or [StructField(ALL, ByteType(), False)]
    check_key_fields(key_fields)
    spark = rows.sparkSession
    ansi = spark.conf.get("spark.sql.ansi.enabled") == "true"
    functions = []
    for call, output in zip(calls, result.fields[len(keys) :], strict=True):
        types = [rows.select(argument).schema.fields[0].dataType for argument in call.arguments]
        functions.append(
            resolve(call, argument_types=types, output_name=output.name, output_type=output.dataType, ansi=ansi)
        )
    stage = AggregateStage(
        spec=StageSpec(
            number=name.number,
            name=name.name,
            key=arrow_schema(key_fields),
            variables=(VariableSpec(VARIABLE, VariableKind.VALUE, _buffer_schema(functions)),),
        ),
        parallelism=name.parallelism,
        key_fields=tuple(key_fields),
        functions=tuple(functions),
        ansi=ansi,
        key_columns=tuple(keys),
        event_time=_event_time(key_fields),
    )
    return stage, spark.createDataFrame([], result)


def _event_time(key_fields: Sequence[StructField]) -> tuple[int, str] | None:
    """The first key column under a watermark; Spark marks such columns, windows included, in their metadata."""
    for position, field in enumerate(key_fields):
        if _WATERMARK in (field.metadata or {}):
            return position, "end" if isinstance(field.dataType, StructType) else ""
    return None


def _buffer_schema(functions: Sequence[AggregateFunction]) -> pa.Schema:
    """The columns of the state: each says which function it belongs to, so that it is not taken for another's."""
    columns: list[pa.Field] = []
    taken = set(RESERVED)
    for function in functions:
        for buffer in function.buffers:
            name = _unique(function.output_name + buffer.suffix, taken)
            (column,) = arrow_schema([StructField(name, buffer.type)])
            # A count is never null, which keeps one from being added to state that has none.
            column = column.with_nullable(function.name != "count")
            columns.append(column.with_metadata({MEANING: function.name.encode()}))
    return pa.schema(columns)


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}.{number}"
    taken.add(candidate)
    return candidate
