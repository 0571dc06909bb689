"""What a query may ask for, checked when it is built or started, never in the middle of the night."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.errors import AnalysisException

from anabranch.core.errors import UnsupportedError
from anabranch.core.settings import MAX_PARALLELISM
from anabranch.operators.aggregate.stage import AggregateStage
from anabranch.operators.join.sides import JoinType
from anabranch.operators.join.stage import JoinStage
from anabranch.plan.pipeline import Pipeline

OUTPUT_MODES = ("append", "update", "complete")


def check_stage_options(name: str, parallelism: int | None, taken: Sequence[str]) -> None:
    if not isinstance(name, str) or not name.strip():
        raise UnsupportedError("A stage needs a name that is not empty.")
    if name in taken:
        raise UnsupportedError(f"There is a stage {name!r} already. Give this one another name.")
    if parallelism is not None and not 1 <= parallelism <= MAX_PARALLELISM:
        raise UnsupportedError(f"The parallelism of stage {name!r} must be between 1 and {MAX_PARALLELISM}.")


def check_aggregation_input(pipeline: Pipeline) -> None:
    """An aggregate of an aggregate would count a key again each time that it changes."""
    if any(isinstance(stage, AggregateStage) for stage in pipeline.stateful_stages):
        raise UnsupportedError(
            "An aggregation after another aggregation is not supported: the first one emits a key each time that it "
            "changes. Write its result out, and aggregate it in a second query."
        )


def check_output_mode(pipeline: Pipeline, mode: str) -> None:
    """Which output modes the query can have."""
    if mode not in OUTPUT_MODES:
        raise UnsupportedError(f"Unknown output mode {mode!r}. It can be {', '.join(OUTPUT_MODES)}.")
    aggregates = [stage for stage in pipeline.stateful_stages if isinstance(stage, AggregateStage)]
    sorts = any(operation.method == "orderBy" for segment in pipeline.segments for operation in segment.after)
    if mode == "append" and aggregates:
        raise UnsupportedError(
            "Output mode append is not supported for aggregations: their rows change from epoch to epoch. "
            "Use outputMode('update') or outputMode('complete')."
        )
    if mode == "complete" and not (pipeline.segments and aggregates and pipeline.stateful_stages[-1] is aggregates[-1]):
        raise UnsupportedError(
            "Output mode complete needs an aggregation as the last stateful operation. Use outputMode('update')."
        )
    if sorts and mode != "complete":
        raise UnsupportedError("Sorting needs outputMode('complete'): otherwise only a part of the result goes out.")
    _check_join_mode(pipeline, mode)


def _check_join_mode(pipeline: Pipeline, mode: str) -> None:
    for stage in pipeline.stateful_stages:
        if isinstance(stage, JoinStage) and stage.how is not JoinType.INNER and mode != "append":
            raise UnsupportedError(
                f"A {stage.how.value} join of two streams is not supported in output mode {mode}, as in Spark. "
                "Use outputMode('append')."
            )


@contextmanager
def bound_columns_explained(method: str, columns: Sequence[str]) -> Iterator[None]:
    """Say what is wrong where Spark says that it cannot resolve a column, because that belongs to another DataFrame."""
    try:
        yield
    except AnalysisException as error:
        condition = error.getCondition() or ""
        if condition == "CANNOT_RESOLVE_DATAFRAME_COLUMN" or condition.startswith("MISSING_ATTRIBUTES"):
            raise UnsupportedError(
                f"{method} uses a column taken from a DataFrame, such as df.x, which after a stateful operation no "
                f"longer resolves. Use its name instead, F.col('x'). Columns here: {list(columns)}."
            ) from None
        raise
