"""When Spark is told not to look at the size of the batches that it makes for tasks."""

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DataType, DecimalType, LongType, StringType, StructField, StructType

from anabranch.engine.tasks import spare_size_checks

ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
NUMBERS = pa.schema([pa.field("count", pa.int64())])
TEXTS = pa.schema([pa.field("name", pa.string())])


def limit_after(
    *kinds: DataType, rows_max: str = "10000", bytes_max: str = "67108864b", state: pa.Schema = NUMBERS
) -> str:
    """The limit that Spark has after it was told about rows of these types."""
    settings = {ROWS: rows_max, BYTES: bytes_max}
    session = SimpleNamespace(conf=SimpleNamespace(get=settings.__getitem__, set=settings.__setitem__))
    schema = StructType([StructField(f"c{i}", kind) for i, kind in enumerate(kinds)])
    rows: Any = SimpleNamespace(schema=schema, sparkSession=session)
    stage: Any = SimpleNamespace(layouts={"totals": SimpleNamespace(changes=state)})
    spare_size_checks(rows, stage)
    return settings[BYTES]


def test_rows_of_numbers_need_no_look() -> None:
    assert limit_after(LongType(), DecimalType(38, 2)) == str(2**31 - 1)


def test_a_limit_without_a_unit_is_understood() -> None:
    assert limit_after(LongType(), bytes_max="67108864") == str(2**31 - 1)


@pytest.mark.parametrize(
    "case",
    [
        {"kinds": [LongType(), StringType()]},
        {"kinds": [LongType()], "state": TEXTS},
        {"kinds": [LongType()], "rows_max": "0"},
        {"kinds": [LongType()], "rows_max": "-1"},
        {"kinds": [LongType()], "rows_max": "10000000"},
    ],
    ids=["text in the rows", "text in the state", "any number of rows", "no limit of rows", "too many rows"],
)
def test_spark_keeps_looking_where_a_batch_may_become_too_large(case: dict[str, Any]) -> None:
    assert limit_after(*case.pop("kinds"), **case) == "67108864b"


def test_a_limit_that_a_person_wrote_stays() -> None:
    assert limit_after(LongType(), bytes_max="64m") == "64m"
