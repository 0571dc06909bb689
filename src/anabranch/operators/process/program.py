"""What the tasks of a stage run: a StatefulProcessor, its state and its output. Travels to the tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from anabranch.core.schemas import StageSpec

#: The most rows in one output batch, and about as many rows of input at a time as Python objects.
ROWS_MAX = 10_000


@dataclass(frozen=True)
class FrameSettings:
    """How pandas frames are made and read: Spark's settings of the same meaning, with their defaults."""

    #: spark.sql.session.timeZone
    timezone: str = "UTC"
    #: spark.sql.execution.arrow.maxRecordsPerBatch: the most rows in one input frame.
    rows_max: int = ROWS_MAX
    #: spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName
    by_name: bool = True
    #: spark.sql.execution.pandas.convertToArrowArraySafely
    safely: bool = False
    #: spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled
    int_to_decimal: bool = False
    #: spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype
    prefer_int_extension: bool = False


@dataclass(frozen=True)
class Program:
    """A processor, the stage whose state it works on, and its output."""

    spec: StageSpec
    processor: StatefulProcessor
    output: StructType
    frames: FrameSettings = field(default_factory=FrameSettings)

    @property
    def output_schema(self) -> pa.Schema:
        """The columns of the output batches. Timestamps are in UTC."""
        return to_arrow_schema(self.output, timezone="UTC")
