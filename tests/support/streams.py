"""Small streams for tests: epochs as lists of rows, and what comes out of a query in each of them."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.conversion import LocalDataToArrowConversion
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

import anabranch
from anabranch.engine.spark.files import fast_log_files


class EpochFeed:
    """A file source that gives one file, and so one list of rows, in each epoch."""

    def __init__(self, spark: SparkSession, folder: Path, schema: StructType | str) -> None:
        self.spark = spark
        self.folder = folder
        self.schema = spark.createDataFrame([], schema).schema
        self._count = 0
        self._latest_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, *epochs: Sequence[Any]) -> None:
        """Append epochs of rows."""
        for rows in epochs:
            staged = self.folder.parent / f"staged-{uuid.uuid4().hex}"
            pq.write_table(self._table(list(rows)), staged)
            # The file source takes files in the order of their times, which must not be the same for two.
            self._latest_s = max(time.time(), self._latest_s + 0.01)
            os.utime(staged, (self._latest_s, self._latest_s))
            staged.rename(self.folder / f"epoch-{self._count:06d}.parquet")
            self._count += 1

    def _table(self, rows: list[Any]) -> pa.Table:
        """Made here: Spark takes a hundred times as long to write a file."""
        if not rows:
            return to_arrow_schema(self.schema, timezone="UTC").empty_table()
        return LocalDataToArrowConversion.convert(rows, self.schema, False)

    def stream(self) -> DataFrame:
        reader = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self.folder))


@contextmanager
def quick_checkpoints(spark: SparkSession) -> Iterator[None]:
    """Spark's own queries that start meanwhile write files as ours do, without ten processes for each, which Hadoop
    runs for all that it asks about a local file; no checksums beside them; and the state of one partition only."""
    cheap = {"spark.sql.streaming.checkpoint.fileChecksum.enabled": "false", "spark.sql.shuffle.partitions": "1"}
    usual = {name: spark.conf.get(name) for name in cheap}
    with fast_log_files(spark, "file:"):
        try:
            for name, value in cheap.items():
                spark.conf.set(name, value)
            yield
        finally:
            for name, value in usual.items():
                spark.conf.set(name, value)


class Collector:
    """A foreachBatch function that keeps each epoch's rows."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[Any]] = {}

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        self.epochs[epoch] = rows.collect()

    def multisets(self) -> list[Counter[str]]:
        """The rows of each epoch that has any, in order, without regard to their order within the epoch."""
        return [Counter(map(_comparable, self.epochs[epoch])) for epoch in sorted(self.epochs) if self.epochs[epoch]]


def run_native(
    query: Callable[[DataFrame], DataFrame], rows: DataFrame, checkpoint: Path, *, mode: str = "update"
) -> Collector:
    """What Spark itself makes of a query over all epochs that are there."""
    collector = Collector()
    writer = query(rows).writeStream.outputMode(mode).foreachBatch(collector)
    with quick_checkpoints(rows.sparkSession):
        started = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert started.awaitTermination(180)
    return collector


def run_anabranch(
    query: Callable[[Any], Any],
    rows: DataFrame,
    checkpoint: Path,
    *,
    mode: str = "update",
    options: dict[str, Any] | None = None,
) -> Collector:
    """What the same query gives on Anabranch."""
    collector = Collector()
    writer = query(anabranch.stream(rows)).writeStream.outputMode(mode).foreachBatch(collector)
    for name, value in (options or {}).items():
        writer = writer.option(name, value)
    started = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert started.awaitTermination(180)
    return collector


def _comparable(row: Any) -> str:
    """Rows as text: floats to twelve digits, because sums may be taken in another order."""
    return repr(_rounded(row))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if value != value else f"{value:.12g}"
    if isinstance(value, tuple | list):
        return tuple(_rounded(item) for item in value)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
