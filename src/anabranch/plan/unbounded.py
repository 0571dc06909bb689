"""The rows of a segment as Spark judges what is done with them: streaming, also where a batch made them.

Spark runs what comes after a stateful stage on the rows of one epoch, a batch, of which it allows more than of a
stream: a window function would rank the rows of each epoch by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.engine.segments import Operation, Segment
from anabranch.engine.spark import frames
from anabranch.engine.spark.expressions import check_streaming
from anabranch.operators.join.stage import JoinStage

#: Sorting is judged by the output mode.
_SORTING = "orderBy"


def unbounded(segment: Segment) -> DataFrame:
    """Returns what a segment gives out as a streaming DataFrame with the same columns and names."""
    return _applied(segment.after, _given_out(segment))


def refused_operation(segment: Segment) -> tuple[Operation, str] | None:
    """Finds the first operation after the stage that Spark does not allow on streams, and what Spark says of it."""
    operations = [operation for operation in segment.after if operation.method != _SORTING]
    if not operations:
        return None
    rows = _given_out(segment)
    if _refusal(_applied(operations, rows)) is None:
        return None
    for operation in operations:
        rows = operation.apply(rows)
        if (reason := _refusal(rows)) is not None:
            return operation, reason
    return None


def _given_out(segment: Segment) -> DataFrame:
    rows = segment.sample
    assert rows is not None
    if isinstance(segment.stage, JoinStage):
        return rows  # streaming itself, and known by the columns that the user may have taken from either side
    plain = frames.plain(rows.sparkSession.readStream.format("rate").load())
    return plain.select(
        *[F.lit(None).cast(field.dataType).alias(field.name, metadata=field.metadata) for field in rows.schema]
    )


def _applied(operations: Sequence[Operation], rows: DataFrame) -> DataFrame:
    for operation in operations:
        rows = operation.apply(rows)
    return rows


def _refusal(rows: DataFrame) -> str | None:
    try:
        check_streaming(rows)
    except PySparkException as error:
        return str(error).splitlines()[0].rstrip(";.")
    return None
