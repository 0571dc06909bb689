"""``stream.join(other, on, how)``: with another stream as a stateful stage, with static rows as Spark does it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame

from anabranch.core.errors import UnsupportedError
from anabranch.operators.aggregate.catalyst import sql_of
from anabranch.operators.join.build import build_join

if TYPE_CHECKING:
    from anabranch.api.stream import Stream

#: Join types that need all rows of the static side to be matched or not, which a stream never knows.
_REFUSED_WITH_STATIC = ("right", "rightouter", "outer", "full", "fullouter")


def is_stream(other: Any) -> bool:
    """Whether it is an unbounded side of a join."""
    from anabranch.api.stream import Stream

    return isinstance(other, Stream | DataFrame) and other.isStreaming


def join_streams(left: Stream, other: Any, on: Any, how: str | None) -> Stream:
    """A stage that joins two streams; its state holds the rows that wait for a match."""
    from anabranch.api.stream import Stream, stream

    right = stream(other)
    if left._pipeline.segments or right._pipeline.segments:
        raise UnsupportedError(
            "A join of two streams comes before the first stateful operation of both. Move it up, or write one "
            "stream's result out and read it in a second query."
        )
    joined = left._pipeline.source.join(right._pipeline.source, _condition(on), how)
    pipeline = left._pipeline.with_stage(_text(right, on, how))
    stage, source = build_join(pipeline.stages[-1], joined)
    return Stream(replace(pipeline, source=source).with_stateful(stage), joined)


def check_static_join(how: Any) -> None:
    """Refuse what Spark refuses between a stream and static rows."""
    if isinstance(how, str) and how.lower().replace("_", "") in _REFUSED_WITH_STATIC:
        raise UnsupportedError(
            f"A {how} join of a stream with a static DataFrame is not supported: which static rows have no match is "
            "known only at the end of the stream. Use inner, left, left_semi or left_anti."
        )


def _condition(on: Any) -> Any:
    """As Spark takes it: no condition is one that always holds, which Spark then refuses in its own words."""
    return list(on) if isinstance(on, tuple) else on


def _text(right: Stream, on: Any, how: str | None) -> str:
    """The stage as explain shows it, with what the other stream does before it."""
    before = [operation for stage in right._pipeline.stages for operation in stage.operations]
    listed = on if isinstance(on, list | tuple) else [on]
    columns = ", ".join(sql_of(column) if isinstance(column, Column) else str(column) for column in listed)
    return f"join({' -> '.join(before)}, on [{columns}], {how or 'inner'})"
