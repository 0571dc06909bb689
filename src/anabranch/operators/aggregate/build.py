"""Building an aggregate stage from the user's keys and columns, with Spark itself as the judge of names and types."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import ByteType, StructField, StructType

from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.operators.aggregate.functions import AggregateFunction, parse, resolve
from anabranch.operators.aggregate.stage import ALL, VARIABLE, AggregateStage
from anabranch.operators.keys import StageName, arrow_schema, check_key_fields


def build_aggregate(
    name: StageName, rows: DataFrame, keys: Sequence[Column], aggregates: Sequence[Column]
) -> tuple[AggregateStage, DataFrame]:
    """The stage, and an empty DataFrame with the schema of its result."""
    calls = [parse(column) for column in aggregates]
    result: StructType = rows.groupBy(*keys).agg(*aggregates).schema
    key_fields = result.fields[: len(keys)] or [StructField(ALL, ByteType(), False)]
    check_key_fields(key_fields)
    functions = []
    for call, output in zip(calls, result.fields[len(keys) :], strict=True):
        types = [rows.select(argument).schema.fields[0].dataType for argument in call.arguments]
        functions.append(resolve(call, argument_types=types, output_name=output.name, output_type=output.dataType))
    spark = rows.sparkSession
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
        ansi=spark.conf.get("spark.sql.ansi.enabled") == "true",
        key_columns=tuple(keys),
    )
    return stage, spark.createDataFrame([], result)


def _buffer_schema(functions: Sequence[AggregateFunction]) -> pa.Schema:
    fields: list[StructField] = []
    taken: set[str] = set()
    for function in functions:
        for buffer in function.buffers:
            name = _unique(function.output_name + buffer.suffix, taken)
            fields.append(StructField(name, buffer.type))
    return arrow_schema(fields)


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}.{number}"
    taken.add(candidate)
    return candidate
