"""Choosing a sink from what the user wrote, with an error for every combination that makes no sense."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from anabranch.api.locations import qualified
from anabranch.core.errors import UnsupportedError
from anabranch.engine.sinks import (
    FILE_FORMATS,
    ConsoleSink,
    FileSink,
    ForeachBatchSink,
    ForeachSink,
    MemorySink,
    NoopSink,
    Sink,
)

_OTHER_FORMATS = ("memory", "console", "noop")


@dataclass(frozen=True)
class TablePlace:
    """A table of the catalog as a sink."""

    name: str


def choose_sink(
    result: DataFrame,
    *,
    format: str,
    function: Callable[[DataFrame, int], Any] | None,
    foreach: Any | None,
    table: TablePlace | None,
    name: str | None,
    mode: str,
    partition_by: Sequence[str],
    options: Mapping[str, str],
) -> tuple[Sink, str]:
    """The sink, and a few words about it."""
    plain = {key: value for key, value in options.items() if key.lower() != "path"}
    path = next((value for key, value in options.items() if key.lower() == "path"), None)
    if function is not None:
        if format:
            raise UnsupportedError(f"A query has one sink: foreachBatch or format({format!r}), not both.")
        _no_options(options, "foreachBatch")
        _no_partitions(partition_by, "foreachBatch")
        return ForeachBatchSink(function), f"foreachBatch({getattr(function, '__name__', 'function')})"
    if foreach is not None:
        if format or table is not None:
            raise UnsupportedError("A query has one sink: foreach, a format or a table, not several of them.")
        _no_options(options, "foreach")
        _no_partitions(partition_by, "foreach")
        return ForeachSink(foreach), f"foreach({getattr(foreach, '__name__', type(foreach).__name__)})"
    if table is not None:
        return _table_sink(result, table, format or "parquet", mode, partition_by, plain)
    chosen = format or result.sparkSession.conf.get("spark.sql.sources.default", "parquet") or "parquet"
    if chosen in FILE_FORMATS:
        return _file_sink(result, chosen, path, mode, partition_by, plain)
    _no_partitions(partition_by, chosen)
    if chosen == "memory":
        return _memory_sink(result, name, mode, plain)
    if chosen == "console":
        return _console_sink(plain)
    if chosen == "noop":
        _no_options(plain, "noop")
        return NoopSink(), "noop"
    known = [*FILE_FORMATS, *_OTHER_FORMATS]
    close = difflib.get_close_matches(chosen, known, n=1)
    raise UnsupportedError(
        f"There is no sink {chosen!r}.{f' Did you mean {close[0]!r}?' if close else ''} There are {', '.join(known)}, "
        "toTable(...), and foreachBatch(...) for everything else, such as Kafka or a database."
    )


def _file_sink(
    result: DataFrame,
    format: str,
    path: str | None,
    mode: str,
    partition_by: Sequence[str],
    options: Mapping[str, str],
) -> tuple[Sink, str]:
    if not path:
        raise UnsupportedError(f"The {format} sink needs a directory: start('directory') or option('path', …).")
    _no_complete(mode, f"the {format} sink")
    for column in partition_by:
        if column not in result.columns:
            raise UnsupportedError(f"partitionBy: there is no column {column!r} in the result {result.columns}.")
    place = qualified(result.sparkSession, path, what=f"The directory of the {format} sink", error=UnsupportedError)
    return FileSink(place, format, partition_by, options), f"{format} files in {path}"


def _table_sink(
    result: DataFrame,
    table: TablePlace,
    format: str,
    mode: str,
    partition_by: Sequence[str],
    options: Mapping[str, str],
) -> tuple[Sink, str]:
    """Tables of files: their location takes the epochs, as with Spark's own toTable."""
    if format not in FILE_FORMATS:
        raise UnsupportedError(f"toTable writes tables of {', '.join(FILE_FORMATS)}, not of {format!r}.")
    _no_complete(mode, "a table")
    spark = result.sparkSession
    if not spark.catalog.tableExists(table.name):
        writer = spark.createDataFrame([], result.schema).write.format(format).options(**options)
        (writer.partitionBy(*partition_by) if partition_by else writer).saveAsTable(table.name)
    described = {row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE FORMATTED {table.name}").collect()}
    location, provider = described.get("Location"), (described.get("Provider") or "").lower()
    if not location or provider not in FILE_FORMATS:
        raise UnsupportedError(f"The table {table.name} is not one of files in {', '.join(FILE_FORMATS)}.")
    # Asked of the catalog: reading the table would make Spark remember which files it has now.
    existing = spark.catalog.listColumns(table.name)
    partitions = [column.name for column in existing if column.isPartition]
    if partition_by and list(partition_by) != partitions:
        raise UnsupportedError(
            f"The table {table.name} is partitioned by {partitions}, not by {list(partition_by)}. Leave out "
            "partitionBy, or write to another table."
        )
    # A table has its partition columns at the end.
    wanted = sorted(result.schema.fields, key=lambda f: partitions.index(f.name) if f.name in partitions else -1)
    if [(c.name, c.dataType) for c in existing] != [(f.name, f.dataType.simpleString()) for f in wanted]:
        columns = ", ".join(f"{column.name}: {column.dataType}" for column in existing)
        raise UnsupportedError(
            f"The table {table.name} has the columns {columns}, and the query's result has "
            f"{result.schema.simpleString()}. Select the table's columns, or write to another table."
        )
    return FileSink(location, provider, partitions, options), f"table {table.name}"


def _memory_sink(result: DataFrame, name: str | None, mode: str, options: Mapping[str, str]) -> tuple[Sink, str]:
    _no_options(options, "memory")
    if not name:
        raise UnsupportedError("The memory sink needs queryName(…): the name of the table that it fills.")
    sink = MemorySink(name, complete=mode == "complete")
    sink.create_view(result.sparkSession, result.schema)
    return sink, f"memory table {name}"


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


def _no_partitions(partition_by: Sequence[str], sink: str) -> None:
    if partition_by:
        raise UnsupportedError(f"partitionBy is for files, not for the {sink} sink. Remove it.")


def _no_complete(mode: str, sink: str) -> None:
    if mode == "complete":
        raise UnsupportedError(
            f"Output mode complete is not supported for {sink}: every epoch would replace all of it. Use "
            "outputMode('update'), or write the whole result in foreachBatch."
        )
