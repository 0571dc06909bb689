"""Sinks. Each takes an epoch's rows at most once into account, however often the epoch is run again.

Files and memory go through Spark's own streaming sinks, which remember the last epoch that they took, so that readers
find what they would find behind a plain Structured Streaming query.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from anabranch.checkpoint.paths import log_entry_of
from anabranch.core.errors import EpochError, SettingsError
from anabranch.engine.epoch_plan import run_all_partitions

logger = logging.getLogger(__name__)

#: Spark's classes for the file formats that its streaming file sink can write.
FILE_FORMATS = {
    "parquet": "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat",
    "json": "org.apache.spark.sql.execution.datasources.json.JsonFileFormat",
    "csv": "org.apache.spark.sql.execution.datasources.csv.CSVFileFormat",
    "orc": "org.apache.spark.sql.execution.datasources.orc.OrcFileFormat",
    "text": "org.apache.spark.sql.execution.datasources.text.TextFileFormat",
}

#: Where tasks of foreach find the number of the epoch.
_EPOCH_PROPERTY = "streaming.sql.batchId"
#: What Spark's file sink says when another query has added the same epoch to its log a moment before.
_TAKEN_BY_ANOTHER = "Race while writing batch"


class Sink(Protocol):
    """Where an epoch's rows go."""

    @property
    def reads_once(self) -> bool:
        """Whether a write is certain to read all rows exactly once."""

    def write(self, rows: DataFrame, epoch: int) -> None:
        """Write the rows of an epoch; a second write of the same epoch has no further effect."""


@dataclass
class FileSink:
    """Files in a directory, with Spark's `_spark_metadata` log of the epochs that are complete."""

    path: str
    format: str
    partition_by: Sequence[str]
    options: Mapping[str, str]
    reads_once: bool = True
    #: What to add to an epoch to get its number in the log.
    shift: int = 0
    _sink: Any = field(default=None, init=False)

    def write(self, rows: DataFrame, epoch: int) -> None:
        if self._sink is None:
            self._sink = self._open(rows.sparkSession)
        number = epoch + self.shift
        try:
            self._sink.addBatch(number, rows._jdf)
        except Py4JJavaError as error:
            if _TAKEN_BY_ANOTHER not in str(error.java_exception):
                raise
            # An older driver, not fenced yet, has written the same epoch from the same offsets. Now Spark knows it.
            self._sink.addBatch(number, rows._jdf)

    def announce(self, spark: SparkSession) -> int:
        """Make the directory and Spark's log in it: readers find nothing, as long as there is nothing, but no error.

        Returns the newest entry of the log, -1 if it has none.
        """
        jvm: Any = spark._jvm
        log = jvm.org.apache.hadoop.fs.Path(self.path, "_spark_metadata")
        try:
            files = log.getFileSystem(spark._jsc.hadoopConfiguration())
            files.mkdirs(log)
            entries = [log_entry_of(str(file.getPath().getName())) for file in files.listStatus(log)]
            return max((entry for entry in entries if entry is not None), default=-1)
        except Py4JJavaError as error:
            reason = str(error.java_exception).splitlines()[0]
            raise SettingsError(
                f"The sink's directory {self.path} cannot be made: {reason}. Remove what is in its way, or give "
                "another path."
            ) from None

    def _open(self, spark: SparkSession) -> Any:
        jvm: Any = spark._jvm
        convert = jvm.org.apache.spark.api.python.PythonUtils
        file_format = _class(jvm, FILE_FORMATS[self.format])()
        return jvm.org.apache.spark.sql.execution.streaming.sinks.FileStreamSink(
            spark._jsparkSession,
            self.path,
            file_format,
            convert.toSeq(list(self.partition_by)),
            convert.toScalaMap(dict(self.options)),
        )


@dataclass
class MemorySink:
    """A table in the driver's memory, queryable under the query's name."""

    name: str
    complete: bool
    reads_once: bool = True
    _sink: Any = field(default=None, init=False)

    def create_view(self, spark: SparkSession, schema: StructType) -> None:
        """Make the table known before the first epoch."""
        jvm: Any = spark._jvm
        self._sink = jvm.org.apache.spark.sql.execution.streaming.sources.MemorySink()
        java_schema = spark.createDataFrame([], schema)._jdf.schema()
        attributes = jvm.org.apache.spark.sql.catalyst.types.DataTypeUtils.toAttributes(java_schema)
        plan = jvm.org.apache.spark.sql.execution.streaming.sources.MemoryPlan(self._sink, attributes)
        table = jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan)
        table.createOrReplaceTempView(self.name)

    def write(self, rows: DataFrame, epoch: int) -> None:
        self._sink.write(epoch, self.complete, rows._jdf.collect())


@dataclass
class NoopSink:
    """Runs everything and keeps nothing."""

    reads_once: bool = True

    def write(self, rows: DataFrame, epoch: int) -> None:
        del epoch
        run_all_partitions(rows)


@dataclass
class ConsoleSink:
    """Prints the first rows of each epoch, as Spark's console sink does."""

    row_limit: int = 20
    truncate: bool = True
    reads_once: bool = False

    def write(self, rows: DataFrame, epoch: int) -> None:
        line = "-" * 43
        text = rows._jdf.showString(self.row_limit, 20 if self.truncate else 0, False)
        print(f"{line}\nBatch: {epoch}\n{line}\n{text}", flush=True)


@dataclass
class ForeachBatchSink:
    """The user's own function of (rows, epoch). Exactly once if the function is idempotent for an epoch."""

    function: Callable[[DataFrame, int], Any]
    reads_once: bool = False

    def write(self, rows: DataFrame, epoch: int) -> None:
        try:
            self.function(rows, epoch)
        except Exception as error:
            raise EpochError(
                f"The foreachBatch function failed in epoch {epoch}: {type(error).__name__}: {error}. The epoch is "
                "not committed. Correct the function and start the query again: it resumes with this epoch."
            ) from error


@dataclass
class ForeachSink:
    """The user's own function of a row, or an object with ``process(row)``, in the tasks: Spark's foreach."""

    writer: Any
    #: Its `open` may refuse a partition.
    reads_once: bool = False

    def write(self, rows: DataFrame, epoch: int) -> None:
        context = rows.sparkSession.sparkContext
        announced = context.getLocalProperty(_EPOCH_PROPERTY)
        context.setLocalProperty(_EPOCH_PROPERTY, str(epoch))
        try:
            rows.rdd.mapPartitionsWithIndex(foreach_function(self.writer)).count()
        finally:
            context.setLocalProperty(_EPOCH_PROPERTY, announced)  # type: ignore[arg-type]


def foreach_function(writer: Any) -> Callable[[int, Any], Iterator[Any]]:
    """What a task does with its partition; raises at once if the writer is not one that Spark takes."""
    function: Callable[[int, Any], Iterator[Any]] = DataStreamWriter._construct_foreach_function(writer)
    return function


def _class(jvm: Any, name: str) -> Any:
    found = jvm
    for part in name.split("."):
        found = getattr(found, part)
    return found
