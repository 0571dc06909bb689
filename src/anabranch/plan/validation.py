"""What a query may ask for, checked when it is built or started, never in the middle of the night."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.errors import AnalysisException

from anabranch.core.errors import UnsupportedError
from anabranch.core.settings import MAX_PARALLELISM
from anabranch.engine.segments import Segment
from anabranch.engine.stages import StageClock, StatefulStage
from anabranch.engine.tables import TableStage
from anabranch.operators.aggregate.stage import AggregateStage
from anabranch.operators.dedup import DedupStage
from anabranch.operators.join.sides import JoinType
from anabranch.operators.join.stage import JoinStage
from anabranch.operators.process.program import TimeMode
from anabranch.operators.process.stage import ProcessStage
from anabranch.operators.session import SessionStage
from anabranch.operators.stage import watermarked
from anabranch.operators.vectorised import VectorisedStage
from anabranch.plan.pipeline import Pipeline
from anabranch.plan.unbounded import refused_operation

OUTPUT_MODES = ("append", "update", "complete")


def check_stage_options(name: str, parallelism: int | None, taken: Sequence[str]) -> None:
    if not isinstance(name, str) or not name.strip():
        raise UnsupportedError("A stage needs a name that is not empty.")
    if name in taken:
        raise UnsupportedError(f"There is a stage {name!r} already. Give this one another name.")
    if parallelism is not None and not 1 <= parallelism <= MAX_PARALLELISM:
        raise UnsupportedError(f"The parallelism of stage {name!r} must be between 1 and {MAX_PARALLELISM}.")


def check_stage_names(pipeline: Pipeline) -> None:
    """Refuses two stages of one name where two streams meet: they become stages of one query."""
    names = [stage.name for stage in pipeline.stages]
    for name in names:
        if names.count(name) > 1:
            raise UnsupportedError(f"Both streams have a stage {name!r}. Give one of them another name with stage().")


def check_aggregation_input(pipeline: Pipeline) -> None:
    """Refuses an aggregate of an aggregate that would count a key again each time that it changes."""
    if any(stage.event_time is None for stage in _aggregations(pipeline)):
        raise UnsupportedError(
            "An aggregation after another aggregation is supported only if the first one is over windows under a "
            "watermark, in outputMode('append'): it then emits each key once, else each time that it changes. "
            "Write the first one's result out, and aggregate it in a second query."
        )


def check_time_mode(pipeline: Pipeline, stage: ProcessStage, method: str) -> None:
    """Timers that go by a watermark never fire where there is none."""
    if stage.program.time_mode is TimeMode.EVENT_TIME and not pipeline.has_watermark:
        raise UnsupportedError(
            f"{method}: timeMode 'eventTime' needs a watermark, by which timers fire. Set one before: "
            "withWatermark(column, delay). Or use timeMode 'processingTime' or 'none'."
        )


def check_output_mode(pipeline: Pipeline, mode: str) -> None:
    """Refuses output modes that the query cannot have."""
    if mode not in OUTPUT_MODES:
        raise UnsupportedError(f"Unknown output mode {mode!r}. It can be {', '.join(OUTPUT_MODES)}.")
    aggregations = _aggregations(pipeline)
    sorts = any(operation.method == "orderBy" for segment in pipeline.segments for operation in segment.after)
    if mode == "append" and any(stage.event_time is None for stage in aggregations):
        raise UnsupportedError(
            "Output mode append needs a watermark for an aggregation, on a window or another key column: without one "
            "its rows change from epoch to epoch, and are never final. Set it with withWatermark(column, delay) and "
            "group by a window of that column, or use outputMode('update') or outputMode('complete')."
        )
    if mode != "append" and len(aggregations) > 1:
        raise UnsupportedError(
            f"Output mode {mode} is not supported for an aggregation after another one: the first emits a key each "
            "time that it changes. Use outputMode('append')."
        )
    if mode == "update" and any(isinstance(stage, SessionStage) for stage in aggregations):
        raise UnsupportedError(
            "Output mode update is not supported for session windows, as in Spark: a session that becomes part of "
            "another one could not be taken back. Use outputMode('append') or outputMode('complete')."
        )
    if mode != "complete":
        for stage in aggregations:
            _check_event_times(stage)
    if mode == "complete" and not (aggregations and pipeline.stateful_stages[-1] is aggregations[-1]):
        raise UnsupportedError(
            "Output mode complete needs an aggregation as the last stateful operation. Use outputMode('update')."
        )
    _check_group_states(pipeline, mode)
    if sorts and mode != "complete":
        raise UnsupportedError("Sorting needs outputMode('complete'): otherwise only a part of the result goes out.")
    _check_join_mode(pipeline, mode)
    _check_meetings(pipeline, mode)
    _check_after_aggregations(pipeline, mode)
    _check_operations(pipeline, mode)


def _check_group_states(pipeline: Pipeline, mode: str) -> None:
    """Checks the output modes of applyInPandasWithState as Spark does; in append mode there may be several."""
    stages = [stage for stage in pipeline.stateful_stages if isinstance(stage, ProcessStage) and stage.output_mode]
    aggregates = bool(_aggregations(pipeline))
    for stage in stages:
        where = f"Stage {stage.spec.name}: applyInPandasWithState"
        if aggregates and stage.output_mode == "update":
            raise UnsupportedError(
                f"{where} in outputMode 'update' is not supported together with an aggregation, as in Spark: a row "
                "that it emits again would be aggregated again. Give it outputMode 'append', or write its result out "
                "and aggregate it in a second query."
            )
        if not aggregates and stage.output_mode != mode:
            raise UnsupportedError(
                f"{where} has outputMode {stage.output_mode!r} and the query {mode!r}. Give both the same."
            )
    if mode != "append" and len(stages) > 1:
        raise UnsupportedError(
            f"Stage {stages[1].spec.name}: a second applyInPandasWithState is supported in outputMode 'append' only. "
            "Give both and the query outputMode 'append', or write the first one's result out and go on in a second "
            "query."
        )


def _check_after_aggregations(pipeline: Pipeline, mode: str) -> None:
    """Refuses stages after an aggregation whose output could not be taken back when the aggregation replaces a row."""
    if mode == "append":
        return
    for position, segment in enumerate(pipeline.segments):
        stage = segment.stage
        if stage is None or isinstance(stage, TableStage) or _takes_each_version(stage):
            continue
        if _aggregates_before(pipeline.segments, position):
            raise UnsupportedError(
                f"Stage {stage.spec.name} comes after an aggregation, which is not supported in output mode {mode}: "
                "the aggregation emits a key each time that it changes, and what the stage made of the row before "
                "would stay. Use outputMode('append') with a window under a watermark, or write the aggregation out "
                "and go on in a second query."
            )


def _takes_each_version(stage: StatefulStage) -> bool:
    """Tells whether rows that an aggregation replaces later are rows like others to the stage.

    They are to functions of whole partitions and, as in Spark, to dropDuplicates that forgets no key.
    """
    return isinstance(stage, VectorisedStage) or (isinstance(stage, DedupStage) and stage.clock is StageClock.NONE)


def _check_operations(pipeline: Pipeline, mode: str) -> None:
    """Refuses, between stages and after them, what Spark does not allow on streams."""
    segments = pipeline.segments
    for segment in segments:
        if mode == "complete" and segment is segments[-1]:
            continue  # every epoch has the whole result, of which a batch may do what it likes
        refused = refused_operation(segment)
        if refused is not None:
            operation, reason = refused
            after = "a union of streams" if segment.stage is None else f"stage {segment.stage.spec.name}"
            raise UnsupportedError(
                f"{operation} after {after} is not supported: {reason}. It would be done for each epoch by itself. "
                "Do it in foreachBatch, if that is what you want; use groupBy(...).agg(...) to aggregate over the "
                "whole stream."
            )


def _check_meetings(pipeline: Pipeline, mode: str) -> None:
    """Refuses joins and unions of rows that still change: what becomes of such rows cannot be taken back."""
    segments = pipeline.segments
    after_state = [i for i, segment in enumerate(segments) if len(segment.inputs) > 1 and segment.feeders(i)]
    if mode == "complete" and after_state:
        raise UnsupportedError(
            "Output mode complete is not supported where streams are joined or united after a stateful stage. Use "
            "outputMode('append')."
        )
    for i in after_state:
        if mode != "append" and isinstance(segments[i].stage, JoinStage) and _aggregates_before(segments, i):
            raise UnsupportedError(
                f"Output mode {mode} is not supported for a join after an aggregation, as in Spark: the aggregation "
                "emits a key each time that it changes. Use outputMode('append')."
            )


def _aggregates_before(segments: Sequence[Segment], position: int) -> bool:
    return any(
        isinstance(segments[feeder].stage, AggregateStage | SessionStage) or _aggregates_before(segments, feeder)
        for feeder in segments[position].feeders(position)
    )


def _check_join_mode(pipeline: Pipeline, mode: str) -> None:
    for stage in pipeline.stateful_stages:
        if isinstance(stage, JoinStage) and stage.how is not JoinType.INNER and mode != "append":
            raise UnsupportedError(
                f"A {stage.how.value} join of two streams is not supported in output mode {mode}, as in Spark. "
                "Use outputMode('append')."
            )


def _aggregations(pipeline: Pipeline) -> list[AggregateStage | SessionStage]:
    return [stage for stage in pipeline.stateful_stages if isinstance(stage, AggregateStage | SessionStage)]


def _check_event_times(stage: AggregateStage | SessionStage) -> None:
    fields = stage.whole.key_fields if isinstance(stage, SessionStage) else stage.key_fields
    marked = [fields[position].name for position, _ in watermarked(fields)]
    if len(marked) > 1:
        raise UnsupportedError(
            f"The key columns {', '.join(map(repr, marked))} all have a watermark, so it is not clear when a key is "
            "over. Group by one of them, or use outputMode('complete')."
        )


@contextmanager
def bound_columns_explained(method: str, columns: Sequence[str]) -> Iterator[None]:
    """Says what is wrong where Spark says that it cannot resolve a column, as it belongs to another DataFrame."""
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
