"""What a processor gives out must not be older than the watermark, where later stages go by its times."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType, TimestampNTZType, TimestampType

from anabranch.core.errors import EpochError
from anabranch.engine.spark.expressions import WATERMARK
from anabranch.operators.process.stage import EmittedTimes

KINDS = {TimestampType(): pa.timestamp("us", tz="UTC"), TimestampNTZType(): pa.timestamp("us")}


def at(seconds: int, zone: Any = UTC) -> datetime:
    return datetime(2026, 1, 1, 0, 0, seconds, tzinfo=zone)


WATERMARK_MS = int(at(10).timestamp() * 1000)


def batch(kind: pa.DataType, *seconds: int | None) -> pa.RecordBatch:
    times = [None if second is None else at(second, UTC if kind.tz else None) for second in seconds]
    return pa.record_batch({"n": pa.array(range(len(times))), "at": pa.array(times, kind)})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_the_watermark_has_passed_are_refused(kind: Any) -> None:
    emitted = EmittedTimes.of(StructType([StructField("n", LongType()), StructField("at", kind, True, {WATERMARK: 1})]))
    assert emitted is not None
    timely = [batch(KINDS[kind], 11, None, 12), batch(KINDS[kind]), batch(KINDS[kind], None)]
    assert list(emitted.checked(timely, "sessions", WATERMARK_MS)) == timely
    late = batch(KINDS[kind], 11, 10)
    assert list(emitted.checked([late], "sessions", None)) == [late]
    checked = emitted.checked([*timely, late], "sessions", WATERMARK_MS)
    with pytest.raises(EpochError, match=r"The stage 'sessions' .* at at 2026-01-01 00:00:10 UTC.*not after.*lateRows"):
        list(checked)


def test_times_that_no_stage_goes_by_are_not_looked_at() -> None:
    assert EmittedTimes.of(StructType([StructField("at", TimestampType())])) is None
