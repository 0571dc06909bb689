"""``stream.groupBy(...)``: aggregations and Spark's own StatefulProcessor, with PySpark's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import NumericType, StructType

from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark.expressions import sql_of
from anabranch.engine.stages import StatefulStage
from anabranch.operators.aggregate.build import build_aggregate
from anabranch.operators.process.build import build_group_state, build_process
from anabranch.operators.session import build_session, session_key
from anabranch.operators.vectorised import Process, build_vectorised
from anabranch.plan.pipeline import Pipeline
from anabranch.plan.validation import bound_columns_explained, check_aggregation_input, check_time_mode

if TYPE_CHECKING:
    from anabranch.api.stream import Stream


class GroupedStream:
    """A stream grouped by key columns."""

    #: Whether more rows can come; of a batch all are there.
    _unbounded = True

    def __init__(self, pipeline: Pipeline, sample: DataFrame, keys: tuple[Column, ...]) -> None:
        self._pipeline = pipeline
        self._sample = sample
        self._keys = keys
        sample.groupBy(*keys)

    def count(self) -> Stream:
        """The number of rows of each key, in a column `count`."""
        return self.agg(F.count(F.lit(1)).alias("count"))

    def sum(self, *columns: str) -> Stream:
        return self._of_columns("sum", columns)

    def avg(self, *columns: str) -> Stream:
        return self._of_columns("avg", columns)

    mean = avg

    def min(self, *columns: str) -> Stream:
        return self._of_columns("min", columns)

    def max(self, *columns: str) -> Stream:
        return self._of_columns("max", columns)

    def agg(self, *aggregates: Column | dict[str, str]) -> Stream:
        """Aggregate with Spark's own function columns, or with a dict of column name to function name."""
        return self._aggregated(self._aggregates(aggregates))

    def _aggregates(self, aggregates: tuple[Column | dict[str, str], ...]) -> list[Column]:
        columns: list[Column] = []
        if len(aggregates) == 1 and isinstance(aggregates[0], dict):
            columns = self._in_spark_order(aggregates[0])
        else:
            for aggregate in aggregates:
                if not isinstance(aggregate, Column):
                    raise UnsupportedError(f"agg takes Columns such as F.sum('x'), not a {type(aggregate).__name__}.")
                columns.append(aggregate)
        if not columns:
            raise UnsupportedError("agg needs at least one aggregate, such as F.count('*').")
        return columns

    def _aggregated(self, columns: list[Column]) -> Stream:
        check_aggregation_input(self._pipeline)
        pipeline, keys = self._named(agg_text(columns))
        with bound_columns_explained("groupBy or agg", self._sample.columns):
            stage, sample = build_aggregate(pipeline.stages[-1], self._sample, keys, columns)
            session = session_key(self._sample, keys)
        return self._stateful(pipeline, stage if session is None else build_session(stage, session), sample)

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
    ) -> Stream:
        """Run Spark's own StatefulProcessor on rows, with its state and timers in the state workers."""
        return self._process(
            statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName, pandas=False
        )

    def transformWithStateInPandas(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
    ) -> Stream:
        """Run Spark's own StatefulProcessor on pandas DataFrames, with its state and timers in the state workers."""
        return self._process(
            statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName, pandas=True
        )

    def applyInPandasWithState(
        self,
        func: Callable[..., Iterable[Any]],
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        outputMode: str,
        timeoutConf: str,
    ) -> Stream:
        """Run a function of a key, its pandas DataFrames and a GroupState, with the state in the state workers."""
        pipeline, keys = self._named(f"applyInPandasWithState({getattr(func, '__name__', type(func).__name__)})")
        with bound_columns_explained("groupBy", self._sample.columns):
            stage, sample = build_group_state(
                pipeline.stages[-1], self._sample, keys, func, outputStructType, stateStructType, outputMode,
                timeoutConf, unbounded=self._unbounded,
            )  # fmt: skip
        return self._stateful(pipeline, stage, sample)

    def processInArrow(
        self, process: Process, outputStructType: StructType | str, stateStructType: StructType | str
    ) -> Stream:
        """Call ``process(keys, rows, state) -> rows, state`` with Arrow tables of all keys of a partition at once.

        ``keys`` has one row for each key of the epoch; ``rows`` has the input, those of a key together and in the order
        in which they came, with the position of their key in a column ``_key``; ``state`` has one row for each key, all
        null if there is none. The state that is returned has one row for each key as well, all null to remove it.
        """
        return self._vectorised("processInArrow", process, outputStructType, stateStructType, pandas=False)

    def processInPandas(
        self, process: Process, outputStructType: StructType | str, stateStructType: StructType | str
    ) -> Stream:
        """As processInArrow, with pandas DataFrames; whole numbers of the state have pandas' nullable types."""
        return self._vectorised("processInPandas", process, outputStructType, stateStructType, pandas=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "pivot":
            raise UnsupportedError(
                "pivot is not supported on a stream: its columns would follow from the data. Aggregate conditions "
                "instead, for example F.sum(F.when(F.col('kind') == 'a', F.col('value'))).alias('a')."
            )
        if name in ("applyInPandas", "applyInArrow", "cogroup", "apply"):
            raise UnsupportedError(f"{name} is not supported on a stream. Use transformWithState.")
        raise AttributeError(f"A grouped stream has no method {name!r}.")

    def _process(
        self,
        processor: StatefulProcessor,
        output: StructType | str,
        output_mode: str,
        time_mode: str,
        initial_state: Any,
        event_time_column: str,
        *,
        pandas: bool,
    ) -> Stream:
        method = "transformWithStateInPandas" if pandas else "transformWithState"
        pipeline, keys = self._named(f"{method}({type(processor).__name__})")
        with bound_columns_explained("groupBy", self._sample.columns):
            stage, sample = build_process(
                pipeline.stages[-1], self._sample, keys, processor, output,
                output_mode=output_mode, time_mode=time_mode, initial=initial_state,
                event_time_column=event_time_column if self._unbounded else "", pandas=pandas,
                tables=self._pipeline.table_names,
            )  # fmt: skip
        if self._unbounded:
            check_time_mode(pipeline, stage, method)
        return self._stateful(pipeline, stage, sample)

    def _vectorised(
        self, method: str, process: Process, output: StructType | str, state: StructType | str, *, pandas: bool
    ) -> Stream:
        pipeline, keys = self._named(f"{method}({getattr(process, '__name__', type(process).__name__)})")
        with bound_columns_explained("groupBy", self._sample.columns):
            stage, sample = build_vectorised(
                pipeline.stages[-1], self._sample, keys, process, output, state, pandas=pandas,
                tables=self._pipeline.table_names,
            )  # fmt: skip
        return self._stateful(pipeline, stage, sample)

    def _of_columns(self, function: str, columns: tuple[str, ...]) -> Stream:
        if not columns:
            # As Spark does it: all numeric columns, key columns among them.
            columns = tuple(f"`{f.name}`" for f in self._sample.schema.fields if isinstance(f.dataType, NumericType))
        return self.agg(*[_named_function(function, column) for column in columns])

    def _in_spark_order(self, functions: dict[str, str]) -> list[Column]:
        """Aggregates given as a dict come in an order that is Spark's own."""
        columns = [_named_function(function, name) for name, function in functions.items()]
        grouped = self._sample.groupBy(*self._keys)
        named = {grouped.agg(column).columns[-1]: column for column in columns}
        return [named[name] for name in grouped.agg(functions).columns if name in named]

    def _named(self, text: str) -> tuple[Pipeline, tuple[Column, ...]]:
        keys = ", ".join(sql_of(column) for column in self._keys)
        return self._pipeline.with_stage(f"groupBy({keys}).{text}"), self._keys

    def _stateful(self, pipeline: Pipeline, stage: StatefulStage, sample: DataFrame) -> Stream:
        from anabranch.api.stream import Stream

        return Stream(pipeline.with_stateful(stage, sample, arriving=self._sample.schema), sample)


def agg_text(columns: list[Column]) -> str:
    return f"agg({', '.join(sql_of(column) for column in columns)})"


def _named_function(function: str, column: str) -> Column:
    """An aggregate by its name in SQL; Spark calls the average so whatever the user calls it."""
    name = {"mean": "avg", "average": "avg"}.get(function.lower(), function)
    return F.count(column) if name.lower() == "count" else F.call_function(name, F.col(column))
