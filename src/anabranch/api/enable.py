"""``anabranch.enable(spark)``: an existing PySpark program keeps its state in state workers, with one more line.

From then on, streaming DataFrames that the session reads are real DataFrames which also remember how Anabranch would do
the same: every operation is applied to both. When a query starts, Anabranch runs it if it has state and if all of it
can be taken over; else Spark does, and a warning names what stood in the way. SQL texts and views may do what needs no
state; what comes after them is followed again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.group import GroupedData
from pyspark.sql.streaming.listener import JStreamingQueryListener, QueryProgressEvent
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter

from anabranch.api.grouped import GroupedStream
from anabranch.api.running import run_of
from anabranch.api.stream import STATELESS_METHODS, Stream, stream
from anabranch.api.writer import MissingCheckpointError
from anabranch.checkpoint.job import SparkCheckpointError
from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark.frames import frame_parts, grouped_parts, plain, stateful_node
from anabranch.engine.spark.java import has_own_jvm

logger = logging.getLogger(__name__)

_ENABLED = "_anabranch_enabled"
#: Methods of sessions that may give streaming DataFrames of views.
_SESSION_METHODS = ("sql", "table")
#: Methods that need no state and that Spark does by itself, as long as they come before the first stateful operation.
_SPARKS_METHODS = ("observe", "repartitionById", "sample", "sampleBy")
#: Methods of DataFrames that give DataFrames, or group them.
_FRAME_METHODS = (
    *STATELESS_METHODS, *_SPARKS_METHODS, "agg", "cube", "distinct", "dropDuplicates", "drop_duplicates",
    "dropDuplicatesWithinWatermark", "exceptAll", "groupBy", "groupby", "groupingSets", "intersect", "intersectAll",
    "lateralJoin", "limit", "offset", "orderBy", "rollup", "sort", "sortWithinPartitions", "subtract",
    "toDF",
)  # fmt: skip
_GROUPED_METHODS = (
    "agg", "apply", "applyInArrow", "applyInPandas", "applyInPandasWithState", "avg", "cogroup", "count", "max", "mean",
    "min", "pivot", "sum", "transformWithState", "transformWithStateInPandas",
)  # fmt: skip
_WRITER_METHODS = (
    "clusterBy", "foreach", "foreachBatch", "format", "option", "options", "outputMode", "partitionBy", "queryName",
    "trigger",
)  # fmt: skip


def enable(spark: SparkSession) -> None:
    """Let queries of this session keep their state in state workers, as far as they can be taken over.

    Settings are those of the session: ``spark.conf.set("spark.anabranch.workers", 4)``. Streaming DataFrames that were
    made before stay with Spark.

    >>> anabranch.enable(spark)  # doctest: +SKIP
    """
    if not isinstance(spark, SparkSession) or not has_own_jvm(spark):
        raise UnsupportedError(
            f"anabranch.enable needs a SparkSession of this process, not a {type(spark).__name__}. "
            "Spark Connect is not supported."
        )
    setattr(spark, _ENABLED, True)
    DataStreamReader._df = _read  # type: ignore[method-assign, assignment]
    JStreamingQueryListener.onQueryProgress = _tell_progress  # type: ignore[method-assign]
    for name in _SESSION_METHODS:
        setattr(spark, name, _followed_view(getattr(type(spark), name).__get__(spark)))


def disable(spark: SparkSession) -> None:
    """Leave streaming DataFrames that this session reads from now on to Spark."""
    setattr(spark, _ENABLED, False)
    for name in _SESSION_METHODS:
        vars(spark).pop(name, None)


def _read(reader: DataStreamReader, jdf: Any) -> DataFrame:
    """Reads a stream, in place of the reader's own method."""
    session = reader._spark
    rows = ClassicDataFrame(jdf, session)
    return _Rows(rows, stream(rows)) if getattr(session, _ENABLED, False) else rows


def _followed_view(native_method: Callable[..., DataFrame]) -> Callable[..., DataFrame]:
    """Wraps a method of a session; what it gives is followed if it is a stream."""

    @functools.wraps(native_method)
    def method(*arguments: Any, **keywords: Any) -> DataFrame:
        rows = native_method(*arguments, **keywords)
        if not isinstance(rows, ClassicDataFrame) or not rows.isStreaming:
            return rows
        found = stateful_node(rows)
        if found is None:
            return _Rows(rows, stream(rows))
        return _Rows(rows, None, f"{found} is in a SQL text or a view. Write it with methods of DataFrames.")

    return method


def _tell_progress(self: JStreamingQueryListener, jevent: Any) -> None:
    """Tells a listener of progress, in place of its own method: ours have state operators, too."""
    event = QueryProgressEvent.fromJObject(jevent)
    run = run_of(str(event.progress.runId))
    self.pylistener.onQueryProgress(event if run is None else QueryProgressEvent(run.completed([event.progress])[0]))


class _Followed:
    """Holds what Anabranch would have in place of something of Spark's; or why it has nothing."""

    def __init__(self, ours: Any, obstacle: str = "") -> None:
        self._ours = ours
        self._obstacle = obstacle

    def _follow(self, native: Any, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Returns what Spark made of a call, with what Anabranch makes of it."""
        ours, obstacle = None, self._obstacle
        if method in _SPARKS_METHODS and self._ours is not None and not self._ours.has_state:
            ours = self._ours
        elif self._ours is not None:
            try:
                call = _method_of(self._ours, method)
                ours = call(*map(_ours_of, arguments), **{k: _ours_of(v) for k, v in keywords.items()})
            except (UnsupportedError, AnalysisException) as error:
                obstacle = f"{method}: {error}"
        if isinstance(ours, Stream) and not ours.has_state:
            ours = ours.on(plain(native))
        if isinstance(native, GroupedData):
            return _Grouped(native, ours, obstacle)
        if isinstance(native, DataFrame) and native.isStreaming:
            return _Rows(native, ours if isinstance(ours, Stream) else None, obstacle)
        return native


class _Rows(ClassicDataFrame, _Followed):
    """A streaming DataFrame."""

    def __init__(self, native: Any, ours: Stream | None, obstacle: str = "") -> None:
        ClassicDataFrame.__init__(self, *frame_parts(native))
        _Followed.__init__(self, ours, obstacle)

    @property
    def writeStream(self) -> DataStreamWriter:
        return _Writer(self)


class _Grouped(GroupedData, _Followed):
    """A streaming DataFrame, grouped."""

    def __init__(self, native: GroupedData, ours: GroupedStream | None, obstacle: str) -> None:
        GroupedData.__init__(self, *grouped_parts(native))
        _Followed.__init__(self, ours, obstacle)


class _Writer(DataStreamWriter):
    """Collects what both writers would have to know, and decides when the query starts."""

    def __init__(self, rows: _Rows) -> None:
        super().__init__(rows)
        self._rows = rows
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def start(self, *arguments: Any, **keywords: Any) -> Any:
        return self._start("start", super().start, arguments, keywords)

    def toTable(self, *arguments: Any, **keywords: Any) -> Any:
        return self._start("toTable", super().toTable, arguments, keywords)

    def _start(
        self, method: str, natively: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        ours, obstacle = self._rows._ours, self._rows._obstacle
        if ours is not None:
            if not ours.has_state:
                return natively(*arguments, **keywords)  # nothing of ours to do
            try:
                writer = ours.writeStream
                for name, given, named in self._calls:
                    writer = _method_of(writer, name)(*given, **named)
                return _method_of(writer, method)(*arguments, **keywords)
            except (UnsupportedError, MissingCheckpointError, SparkCheckpointError) as error:
                obstacle = str(error)
        logger.warning("This query stays with Spark's own state store: %s", obstacle)
        return natively(*arguments, **keywords)


def _method_of(ours: Any, name: str) -> Callable[..., Any]:
    """Returns a method of Anabranch's by its name. Errors inside the method are not taken for a missing one."""
    try:
        method: Callable[..., Any] = getattr(ours, name)
    except AttributeError as error:
        raise UnsupportedError(f"There is no {name} here.") from error
    return method


def _ours_of(value: Any) -> Any:
    """Returns an argument as Anabranch takes it."""
    if isinstance(value, _Rows):
        if value._ours is None:
            raise UnsupportedError(f"its argument cannot be taken over: {value._obstacle}")
        return value._ours
    return value


def _follow_method(base: type, name: str) -> Callable[..., Any]:
    native_method = getattr(base, name)

    @functools.wraps(native_method)
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return self._follow(native_method(self, *arguments, **keywords), name, arguments, keywords)

    return method


def _record_method(name: str) -> Callable[..., Any]:
    native_method = getattr(DataStreamWriter, name)

    @functools.wraps(native_method)
    def method(self: _Writer, *arguments: Any, **keywords: Any) -> _Writer:
        native_method(self, *arguments, **keywords)
        self._calls.append((name, arguments, keywords))
        return self

    return method


for _name in _FRAME_METHODS:
    if hasattr(ClassicDataFrame, _name):
        setattr(_Rows, _name, _follow_method(ClassicDataFrame, _name))
for _name in _GROUPED_METHODS:
    if hasattr(GroupedData, _name):
        setattr(_Grouped, _name, _follow_method(GroupedData, _name))
for _name in _WRITER_METHODS:
    if hasattr(DataStreamWriter, _name):
        setattr(_Writer, _name, _record_method(_name))
