"""The sinks of the result and of late rows, as the user described them; an error for what makes no sense."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, MapType, StructField, StructType, VariantType

from anabranch.core.errors import UnsupportedError
from anabranch.engine.late import ROW, ROW_ID, SIDE, STAGE, WATERMARK, LateFiles, LateFunction, LateKind, LateRows
from anabranch.engine.spark.files import any_exists, exists, qualified
from anabranch.engine.spark.sinks import (
    FILE_FORMATS,
    ConsoleSink,
    FileSink,
    ForeachBatchSink,
    ForeachSink,
    MemorySink,
    NoopSink,
    Sink,
)
from anabranch.plan.pipeline import Pipeline

Function = Callable[[DataFrame, int], Any]

#: The formats of late rows.
_LATE_FORMATS = ("parquet", "json", "csv")
_OTHER_FORMATS = ("memory", "console", "noop")


@dataclass(frozen=True)
class SinkRequest:
    """The sink of a query as the user described it with the writer's methods."""

    format: str
    mode: str
    partition_by: Sequence[str]
    #: Those of the sink, among them perhaps a path.
    options: Mapping[str, str]
    #: The query's.
    name: str | None
    #: Of foreachBatch.
    function: Function | None
    #: Of foreach.
    foreach: Any | None
    #: A table of the catalog.
    table: str | None

    @property
    def path(self) -> str | None:
        return next((value for key, value in self.options.items() if key.lower() == "path"), None)

    @property
    def plain_options(self) -> dict[str, str]:
        return {key: value for key, value in self.options.items() if key.lower() != "path"}


def choose_sink(result: DataFrame, wanted: SinkRequest) -> tuple[Sink, str]:
    """Returns the sink, and a few words that describe it."""
    format, function, foreach = wanted.format, wanted.function, wanted.foreach
    if function is not None:
        if format:
            raise UnsupportedError(f"A query has one sink: foreachBatch or format({format!r}), not both.")
        _no_options(wanted.options, "foreachBatch")
        _no_partitions(wanted, "foreachBatch")
        return ForeachBatchSink(function), f"foreachBatch({getattr(function, '__name__', 'function')})"
    if foreach is not None:
        if format or wanted.table is not None:
            raise UnsupportedError("A query has one sink: foreach, a format or a table, not several of them.")
        _no_options(wanted.options, "foreach")
        _no_partitions(wanted, "foreach")
        return ForeachSink(foreach), f"foreach({getattr(foreach, '__name__', type(foreach).__name__)})"
    if wanted.table is not None:
        return _table_sink(result, wanted, wanted.table)
    chosen = format or result.sparkSession.conf.get("spark.sql.sources.default", "parquet") or "parquet"
    if chosen in FILE_FORMATS:
        return _file_sink(result, wanted, chosen)
    _no_partitions(wanted, chosen)
    if chosen == "memory":
        return _memory_sink(result, wanted)
    if chosen == "console":
        return _console_sink(wanted.plain_options)
    if chosen == "noop":
        _no_options(wanted.plain_options, "noop")
        return NoopSink(), "noop"
    known = [*FILE_FORMATS, *_OTHER_FORMATS]
    close = difflib.get_close_matches(chosen, known, n=1)
    raise UnsupportedError(
        f"There is no sink {chosen!r}.{f' Did you mean {close[0]!r}?' if close else ''} There are {', '.join(known)}, "
        "toTable(...), and foreachBatch(...) for everything else, such as Kafka or a database."
    )


def _file_sink(result: DataFrame, wanted: SinkRequest, format: str) -> tuple[Sink, str]:
    path = wanted.path
    if not path:
        raise UnsupportedError(f"The {format} sink needs a directory: start('directory') or option('path', …).")
    _no_complete(wanted.mode, f"the {format} sink")
    for column in wanted.partition_by:
        if column not in result.columns:
            raise UnsupportedError(f"partitionBy: there is no column {column!r} in the result {result.columns}.")
    place = qualified(result.sparkSession, path, what=f"The directory of the {format} sink", error=UnsupportedError)
    return FileSink(place, format, wanted.partition_by, wanted.plain_options), f"{format} files in {path}"


def _table_sink(result: DataFrame, wanted: SinkRequest, table: str) -> tuple[Sink, str]:
    """Returns the sink of a table of files: its location takes the epochs, as with Spark's own toTable."""
    format, partition_by, options = wanted.format or "parquet", wanted.partition_by, wanted.plain_options
    if format not in FILE_FORMATS:
        raise UnsupportedError(f"toTable writes tables of {', '.join(FILE_FORMATS)}, not of {format!r}.")
    _no_complete(wanted.mode, "a table")
    spark = result.sparkSession
    if not spark.catalog.tableExists(table):
        writer = spark.createDataFrame([], result.schema).write.format(format).options(**options)
        (writer.partitionBy(*partition_by) if partition_by else writer).saveAsTable(table)
    described = {row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE FORMATTED {table}").collect()}
    location, provider = described.get("Location"), (described.get("Provider") or "").lower()
    if not location or provider not in FILE_FORMATS:
        raise UnsupportedError(f"The table {table} is not one of files in {', '.join(FILE_FORMATS)}.")
    # Asked of the catalog: reading the table would make Spark remember which files it has now.
    existing = spark.catalog.listColumns(table)
    partitions = [column.name for column in existing if column.isPartition]
    if partition_by and list(partition_by) != partitions:
        raise UnsupportedError(
            f"The table {table} is partitioned by {partitions}, not by {list(partition_by)}. Leave out "
            "partitionBy, or write to another table."
        )
    # A table has its partition columns at the end.
    fields = sorted(result.schema.fields, key=lambda f: partitions.index(f.name) if f.name in partitions else -1)
    if [(c.name, c.dataType) for c in existing] != [(f.name, f.dataType.simpleString()) for f in fields]:
        columns = ", ".join(f"{column.name}: {column.dataType}" for column in existing)
        raise UnsupportedError(
            f"The table {table} has the columns {columns}, and the query's result has "
            f"{result.schema.simpleString()}. Select the table's columns, or write to another table."
        )
    return FileSink(location, provider, partitions, options), f"table {table}"


def _memory_sink(result: DataFrame, wanted: SinkRequest) -> tuple[Sink, str]:
    _no_options(wanted.plain_options, "memory")
    if not wanted.name:
        raise UnsupportedError("The memory sink needs queryName(…): the name of the table that it fills.")
    sink = MemorySink(wanted.name, complete=wanted.mode == "complete")
    sink.create_view(result.sparkSession, result.schema)
    return sink, f"memory table {wanted.name}"


def _console_sink(options: Mapping[str, str]) -> tuple[Sink, str]:
    lowered = {key.lower(): value for key, value in options.items()}
    _no_options({k: v for k, v in lowered.items() if k not in ("numrows", "truncate")}, "console")
    rows = lowered.get("numrows", "20")
    if not rows.isdecimal():
        raise UnsupportedError(f"The option numRows of the console sink is {rows!r}; it must be a whole number.")
    return ConsoleSink(int(rows), lowered.get("truncate", "true") == "true"), "console"


def _no_options(options: Mapping[str, str], sink: str) -> None:
    if options:
        raise UnsupportedError(f"Unknown option {next(iter(options))!r} for the {sink} sink. Remove it.")


def _no_partitions(wanted: SinkRequest, sink: str) -> None:
    if wanted.partition_by:
        raise UnsupportedError(f"partitionBy is for files, not for the {sink} sink. Remove it.")


def _no_complete(mode: str, sink: str) -> None:
    if mode == "complete":
        raise UnsupportedError(
            f"Output mode complete is not supported for {sink}: every epoch would replace all of it. Use "
            "outputMode('update'), or write the whole result in foreachBatch."
        )


@dataclass(frozen=True)
class LateTarget:
    """The target of late rows as the user wrote it."""

    target: str | os.PathLike[str] | Function
    format: str

    def __post_init__(self) -> None:
        if not callable(self.target) and not (isinstance(self.target, str | os.PathLike) and os.fspath(self.target)):
            raise UnsupportedError(
                "lateRows needs a directory, or a function of (DataFrame, epoch), not "
                f"{'an empty path' if self.target == '' else f'a {type(self.target).__name__}'}."
            )
        if self.format not in _LATE_FORMATS:
            raise UnsupportedError(f"lateRows writes {', '.join(_LATE_FORMATS)}, not {self.format!r}.")

    def __str__(self) -> str:
        if callable(self.target):
            return f"late rows: {getattr(self.target, '__name__', 'function')}"
        return f"late rows: {self.format} files in {os.fspath(self.target)}"


def choose_late_rows(
    pipeline: Pipeline, wanted: LateTarget, *, mode: str, sink: Sink, checkpoint: str, savepoint: str
) -> LateRows:
    """Returns what the query does with late rows; checks it before anything is started."""
    kinds = _kinds(pipeline, mode)
    every = [kind for kinds_of_stage in kinds.values() for kind in kinds_of_stage]
    _check_columns(every)
    names: dict[int, str] = {stage.spec.number: stage.spec.name for stage in pipeline.stateful_stages}
    if callable(wanted.target):
        return LateRows(LateFunction(wanted.target), kinds, names)
    spark = pipeline.source.sparkSession
    path = qualified(spark, os.fspath(wanted.target), what="The directory of lateRows", error=UnsupportedError)
    others = [("checkpoint", qualified(spark, checkpoint, what="The checkpoint", error=UnsupportedError))]
    if isinstance(sink, FileSink):
        others.append(("sink", sink.path))
    _check_apart(path, others)
    if wanted.format == "csv":
        _check_flat(every)
    if not savepoint:
        _check_unused(spark, path, others[0][1])
    return LateRows(LateFiles(path, wanted.format), kinds, names)


def _kinds(pipeline: Pipeline, mode: str) -> dict[int, tuple[LateKind, ...]]:
    if not pipeline.has_watermark:
        raise UnsupportedError(
            "lateRows needs a watermark: without one no row is late. Set it with withWatermark(column, delay) before "
            "the stateful operation, or leave out lateRows."
        )
    kinds: dict[int, tuple[LateKind, ...]] = {}
    for segment in pipeline.segments:
        if (stage := segment.stage) is None:
            continue
        if found := stage.late_kinds(segment.arriving, complete=mode == "complete"):
            kinds[stage.spec.number] = found
    if not kinds:
        raise UnsupportedError(
            f"lateRows: no stage of this query drops late rows in output mode {mode}. Windows and other keys with the "
            "watermark's column do in append and update mode, and so do sessions, dropDuplicates, joins of streams, "
            "and processors with timeMode 'eventTime'. Leave out lateRows."
        )
    return kinds


def _check_columns(kinds: Iterable[LateKind]) -> None:
    """Checks that the late rows of all stages can be one table."""
    known: dict[str, StructField] = {}
    for kind in kinds:
        names = [field.name.lower() for field in kind.schema]
        for field in kind.schema:
            name = field.name.lower()
            if name in (ROW, ROW_ID, STAGE, SIDE, WATERMARK):
                raise UnsupportedError(f"lateRows uses the name {field.name!r} itself. Rename that column before.")
            if names.count(name) > 1:
                raise UnsupportedError(
                    f"lateRows: two columns that arrive at a stage are called {field.name!r}. Rename one of them "
                    "before the stage."
                )
            other = known.setdefault(name, field)
            if other.dataType != field.dataType:
                raise UnsupportedError(
                    f"lateRows: {field.name!r} is a {other.dataType.simpleString()} at one stage or side and a "
                    f"{field.dataType.simpleString()} at another, and late rows are one table. Rename one of them."
                )


def _check_apart(path: str, others: Sequence[tuple[str, str]]) -> None:
    mine = path.rstrip("/") + "/"
    for what, other in others:
        its = other.rstrip("/") + "/"
        if mine.startswith(its) or its.startswith(mine):
            raise UnsupportedError(
                f"lateRows: the directory {path} is that of the {what}, {other}, or one of them is in the other. Give "
                "late rows a directory of their own."
            )


def _check_flat(kinds: Iterable[LateKind]) -> None:
    for kind in kinds:
        for field in kind.schema:
            if isinstance(field.dataType, StructType | ArrayType | MapType | VariantType):
                raise UnsupportedError(
                    f"lateRows: csv cannot hold {field.name!r}, a {field.dataType.simpleString()}. Use parquet or json."
                )


def _check_unused(spark: SparkSession, path: str, checkpoint: str) -> None:
    """Refuses files of another query: one that begins anew would take their epochs for its own."""
    if not exists(spark, f"{checkpoint}/offsets") and any_exists(spark, f"{path}/epoch=*"):
        raise UnsupportedError(
            f"lateRows: {path} has late rows of another query, of which this one would replace epoch after epoch: it "
            "has a new checkpoint. Use another directory, or remove that one."
        )
