"""Building the stage of applyInPandasWithState, with the arguments that PySpark gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import OPERATOR, TIME_MODE
from anabranch.operators.groupstate.processor import Function, GroupProgram, GroupStateProcessor
from anabranch.operators.groupstate.run import run_groups
from anabranch.operators.keys import StageName, arrow_schema
from anabranch.operators.process.build import event_time_of, frame_settings, key_fields_of
from anabranch.operators.process.declare import declare_state
from anabranch.operators.process.program import UNLIMITED_BYTES, TimeMode
from anabranch.operators.process.stage import ProcessStage

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
    """The stage, and an empty DataFrame with the schema of its result. A batch is not unbounded: it has no watermark,
    and no key ever times out."""
    if not callable(function):
        raise UnsupportedError(f"{_METHOD} needs a function of key, frames and state, not a {type(function).__name__}.")
    mode = str(output_mode).lower()
    if mode not in _OUTPUT_MODES:
        raise UnsupportedError(f"{_METHOD}: outputMode is {output_mode!r}. Use one of {', '.join(_OUTPUT_MODES)}.")
    if timeout not in _TIME_MODES:
        raise UnsupportedError(f"{_METHOD}: timeoutConf is {timeout!r}. Use one of {', '.join(_TIME_MODES)}.")
    event_time = event_time_of(rows)
    if timeout == GroupStateTimeout.EventTimeTimeout and event_time is None and unbounded:
        raise UnsupportedError(
            f"{_METHOD}: an event-time time-out needs a watermark. Set one before: withWatermark(column, delay)."
        )
    key_fields = key_fields_of(rows, keys, _METHOD)
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
        frames=replace(frame_settings(spark), widened=False, bytes_max=UNLIMITED_BYTES),
        time_mode=_TIME_MODES[timeout],
        asked=declared.asked,
    )
    stage = ProcessStage(
        name.parallelism,
        tuple(keys),
        tuple(key_fields),
        program,
        run_groups,
        event_time=event_time,
        output_mode=mode,
    )
    return stage, sample
