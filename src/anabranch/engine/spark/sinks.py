"""Sinks. Each takes an epoch's rows at most once into account, however often the epoch is run again.

Files and memory go through Spark's own streaming sinks, which remember the last epoch that they took, so that readers
find what they would find behind a plain Structured Streaming query.

Spark's file sink writes one entry of its log for each batch, counts on having all of them when it compacts the log, and
takes no batch that it has already. So the entries of a job follow the one that was the last before its first epoch
there: from 0 in a new directory, although the first epoch of a job that starts from a savepoint is another; and after
those of others in a directory that has a log. How far numbers are from epochs is written down before the first epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.paths import log_entry_of
from anabranch.checkpoint.rewind import pending
from anabranch.checkpoint.sparklog import last_planned_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import EpochError, SettingsError
from anabranch.core.ids import Epoch
from anabranch.engine.spark.files import make_folder
from anabranch.engine.spark.frames import run_all_partitions, shown
from anabranch.engine.spark.java import JvmError, error_text, java_class

logger = logging.getLogger(__name__)

#: Spark's classes for the file formats that its streaming file sink can write.
FILE_FORMATS = {
    "parquet": "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat",
    "json": "org.apache.spark.sql.execution.datasources.json.JsonFileFormat",
    "csv": "org.apache.spark.sql.execution.datasources.csv.CSVFileFormat",
    "orc": "org.apache.spark.sql.execution.datasources.orc.OrcFileFormat",
    "text": "org.apache.spark.sql.execution.datasources.text.TextFileFormat",
}

#: The folder in which a file sink of Spark's keeps its log.
_LOG = "_spark_metadata"
#: Where tasks of foreach find the number of the epoch.
_EPOCH_PROPERTY = "streaming.sql.batchId"
#: What Spark's file sink says when another query has added the same epoch to its log a moment before.
_TAKEN_BY_ANOTHER = "Race while writing batch"


class Sink(Protocol):
    """Takes the rows of each epoch."""

    @property
    def reads_once(self) -> bool:
        """Tells whether a write is certain to read all rows exactly once."""

    def write(self, rows: DataFrame, epoch: int) -> None:
        """Writes the rows of an epoch; a second write of the same epoch has no further effect."""


@dataclass
class FileSink:
    """Writes files into a directory, with Spark's `_spark_metadata` log of the epochs that are complete."""

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
        except JvmError as error:
            if _TAKEN_BY_ANOTHER not in str(error.java_exception):
                raise
            # An older driver, not fenced yet, has written the same epoch from the same offsets. Now Spark knows it.
            self._sink.addBatch(number, rows._jdf)

    def begin(self, spark: SparkSession, storage: Storage, spark_log: Storage, committed: Epoch) -> None:
        """Makes the directory, so that readers find an empty one at first, and finds the numbers of epochs in its log.

        The job resumes after the epoch ``committed``.
        """
        try:
            entries = [log_entry_of(name) for name in make_folder(spark, f"{self.path.rstrip('/')}/{_LOG}")]
        except JvmError as error:
            raise SettingsError(
                f"The sink's directory {self.path} cannot be made: {error_text(error)}. Remove what is in its way, or "
                "give another path."
            ) from None
        latest = max((entry for entry in entries if entry is not None), default=-1)
        self.shift = shift_of(storage, spark_log, self.path, committed=committed, latest=latest)

    def _open(self, spark: SparkSession) -> Any:
        jvm: Any = spark._jvm
        convert = jvm.org.apache.spark.api.python.PythonUtils
        file_format = java_class(FILE_FORMATS[self.format])()
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
        """Makes the table known before the first epoch."""
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
        text = shown(rows, row_limit=self.row_limit, truncate=self.truncate)
        print(f"{line}\nBatch: {epoch}\n{line}\n{text}", flush=True)


@dataclass
class ForeachBatchSink:
    """Calls the user's own function of (rows, epoch). Exactly once if the function is idempotent for an epoch."""

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
    """Returns what a task does with its partition; raises at once if the writer is not one that Spark takes."""
    function: Callable[[int, Any], Iterator[Any]] = DataStreamWriter._construct_foreach_function(writer)
    return function


def shift_of(storage: Storage, spark: Storage, place: str, *, committed: Epoch, latest: int) -> int:
    """Returns what to add to an epoch to get its number in the log of a sink, the same as long as the job lasts.

    ``committed`` is the epoch that the job resumes after, ``latest`` the newest entry that the log has; -1: none.
    """
    path = paths.sink_file(place)
    found = storage.read_if_present(path)
    if found is None:
        shift = _new_shift(spark, committed, latest)
        storage.create(path, documents.encode({"place": place, "shift": shift}))
        found = storage.read(path)  # of two drivers at once, the older may have been faster
    content = documents.decode(storage, path, found)
    try:
        return int(content["shift"])
    except (KeyError, TypeError, ValueError) as error:
        raise documents.unexpected(storage, path, repr(error)) from error


def _new_shift(spark: Storage, committed: Epoch, latest: int) -> int:
    has_run = last_planned_epoch(spark) > committed or bool(pending(spark))
    # Epochs of a job that has run here before, which are repeated, are in the log under their own numbers.
    return 0 if has_run and latest >= committed else latest - committed
