"""Building a session stage: an aggregation whose sessions are found by Spark's own mark, however they were written."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import OPERATOR, StageSpec, VariableKind, VariableSpec
from anabranch.operators.aggregate.stage import AggregateStage
from anabranch.operators.keys import arrow_schema
from anabranch.operators.session.stage import VARIABLE, SessionStage

#: Spark's mark of a column with sessions.
_SESSION = "spark.sessionWindow"


def session_key(rows: DataFrame, keys: Sequence[Column]) -> int | None:
    """Which of the keys is a session window."""
    if not keys:
        return None
    fields = rows.groupBy(*keys).agg(F.count(F.lit(1))).schema.fields[: len(keys)]
    return next((i for i, field in enumerate(fields) if _SESSION in (field.metadata or {})), None)


def build_session(whole: AggregateStage, position: int) -> SessionStage:
    """The stage, from the aggregation by all keys, of which one is the session."""
    if len(whole.key_fields) == 1:
        raise UnsupportedError(
            "A session window needs another key beside it, as in Spark: sessions are those of a user, a device, … "
            "Group by a constant, F.lit(0).alias('all'), for the sessions of everything."
        )
    if whole.event_time is not None and whole.event_time[0] != position:
        field = whole.key_fields[whole.event_time[0]]
        raise UnsupportedError(
            f"The key column {field.name!r} has a watermark, and the session window beside it has none. "
            "Make the session window of the column with the watermark."
        )
    session = whole.key_fields[position].dataType
    assert isinstance(session, StructType)
    start, end = arrow_schema(session.fields)
    (buffers,) = whole.spec.variables
    key = pa.schema([field for i, field in enumerate(whole.spec.key) if i != position])
    spec = StageSpec(
        number=whole.spec.number,
        name=whole.spec.name,
        key=key,
        variables=(
            VariableSpec(VARIABLE, VariableKind.MAP, pa.schema([end, *buffers.value]), map_key=pa.schema([start])),
        ),
        traits={OPERATOR: "aggregation by session windows"},
    )
    return SessionStage(whole, spec, position)
