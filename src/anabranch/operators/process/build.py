"""Building a process stage from Spark's own StatefulProcessor and the arguments that PySpark gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructField, StructType, TimestampNTZType, TimestampType

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import OPERATOR, OUTPUT_MODE, PROCESSOR, TIME_MODE
from anabranch.operators.keys import WATERMARK, StageName, arrow_schema, check_key_fields
from anabranch.operators.process.declare import check_output_mode, checked_time_mode, declare_state
from anabranch.operators.process.frames import run_frames
from anabranch.operators.process.initial import initial_state
from anabranch.operators.process.program import UNLIMITED_BYTES, FrameSettings, Program, TimeMode
from anabranch.operators.process.rows import run_rows
from anabranch.operators.process.stage import ProcessStage


def build_process(
    name: StageName,
    rows: DataFrame,
    keys: Sequence[Column],
    processor: StatefulProcessor,
    output: StructType | str,
    *,
    output_mode: str,
    time_mode: str,
    initial: Any,
    event_time_column: str,
    pandas: bool,
    tables: tuple[str, ...] = (),
) -> tuple[ProcessStage, DataFrame]:
    """The stage, and an empty DataFrame with the schema of its result."""
    method = "transformWithStateInPandas" if pandas else "transformWithState"
    if not isinstance(processor, StatefulProcessor):
        raise UnsupportedError(f"{method} needs an instance of StatefulProcessor, not a {type(processor).__name__}.")
    check_output_mode(output_mode)
    mode = checked_time_mode(time_mode)
    key_fields = key_fields_of(rows, keys, method)
    spark = rows.sparkSession
    result: StructType = spark.createDataFrame([], output).schema
    if event_time_column:
        result = _with_event_time(result, event_time_column, mode, rows, method)
    declared = declare_state(processor, arrow_schema(key_fields), name.number, name.name, mode, tables)
    # Spark, too, holds on to the modes of a processor. The state of rows and of pandas frames is the same.
    traits = {OPERATOR: PROCESSOR, TIME_MODE: mode.value, OUTPUT_MODE: output_mode.lower()}
    program = Program(
        spec=replace(declared.spec, traits=traits, may_drop_fields=_may_drop_fields(spark)),
        processor=processor,
        output=result,
        frames=frame_settings(spark),
        time_mode=mode,
        asked=declared.asked,
        deleted_variables=len(declared.deleted),
    )
    stage = ProcessStage(
        name.parallelism,
        tuple(keys),
        tuple(key_fields),
        program,
        run_frames if pandas else run_rows,
        event_time=event_time_of(rows),
        initial=None if initial is None else initial_state(initial, key_fields, method),
        tables=tables,
    )
    return stage, spark.createDataFrame([], result)


def _may_drop_fields(spark: SparkSession) -> bool:
    """As in Spark, where the encoding of state decides what of it may change, and the usual one allows nothing."""
    return str(spark.conf.get("spark.sql.streaming.stateStore.encodingFormat")).lower() == "avro"


def key_fields_of(rows: DataFrame, keys: Sequence[Column], method: str) -> list[StructField]:
    if not keys:
        raise UnsupportedError(f"{method} needs a key: groupBy(column, …).{method}(…).")
    key_fields: list[StructField] = rows.select(*keys).schema.fields
    check_key_fields(key_fields)
    return key_fields


def event_time_of(rows: DataFrame) -> tuple[int, str] | None:
    """The position of the first column under a watermark; the field of its time, for a window."""
    for position, field in enumerate(rows.schema.fields):
        if WATERMARK in (field.metadata or {}):
            return position, "end" if isinstance(field.dataType, StructType) else ""
    return None


def _with_event_time(output: StructType, column: str, mode: TimeMode, rows: DataFrame, method: str) -> StructType:
    """The output with Spark's mark of event time on a column: stages after this one go by it."""
    if mode is TimeMode.PROCESSING_TIME:
        raise UnsupportedError(
            f"{method}: eventTimeColumnName {column!r} has no meaning with timeMode 'processingTime', as no watermark "
            "holds for the output then. Use timeMode 'eventTime' or 'none', or leave eventTimeColumnName out."
        )
    event_time = event_time_of(rows)
    if event_time is None:
        raise UnsupportedError(
            f"{method}: eventTimeColumnName {column!r} needs a watermark. Set one before: withWatermark(column, delay)."
        )
    names = [field.name for field in output.fields]
    if column not in names or not isinstance(output[column].dataType, TimestampType | TimestampNTZType):
        raise UnsupportedError(
            f"{method}: eventTimeColumnName {column!r} is no timestamp of the output ({output.simpleString()}). "
            "Name one of its timestamp columns."
        )
    delay = rows.schema.fields[event_time[0]].metadata[WATERMARK]
    return StructType(
        [
            StructField(
                f.name, f.dataType, f.nullable, {**f.metadata, WATERMARK: delay} if f.name == column else f.metadata
            )
            for f in output.fields
        ]
    )


def frame_settings(spark: SparkSession) -> FrameSettings:
    """Spark's own settings for pandas functions."""

    def flag(name: str, default: str) -> bool:
        return (spark.conf.get(name, default) or default).lower() == "true"

    return FrameSettings(
        timezone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
        rows_max=int(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") or 10_000),
        bytes_max=_bytes(spark, spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch", None)),
        by_name=flag("spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName", "true"),
        safely=flag("spark.sql.execution.pandas.convertToArrowArraySafely", "false"),
        int_to_decimal=flag("spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled", "false"),
        prefer_int_extension=flag("spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype", "false"),
    )


def _bytes(spark: SparkSession, size: str | None) -> int:
    """A size as Spark writes it, such as 64m."""
    if not size:
        return UNLIMITED_BYTES
    jvm: Any = spark._jvm
    return int(jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(size))
