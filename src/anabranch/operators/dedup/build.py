"""Building a de-duplicating stage: Spark itself says which columns are meant."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, DoubleType, FloatType, StructField, StructType, TimestampNTZType, TimestampType

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import OPERATOR, StageSpec, VariableKind, VariableSpec
from anabranch.operators.dedup.stage import EXPIRES_AT, VARIABLE, DedupStage, DedupTask
from anabranch.operators.keys import WATERMARK, StageName, arrow_schema, check_key_fields

#: Spark's mark of a column with a watermark; its value is the delay in milliseconds.


def build_dedup(
    name: StageName, rows: DataFrame, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[DedupStage, DataFrame]:
    """The stage, and an empty DataFrame with the schema of its result, which is that of the rows.

    The method is dropDuplicates or dropDuplicatesWithinWatermark.
    """
    fields = rows.schema.fields
    within = method == "dropDuplicatesWithinWatermark"
    subset = _columns_of(getattr(rows, method)(*arguments, **keywords))
    keys = [fields[position] for position in subset]
    check_key_fields(keys)
    event_time = _event_time(fields)
    delay_ms = _delay_ms(method, fields, event_time) if within else None
    # Where a key is the column as it came, it need not travel twice.
    carried = {position: i for i, position in enumerate(subset) if not has_floats(fields[position].dataType)}
    extras = [position for position in range(len(fields)) if position not in carried]
    columns = tuple(
        carried[position] if position in carried else len(subset) + extras.index(position)
        for position in range(len(fields))
    )
    spec = StageSpec(
        number=name.number,
        name=name.name,
        key=arrow_schema(keys),
        variables=(VariableSpec(VARIABLE, VariableKind.VALUE, _value(within)),),
        traits={OPERATOR: method},
    )
    task = DedupTask(
        spec=spec,
        columns=columns,
        names=tuple(field.name for field in fields),
        event_time=None if event_time is None else (columns[event_time], _field_of(fields[event_time].dataType)),
        key_time=subset.index(event_time) if event_time in subset and not within else None,
        delay_ms=delay_ms,
    )
    stage = DedupStage(
        task=task,
        parallelism=name.parallelism,
        fields=tuple(fields),
        subset=tuple(subset),
        extras=tuple(extras),
    )
    return stage, rows.sparkSession.createDataFrame([], rows.schema)


def has_floats(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(has_floats(field.dataType) for field in kind.fields)
    return isinstance(kind, FloatType | DoubleType)


def _columns_of(deduplicated: DataFrame) -> list[int]:
    """The positions of the columns that Spark compares; it has found them by their names, in its own way."""
    node = deduplicated._jdf.queryExecution().analyzed()
    output, keys = node.child().output(), node.keys()
    positions = {output.apply(position).exprId().id(): position for position in range(output.size())}
    return sorted({positions[keys.apply(i).exprId().id()] for i in range(keys.size())})


def _event_time(fields: list[StructField]) -> int | None:
    found = [position for position, field in enumerate(fields) if WATERMARK in (field.metadata or {})]
    if len(found) > 1:
        names = ", ".join(repr(fields[position].name) for position in found)
        raise UnsupportedError(
            f"The columns {names} all have a watermark, so it is not clear which rows are late. Keep one of them, or "
            "cast the others to timestamp again, for example F.col('x').cast('string').cast('timestamp')."
        )
    return found[0] if found else None


def _delay_ms(method: str, fields: list[StructField], event_time: int | None) -> int:
    if event_time is None:
        raise UnsupportedError(f"{method} needs a watermark. Set one before it, with withWatermark(column, delay).")
    field = fields[event_time]
    if not isinstance(field.dataType, TimestampType | TimestampNTZType):
        raise UnsupportedError(
            f"{method} needs a watermark on a timestamp, and {field.name!r} is a {field.dataType.simpleString()}. "
            f"Take F.window_time({field.name!r}) instead of it."
        )
    return int(field.metadata[WATERMARK])


def _field_of(kind: DataType) -> str:
    """The end of a window, which is its second field."""
    return kind.fields[1].name if isinstance(kind, StructType) else ""


def _value(within: bool) -> pa.Schema:
    return pa.schema([pa.field(EXPIRES_AT, pa.timestamp("us", tz="UTC"))] if within else [])
