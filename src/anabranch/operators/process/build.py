"""Building a process stage from Spark's own StatefulProcessor and the arguments that PySpark gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from anabranch.core.errors import UnsupportedError
from anabranch.operators.keys import StageName, arrow_schema, check_key_fields
from anabranch.operators.process.declare import check_arguments, declare_state
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
    stage = ProcessStage(
        spec=declare_state(processor, arrow_schema(key_fields), name.number, name.name),
        parallelism=name.parallelism,
        key_columns=tuple(keys),
        key_fields=tuple(key_fields),
        input_schema=rows.schema,
        output_schema=sample.schema,
        processor=processor,
        pandas=pandas,
        timezone=spark.conf.get("spark.sql.session.timeZone") or "UTC",
    )
    return stage, sample
