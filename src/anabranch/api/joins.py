"""Where streams meet: ``stream.join(other, on, how)`` and ``stream.union(other)``, before and after stateful stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame

from anabranch.core.errors import UnsupportedError
from anabranch.engine.segments import Operation
from anabranch.operators.aggregate.catalyst import sql_of
from anabranch.operators.join.build import build_join
from anabranch.plan.unbounded import unbounded
from anabranch.plan.validation import bound_columns_explained, check_stage_names

if TYPE_CHECKING:
    from anabranch.api.stream import Stream

#: Join types that need all rows of the static side to be matched or not, which a stream never knows.
_REFUSED_WITH_STATIC = ("right", "rightouter", "outer", "full", "fullouter")
UNION_METHODS = ("union", "unionAll", "unionByName")


def is_stream(other: Any) -> bool:
    """Whether it is an unbounded side of a join."""
    from anabranch.api.stream import Stream

    return isinstance(other, Stream | DataFrame) and other.isStreaming


def join_streams(left: Stream, other: Any, on: Any, how: str | None) -> Stream:
    """A stage that joins two streams; its state holds the rows that wait for a match."""
    from anabranch.api.stream import Stream, stream

    right = stream(other)
    with bound_columns_explained("join", [*left.columns, *right.columns]):
        joined = _unbounded(left).join(_unbounded(right), _condition(on), how)
    pipeline, inputs = left._pipeline.meeting(right._pipeline, _text(right, on, how))
    check_stage_names(pipeline)
    stage, sides = build_join(pipeline.stages[-1], joined)
    read = tuple(each if isinstance(each, int) else sides[side] for side, each in enumerate(inputs))
    return Stream(pipeline.with_stateful(stage, joined, read), joined)


def unite_streams(left: Stream, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Stream | None:
    """A union of streams of which one has state, which Spark cannot make before it hands over rows; None for others."""
    from anabranch.api.stream import Stream, stream

    given = dict(keywords)
    other, *options = arguments or (given.pop("other", None),)
    if not is_stream(other) or not (left.has_state or (isinstance(other, Stream) and other.has_state)):
        return None
    right = stream(other)
    union = Operation(method, tuple(options), given)
    sample = Operation(method, (right._sample, *options), given).apply(left._sample)
    pipeline, inputs = left._pipeline.meeting(right._pipeline, f"{method}({', '.join(_before(right))})")
    check_stage_names(pipeline)
    return Stream(pipeline.with_union(union, sample, inputs), sample)


def _unbounded(side: Stream) -> DataFrame:
    """The side as Spark has to see it, to judge the join."""
    segments = side._pipeline.segments
    return unbounded(segments[-1]) if segments else side._pipeline.source


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
    listed = on if isinstance(on, list | tuple) else [on]
    columns = ", ".join(sql_of(column) if isinstance(column, Column) else str(column) for column in listed)
    return f"join({', '.join([*_before(right), f'on [{columns}]', how or 'inner'])})"


def _before(right: Stream) -> list[str]:
    """What the other stream does, unless it has stages of its own in the query."""
    operations = [operation for stage in right._pipeline.stages for operation in stage.operations]
    return [] if right.has_state else [" -> ".join(operations)]
