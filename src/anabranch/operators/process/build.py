"""Building the stages that run user code by key, from the arguments that PySpark's own methods take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructField, StructType, TimestampNTZType, TimestampType

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import OPERATOR, OUTPUT_MODE, PROCESSOR, TIME_MODE
from anabranch.engine.spark.expressions import WATERMARK, bytes_of, grouped_rows
from anabranch.operators.keys import arrow_schema, check_key_fields, nullable_field
from anabranch.operators.process.declare import check_output_mode, checked_time_mode, declare_state
from anabranch.operators.process.frames import FrameRunner
from anabranch.operators.process.groupstate import Function, GroupProgram, GroupRunner, GroupStateProcessor
from anabranch.operators.process.program import UNLIMITED_BYTES, FrameSettings, Program, TimeMode
from anabranch.operators.process.rows import RowRunner
from anabranch.operators.process.stage import InitialState, ProcessStage
from anabranch.operators.stage import StageName, watermarked


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
    """Makes the stage, and an empty DataFrame with the schema of its result."""
    method = "transformWithStateInPandas" if pandas else "transformWithState"
    if not isinstance(processor, StatefulProcessor):
        raise UnsupportedError(f"{method} needs an instance of StatefulProcessor, not a {type(processor).__name__}.")
    check_output_mode(output_mode)
    mode = checked_time_mode(time_mode)
    key_fields = _key_fields(rows, keys, method)
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
        frames=_frame_settings(spark),
        time_mode=mode,
        asked=declared.asked,
        deleted_variables=len(declared.spec.deleted),
    )
    stage = ProcessStage(
        name.parallelism,
        tuple(keys),
        tuple(key_fields),
        program,
        FrameRunner if pandas else RowRunner,
        event_time=next(iter(watermarked(rows.schema.fields)), None),
        initial=None if initial is None else _initial_state(initial, key_fields, method),
        tables=tables,
    )
    return stage, spark.createDataFrame([], result)


def _initial_state(given: Any, key_fields: Sequence[StructField], method: str) -> InitialState:
    """Reads what the user passes: a batch DataFrame, grouped by the same key."""
    if not isinstance(given, GroupedData):
        raise UnsupportedError(
            f"{method}: initialState is a {type(given).__name__}. Pass a grouped batch DataFrame: df.groupBy(key)."
        )
    rows, columns = grouped_rows(given)
    if rows.isStreaming:
        raise UnsupportedError(f"{method}: initialState is a streaming DataFrame. Pass one that is not.")
    found = [nullable_field(field).dataType for field in rows.select(*columns).schema.fields]
    wanted = [nullable_field(field).dataType for field in key_fields]
    if found != wanted:
        texts = [", ".join(kind.simpleString() for kind in kinds) for kinds in (found, wanted)]
        raise UnsupportedError(
            f"{method}: initialState is grouped by ({texts[0]}), and the stream by ({texts[1]}). "
            "Group both by keys of the same types, in the same order."
        )
    return InitialState(rows, tuple(columns))


def _may_drop_fields(spark: SparkSession) -> bool:
    """Tells whether fields of state may be dropped. As in Spark, its encoding decides, and the usual one says no."""
    return str(spark.conf.get("spark.sql.streaming.stateStore.encodingFormat")).lower() == "avro"


def _key_fields(rows: DataFrame, keys: Sequence[Column], method: str) -> list[StructField]:
    if not keys:
        raise UnsupportedError(f"{method} needs a key: groupBy(column, …).{method}(…).")
    key_fields: list[StructField] = rows.select(*keys).schema.fields
    check_key_fields(key_fields)
    return key_fields


def _with_event_time(output: StructType, column: str, mode: TimeMode, rows: DataFrame, method: str) -> StructType:
    """Returns the output with Spark's mark of event time on a column: stages after this one go by it."""
    if mode is TimeMode.PROCESSING_TIME:
        raise UnsupportedError(
            f"{method}: eventTimeColumnName {column!r} has no meaning with timeMode 'processingTime', as no watermark "
            "holds for the output then. Use timeMode 'eventTime' or 'none', or leave eventTimeColumnName out."
        )
    marked = watermarked(rows.schema.fields)
    if not marked:
        raise UnsupportedError(
            f"{method}: eventTimeColumnName {column!r} needs a watermark. Set one before: withWatermark(column, delay)."
        )
    names = [field.name for field in output.fields]
    if column not in names or not isinstance(output[column].dataType, TimestampType | TimestampNTZType):
        raise UnsupportedError(
            f"{method}: eventTimeColumnName {column!r} is no timestamp of the output ({output.simpleString()}). "
            "Name one of its timestamp columns."
        )
    delay = rows.schema.fields[marked[0][0]].metadata[WATERMARK]
    return StructType(
        [
            StructField(
                f.name, f.dataType, f.nullable, {**f.metadata, WATERMARK: delay} if f.name == column else f.metadata
            )
            for f in output.fields
        ]
    )


def _frame_settings(spark: SparkSession) -> FrameSettings:
    """Reads Spark's own settings for pandas functions."""

    def flag(name: str, default: str) -> bool:
        return (spark.conf.get(name, default) or default).lower() == "true"

    bytes_max = spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch", None)
    return FrameSettings(
        timezone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
        rows_max=int(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") or 10_000),
        bytes_max=bytes_of(bytes_max) if bytes_max else UNLIMITED_BYTES,
        by_name=flag("spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName", "true"),
        safely=flag("spark.sql.execution.pandas.convertToArrowArraySafely", "false"),
        int_to_decimal=flag("spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled", "false"),
        prefer_int_extension=flag("spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype", "false"),
    )


_METHOD = "applyInPandasWithState"
_TIME_MODES = {
    GroupStateTimeout.NoTimeout: TimeMode.NONE,
    GroupStateTimeout.ProcessingTimeTimeout: TimeMode.PROCESSING_TIME,
    GroupStateTimeout.EventTimeTimeout: TimeMode.EVENT_TIME,
}
_OUTPUT_MODES = ("append", "update")


def build_group_state(
    name: StageName,
    rows: DataFrame,
    keys: Sequence[Column],
    function: Function,
    output: StructType | str,
    state: StructType | str,
    output_mode: str,
    timeout: str,
    *,
    unbounded: bool = True,
) -> tuple[ProcessStage, DataFrame]:
    """Makes the stage, and an empty DataFrame with the schema of its result.

    A batch is not unbounded: it has no watermark, and no key ever times out.
    """
    if not callable(function):
        raise UnsupportedError(f"{_METHOD} needs a function of key, frames and state, not a {type(function).__name__}.")
    mode = str(output_mode).lower()
    if mode not in _OUTPUT_MODES:
        raise UnsupportedError(f"{_METHOD}: outputMode is {output_mode!r}. Use one of {', '.join(_OUTPUT_MODES)}.")
    if timeout not in _TIME_MODES:
        raise UnsupportedError(f"{_METHOD}: timeoutConf is {timeout!r}. Use one of {', '.join(_TIME_MODES)}.")
    event_time = next(iter(watermarked(rows.schema.fields)), None)
    if timeout == GroupStateTimeout.EventTimeTimeout and event_time is None and unbounded:
        raise UnsupportedError(
            f"{_METHOD}: an event-time time-out needs a watermark. Set one before: withWatermark(column, delay)."
        )
    key_fields = _key_fields(rows, keys, _METHOD)
    spark = rows.sparkSession
    sample = spark.createDataFrame([], output)
    schema: StructType = spark.createDataFrame([], state).schema
    processor = GroupStateProcessor(
        function, schema, timeout, tuple(rows.columns), has_watermark=event_time is not None or not unbounded
    )
    declared = declare_state(processor, arrow_schema(key_fields), name.number, name.name, _TIME_MODES[timeout])
    traits = {OPERATOR: _METHOD}
    if timeout != GroupStateTimeout.NoTimeout:
        # Without any, none are set: whichever comes later is the first.
        traits[TIME_MODE] = _TIME_MODES[timeout].value
    program = GroupProgram(
        spec=replace(declared.spec, traits=traits),
        processor=processor,
        output=sample.schema,
        frames=replace(_frame_settings(spark), widened=False, bytes_max=UNLIMITED_BYTES),
        time_mode=_TIME_MODES[timeout],
        asked=declared.asked,
    )
    stage = ProcessStage(
        name.parallelism,
        tuple(keys),
        tuple(key_fields),
        program,
        GroupRunner,
        event_time=event_time,
        output_mode=mode,
    )
    return stage, sample
