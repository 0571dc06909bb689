"""``anabranch.stream(df)``: a streaming DataFrame whose stateful operations keep their state in state workers."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.api.broadcast import BroadcastTable, table_argument, with_broadcast
from anabranch.api.grouped import GroupedStream
from anabranch.core.errors import UnsupportedError
from anabranch.engine.segments import Operation
from anabranch.engine.spark.expressions import sql_of
from anabranch.engine.spark.python_daemon import use_own_python
from anabranch.operators.dedup import build_dedup
from anabranch.operators.join.build import build_join
from anabranch.plan.explain import explain_logical
from anabranch.plan.pipeline import Pipeline
from anabranch.plan.unbounded import unbounded
from anabranch.plan.validation import bound_columns_explained, check_stage_names, check_stage_options

if TYPE_CHECKING:
    from anabranch.api.writer import StreamWriter

#: DataFrame methods that give another DataFrame and need no state.
STATELESS_METHODS = (
    "alias", "coalesce", "crossJoin", "drop", "dropna", "fillna", "filter", "hint", "join", "mapInArrow", "mapInPandas",
    "melt", "repartition", "repartitionByRange", "replace", "select", "selectExpr", "to", "union", "unionAll",
    "unionByName", "unpivot", "where", "withColumn", "withColumnRenamed", "withColumns", "withColumnsRenamed",
    "withMetadata", "withWatermark",
)  # fmt: skip
#: Sorting makes sense where a whole result goes out: in complete mode, after the last stateful stage.
SORTING_METHODS = ("orderBy", "sort")
_STATEFUL_METHODS = ("groupBy", "agg", "dropDuplicates", "dropDuplicatesWithinWatermark", "distinct")
#: Join types that need all rows of the static side to be matched or not, which a stream never knows.
_REFUSED_WITH_STATIC = ("right", "rightouter", "outer", "full", "fullouter")
_UNION_METHODS = ("union", "unionAll", "unionByName")
#: Not possible on streams; what to do instead.
REFUSED_METHODS = {
    "limit": "A limit over a whole stream is not supported; limit the rows in foreachBatch.",
    "collect": "A stream has no end; write it with writeStream, for example to the memory sink.",
    "count": "A stream has no end; use groupBy().count().",
    "show": "A stream has no end; use writeStream.format('console').",
    "toPandas": "A stream has no end; write it with writeStream, for example to the memory sink.",
    "write": "Use writeStream.",
    "rollup": "Use groupBy for each level.",
    "cube": "Use groupBy for each level.",
}


def stream(rows: DataFrame) -> Stream:
    """Wrap a streaming DataFrame.

    The result offers the DataFrame methods; its stateful ones run on Anabranch:

    >>> counts = anabranch.stream(edits).groupBy("server").count()  # doctest: +SKIP

    A batch DataFrame can be wrapped as well, so that the same code runs on history: it begins without state, all rows
    of a key come at once, no state is kept, and ``toDF()`` gives the result.
    """
    from anabranch.api.batch import BatchStream

    if isinstance(rows, Stream):
        return rows
    if not isinstance(rows, DataFrame):
        raise UnsupportedError(f"anabranch.stream needs a DataFrame, not a {type(rows).__name__}.")
    use_own_python(rows.sparkSession)
    pipeline = Pipeline(source=rows, stages=()).open_stage(None, None, opened=False, operations=("source",))
    return Stream(pipeline, rows) if rows.isStreaming else BatchStream(pipeline, rows)


class Stream:
    """A streaming DataFrame with state outside Spark. Immutable: every method returns another one."""

    def __init__(self, pipeline: Pipeline, sample: DataFrame) -> None:
        self._pipeline = pipeline
        #: What Spark checks operations on: the streaming DataFrame itself before the first stateful stage, an empty
        #: DataFrame of the right schema after it.
        self._sample = sample

    @property
    def sparkSession(self) -> SparkSession:
        return self._sample.sparkSession

    @property
    def schema(self) -> StructType:
        return self._sample.schema

    @property
    def columns(self) -> list[str]:
        return self._sample.columns

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        return self._sample.dtypes

    @property
    def isStreaming(self) -> bool:
        return True

    @property
    def has_state(self) -> bool:
        """Whether any operation so far keeps state."""
        return bool(self._pipeline.segments)

    @property
    def writeStream(self) -> StreamWriter:
        """The writer: sink, output mode, trigger, options, as in PySpark."""
        from anabranch.api.writer import StreamWriter

        return StreamWriter(self._pipeline, self._sample)

    def on(self, source: DataFrame) -> Stream:
        """The same stream, of which Spark has made the stateless part itself. There is no state yet."""
        return Stream(replace(self._pipeline, source=source), source)

    def printSchema(self, level: int | None = None) -> None:
        self._sample.printSchema(level)

    def explain(self) -> None:
        """Print the logical plan. ``query.explain()`` shows physical plan and routes as well."""
        print("\n".join(explain_logical(self._pipeline, None)))

    def stage(self, name: str, parallelism: int | None = None) -> Stream:
        """Start a new named stage, which holds the operations that follow, up to and including a stateful one.

        `parallelism` is the number of Spark partitions that the stage works in.
        """
        check_stage_options(name, parallelism, [stage.name for stage in self._pipeline.stages])
        return type(self)(self._pipeline.open_stage(name, parallelism), self._sample)

    def groupBy(self, *columns: Any) -> GroupedStream:
        """Group by key columns, for an aggregation or a StatefulProcessor."""
        keys = columns[0] if len(columns) == 1 and isinstance(columns[0], list) else columns
        return self._grouped(tuple(self._column_of(key) for key in keys))

    groupby = groupBy

    def agg(self, *aggregates: Any) -> Stream:
        """Aggregate over everything: ``groupBy().agg(...)``."""
        return self.groupBy().agg(*aggregates)

    def dropDuplicates(self, *subset: Any, **keywords: Any) -> Stream:
        """Let only the first row of each key through: of all columns, or of those given, as in PySpark.

        With a watermark, late rows are dropped; if its column is among the key's, keys that it has passed are let go.
        """
        return self._deduplicated("dropDuplicates", subset, keywords)

    drop_duplicates = dropDuplicates

    def dropDuplicatesWithinWatermark(self, *subset: Any, **keywords: Any) -> Stream:
        """As dropDuplicates, but a key is remembered only for the watermark's delay after its first row's time."""
        return self._deduplicated("dropDuplicatesWithinWatermark", subset, keywords)

    def distinct(self) -> Stream:
        """``dropDuplicates()``: rows that differ in some column."""
        return self.dropDuplicates()

    def transform(self, function: Callable[..., Stream], *arguments: Any, **keywords: Any) -> Stream:
        """Chain a function of streams, as DataFrame.transform does."""
        return function(self, *arguments, **keywords)

    def orderBy(self, *columns: Any, **keywords: Any) -> Stream:
        """Sort the result. Needs complete output mode and comes after the last stateful stage."""
        if not self._pipeline.segments:
            raise UnsupportedError("A stream can be sorted only after an aggregation, in complete output mode.")
        return self._apply("orderBy", columns, keywords)

    sort = orderBy

    def withBroadcast(self, **tables: BroadcastTable) -> Stream:
        """Let processors, and joins that follow, read tables that change while the query runs.

        Every task of an epoch sees them with the rows that the epoch brings. Processors get them by name from
        ``handle.getBroadcast(name)``, functions of processInArrow and processInPandas as keyword arguments.
        """
        return with_broadcast(self, tables)

    def join(self, other: Any, on: Any = None, how: str | None = None) -> Stream:
        """Join with another stream, whose rows wait for each other in the state, with a static DataFrame, or with a
        table of ``withBroadcast``, as it is in each epoch."""
        if isinstance(other, BroadcastTable):
            other = table_argument(self, other)
        if _is_stream(other):
            return _join_streams(self, other, on, how)
        _check_static_join(how)
        given = {name: value for name, value in (("on", on), ("how", how)) if value is not None}
        return self._apply("join", (other,), given)

    def toDF(self, *cols: str) -> Any:
        """The same with other column names, as in PySpark. Without any, the result of a batch as a DataFrame."""
        return self._apply("toDF", cols, {}) if cols else self._result()

    def __getitem__(self, item: str) -> Column:
        """A column. Before the first stateful operation it is bound to this stream, as a DataFrame's columns are."""
        return self._column_of(item) if self._pipeline.segments else self._sample[item]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in STATELESS_METHODS:
            return functools.partial(self._call, name)
        if name in REFUSED_METHODS:
            raise UnsupportedError(f"{name} is not available on a stream. {REFUSED_METHODS[name]}")
        if name in self.columns:
            return self[name]
        known = [*STATELESS_METHODS, *SORTING_METHODS, *self.columns, *_STATEFUL_METHODS, "stage", "writeStream"]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"A stream has neither a method nor a column {name!r}.{hint}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *STATELESS_METHODS, *self.columns})

    def _grouped(self, keys: tuple[Column, ...]) -> GroupedStream:
        return GroupedStream(self._pipeline, self._sample, keys)

    def _result(self) -> DataFrame:
        raise UnsupportedError(
            "A stream has no end; write it with writeStream. toDF() without names gives the result of a batch: "
            "anabranch.stream(batch)."
        )

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Stream:
        return self._apply(method, arguments, keywords)

    def _apply(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Stream:
        after_state = bool(self._pipeline.segments)
        if method == "crossJoin" and _is_stream(arguments[0]):
            raise UnsupportedError("Two streams have no end, and cannot be joined row by row. Use join with a key.")
        if method in _UNION_METHODS and (united := _unite_streams(self, method, arguments, keywords)) is not None:
            return united
        plain = tuple(_plain(argument, method, after_state) for argument in arguments)
        named = {name: _plain(value, method, after_state) for name, value in keywords.items()}
        if method == "withWatermark" and after_state:
            raise UnsupportedError("withWatermark comes before the first stateful operation. Move it up.")
        operation = Operation(method, plain, named)
        staged = _spread(self._pipeline.with_stage(str(operation)))
        if not after_state:
            applied = staged.with_operation(operation)
            return type(self)(applied, applied.source)
        return Stream(staged.with_operation(operation), replay(operation, self._sample))

    def _deduplicated(self, method: str, subset: tuple[Any, ...], keywords: dict[str, Any]) -> Stream:
        operation = Operation(method, subset, keywords)
        pipeline = self._pipeline.with_stage(str(operation))
        with bound_columns_explained(method, self._sample.columns):
            stage, sample = build_dedup(pipeline.stages[-1], self._sample, method, subset, keywords)
        return Stream(pipeline.with_stateful(stage, sample, arriving=self._sample.schema), sample)

    def _column_of(self, key: Any) -> Column:
        if isinstance(key, Column):
            return key
        if not isinstance(key, str):
            raise UnsupportedError(f"A column is given by its name or as a Column, not as a {type(key).__name__}.")
        return F.col(key)


def replay(operation: Operation, sample: DataFrame) -> DataFrame:
    """Tries an operation on an empty DataFrame, so that mistakes show when the query is built."""
    with bound_columns_explained(operation.method, sample.columns):
        return operation.apply(sample)


def _spread(pipeline: Pipeline) -> Pipeline:
    """Lets a named, stateless stage with a parallelism of its own start by spreading its rows."""
    stage = pipeline.stages[-1]
    if stage.parallelism is None or len(stage.operations) != 1:
        return pipeline
    return pipeline.with_operation(Operation("repartition", (stage.parallelism,)))


def _plain(value: Any, method: str, after_state: bool) -> Any:
    """Turns an argument that is a stream of ours into the DataFrame that Spark wants."""
    if isinstance(value, Stream):
        if not value.isStreaming:
            return value._sample
        if value._pipeline.segments or after_state:
            raise UnsupportedError(f"{method} of two streams is not supported. Use join or union.")
        return value._pipeline.source
    if after_state and isinstance(value, DataFrame) and value.isStreaming:
        raise UnsupportedError(f"{method} with a second stream is not supported. Use join or union.")
    return value


def _is_stream(other: Any) -> bool:
    """Tells whether the other side of a join or union is a stream, ours or Spark's."""
    return isinstance(other, Stream | DataFrame) and other.isStreaming


def _join_streams(left: Stream, other: Any, on: Any, how: str | None) -> Stream:
    """Joins two streams in a stage whose state holds the rows that wait for a match."""
    right = stream(other)
    with bound_columns_explained("join", [*left.columns, *right.columns]):
        # Without a condition Spark refuses the join in its own words.
        joined = _unbounded(left).join(_unbounded(right), list(on) if isinstance(on, tuple) else on, how)
    pipeline, inputs = left._pipeline.meeting(right._pipeline, _text(right, on, how))
    check_stage_names(pipeline)
    stage, sides = build_join(pipeline.stages[-1], joined)
    read = tuple(each if isinstance(each, int) else sides[side] for side, each in enumerate(inputs))
    return Stream(pipeline.with_stateful(stage, joined, read), joined)


def _unite_streams(left: Stream, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Stream | None:
    """Unites streams of which one has state, as Spark cannot before it hands over rows; returns None for others."""
    given = dict(keywords)
    other, *options = arguments or (given.pop("other", None),)
    if not _is_stream(other) or not (left.has_state or (isinstance(other, Stream) and other.has_state)):
        return None
    right = stream(other)
    union = Operation(method, tuple(options), given)
    sample = Operation(method, (right._sample, *options), given).apply(left._sample)
    pipeline, inputs = left._pipeline.meeting(right._pipeline, f"{method}({', '.join(_before(right))})")
    check_stage_names(pipeline)
    return Stream(pipeline.with_union(union, sample, inputs), sample)


def _unbounded(side: Stream) -> DataFrame:
    """Returns a side of a join as Spark has to see it to judge the join."""
    segments = side._pipeline.segments
    return unbounded(segments[-1]) if segments else side._pipeline.source


def _check_static_join(how: Any) -> None:
    """Refuses the joins that Spark refuses between a stream and static rows."""
    if isinstance(how, str) and how.lower().replace("_", "") in _REFUSED_WITH_STATIC:
        raise UnsupportedError(
            f"A {how} join of a stream with a static DataFrame is not supported: which static rows have no match is "
            "known only at the end of the stream. Use inner, left, left_semi or left_anti."
        )


def _text(right: Stream, on: Any, how: str | None) -> str:
    """Returns the join as explain shows it, with the operations of the other stream before it."""
    listed = on if isinstance(on, list | tuple) else [on]
    columns = ", ".join(sql_of(column) if isinstance(column, Column) else str(column) for column in listed)
    return f"join({', '.join([*_before(right), f'on [{columns}]', how or 'inner'])})"


def _before(right: Stream) -> list[str]:
    """Returns the operations of the other stream, unless it has stages of its own in the query."""
    operations = [operation for stage in right._pipeline.stages for operation in stage.operations]
    return [] if right.has_state else [" -> ".join(operations)]
