"""What the tasks of a stage run: a StatefulProcessor, its state and its output. Travels to the tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, TimerValues
from pyspark.sql.types import StructType

from anabranch.core.schemas import StageSpec
from anabranch.engine.tables import TableRows
from anabranch.operators.process.variable import StateRequest

#: The most rows in one output batch, and about as many rows of input at a time as Python objects.
ROWS_MAX = 10_000
#: Spark's own largest size of a batch, which means none.
UNLIMITED_BYTES = 2**31 - 1


class TimeMode(Enum):
    """What timers and time to live go by; the values are Spark's names."""

    NONE = "none"
    PROCESSING_TIME = "processingTime"
    EVENT_TIME = "eventTime"


@dataclass(frozen=True)
class FrameSettings:
    """How pandas frames are made and read: Spark's settings of the same meaning, with their defaults."""

    #: spark.sql.session.timeZone
    timezone: str = "UTC"
    #: spark.sql.execution.arrow.maxRecordsPerBatch: the most rows in one input frame.
    rows_max: int = ROWS_MAX
    #: spark.sql.execution.arrow.maxBytesPerBatch: about the most bytes in one input frame.
    bytes_max: int = UNLIMITED_BYTES
    #: spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName
    by_name: bool = True
    #: spark.sql.execution.pandas.convertToArrowArraySafely
    safely: bool = False
    #: spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled
    int_to_decimal: bool = False
    #: spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype
    prefer_int_extension: bool = False
    #: As transformWithStateInPandas has it: numbers are 64 bits wide, and types those of the rows of many keys. Else
    #: frames have the types of their own rows: numbers of an int column are floats only where some are null.
    widened: bool = True

    def rows_in_frame(self, rows: pa.Table) -> int:
        """Returns how many of these rows may go into one frame."""
        limit = self.rows_max if self.rows_max > 0 else max(rows.num_rows, 1)
        if self.bytes_max < UNLIMITED_BYTES and rows.nbytes:
            limit = min(limit, max(1, math.ceil(self.bytes_max * rows.num_rows / rows.nbytes)))
        return limit


@dataclass(frozen=True)
class Program:
    """A processor, the stage whose state it works on, and its output."""

    spec: StageSpec
    processor: StatefulProcessor
    output: StructType
    frames: FrameSettings = field(default_factory=FrameSettings)
    time_mode: TimeMode = TimeMode.NONE
    #: What init asked for when the query was built, by name; None if that is not known.
    asked: Mapping[str, StateRequest] | None = None
    #: How many state variables init deletes.
    deleted_variables: int = 0
    #: Broadcast tables by name, as of the epoch.
    tables: Mapping[str, TableRows] = field(default_factory=dict)

    @property
    def output_schema(self) -> pa.Schema:
        """The columns of the output batches. Timestamps are in UTC."""
        return to_arrow_schema(self.output, timezone="UTC")

    @property
    def name(self) -> str:
        """What the user calls it."""
        return type(self.processor).__name__

    def place(self, method: str, key: object) -> str:
        """Says where in user code something happened."""
        return f"{method} for key {key!r}"

    def times(self, processing_time_ms: int, watermark_ms: int | None) -> TimerValues:
        """Returns an epoch's times as user code sees them. A watermark that has not moved is at 0, as in Spark."""
        if self.time_mode is TimeMode.NONE:
            return TimerValues()
        return TimerValues(processing_time_ms, watermark_ms or 0)

    def due_up_to_ms(self, times: TimerValues) -> int | None:
        """Returns the last moment of which timers are due in an epoch; None without timers."""
        if self.time_mode is TimeMode.NONE:
            return None
        if self.time_mode is TimeMode.PROCESSING_TIME:
            return times.getCurrentProcessingTimeInMs()
        return times.getCurrentWatermarkInMs()
