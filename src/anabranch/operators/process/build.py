"""Building a process stage from Spark's own StatefulProcessor and the arguments that PySpark gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from anabranch.core.errors import UnsupportedError
from anabranch.operators.keys import StageName, arrow_schema, check_key_fields
from anabranch.operators.process.declare import check_arguments, declare_state
from anabranch.operators.process.program import FrameSettings, Program
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
    initial_state: Any,
    event_time_column: str,
    pandas: bool,
) -> tuple[ProcessStage, DataFrame]:
    """The stage, and an empty DataFrame with the schema of its result."""
    method = "transformWithStateInPandas" if pandas else "transformWithState"
    if not keys:
        raise UnsupportedError(f"{method} needs a key: groupBy(column, …).{method}(…).")
    if not isinstance(processor, StatefulProcessor):
        raise UnsupportedError(f"{method} needs an instance of StatefulProcessor, not a {type(processor).__name__}.")
    check_arguments(
        output_mode=output_mode,
        time_mode=time_mode,
        initial_state=initial_state,
        event_time_column=event_time_column,
    )
    key_fields = rows.select(*keys).schema.fields
    check_key_fields(key_fields)
    spark = rows.sparkSession
    sample = spark.createDataFrame([], output)
    program = Program(
        spec=declare_state(processor, arrow_schema(key_fields), name.number, name.name),
        processor=processor,
        output=sample.schema,
        frames=_frame_settings(spark),
    )
    stage = ProcessStage(name.parallelism, tuple(keys), tuple(key_fields), program, pandas)
    return stage, sample


def _frame_settings(spark: SparkSession) -> FrameSettings:
    """Spark's own settings for pandas functions."""

    def flag(name: str, default: str) -> bool:
        return (spark.conf.get(name, default) or default).lower() == "true"

    return FrameSettings(
        timezone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
        rows_max=int(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") or 10_000),
        by_name=flag("spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName", "true"),
        safely=flag("spark.sql.execution.pandas.convertToArrowArraySafely", "false"),
        int_to_decimal=flag("spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled", "false"),
        prefer_int_extension=flag("spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype", "false"),
    )
