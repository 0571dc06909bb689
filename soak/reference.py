"""The references: what Spark itself says, and what state a query has that nobody disturbs."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from soak.driver import source, start, state_of
from soak.jobs import JOBS, Expected, InputRow, Job, Values, plain
from soak.places import Places
from soak.processes import wait_until

_WAIT_S = 240
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def undisturbed(spark: SparkSession, job: Job, epochs: Sequence[Sequence[InputRow]], places: Places) -> Expected:
    """What Spark makes of these epochs, and the state of a query that nobody disturbs. Needs a place of its own."""
    places.write_input(epochs)
    rows = _by_streaming(spark, job, places, files_per_epoch=1)
    query = start(spark, job, places, files_per_epoch=1, options={"anabranch.controlPort": "-1"})
    try:
        query.processAllAvailable()
        state = state_of(query, job)
    finally:
        query.stop()
    return Expected(list(rows.elements()), state)


def rows_by_spark(spark: SparkSession, job: str, places: Places, files_per_epoch: int) -> Counter[Values]:
    """What Spark alone makes of a job's input: by streaming, and where it cannot, by a query over all of it."""
    if job == "two-stages":
        return _second_stage(spark, _by_streaming(spark, JOBS["process"], places, files_per_epoch), files_per_epoch)
    return _by_streaming(spark, JOBS[job], places, files_per_epoch)


def timed_by_spark(spark: SparkSession, job: Job, places: Places, *, until: int) -> tuple[Counter[Values], Path]:
    """What Spark makes of a job that goes by processing time, and the checkpoint with the times that it has logged.

    It goes on without rows until so many rows came out; Spark gives such a query no end of its own.
    """
    rows: Counter[Values] = Counter()
    checkpoint = places.root / f"native-{uuid.uuid4().hex}"

    def keep(batch: DataFrame, _: int) -> None:
        rows.update(map(plain, batch.collect()))

    with _rocksdb(spark):
        writer = job.build(source(spark, places, 1)).writeStream.outputMode(job.mode).foreachBatch(keep)
        started = writer.option("checkpointLocation", str(checkpoint)).start()
        try:
            wait_until(lambda: not started.isActive or rows.total() >= until, _WAIT_S)
        finally:
            started.stop()
    return rows, checkpoint


def _by_streaming(spark: SparkSession, job: Job, places: Places, files_per_epoch: int) -> Counter[Values]:
    """With Spark's own operators and state store."""
    rows: Counter[Values] = Counter()

    def keep(batch: DataFrame, _: int) -> None:
        rows.update(map(plain, batch.collect()))

    with _rocksdb(spark):
        native = (job.native or job.build)(source(spark, places, files_per_epoch))
        writer = native.writeStream.outputMode(job.mode).foreachBatch(keep)
        checkpoint = str(places.root / f"native-{uuid.uuid4().hex}")
        started = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        if not started.awaitTermination(_WAIT_S):
            started.stop()
            raise TimeoutError(f"Spark's own query took longer than {_WAIT_S} s.")
    return rows


@contextmanager
def _rocksdb(spark: SparkSession) -> Iterator[None]:
    """Lets Spark keep state in RocksDB, which its processors need."""
    before = spark.conf.get(_PROVIDER, None)
    spark.conf.set(_PROVIDER, _ROCKSDB)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_PROVIDER)
        else:
            spark.conf.set(_PROVIDER, before)


def _second_stage(spark: SparkSession, ledgers: Counter[Values], files_per_epoch: int) -> Counter[Values]:
    """What the second of two stages makes of the rows of the first, as a query over all epochs at once."""
    columns = "k string, n long, total long, recent string, tags string, last long"
    rows = spark.createDataFrame(list(ledgers.elements()), columns)
    rows = rows.select(
        F.substring("k", 5, 1).alias("bucket"),
        "n",
        "total",
        "last",
        F.floor(F.col("last") / files_per_epoch).alias("epoch"),
    )
    of_epoch = rows.groupBy("bucket", "epoch").agg(
        F.count("*").alias("times"),
        F.sum("n").alias("counts"),
        F.min("total").alias("lowest"),
        F.max("last").alias("last"),
    )
    so_far = Window.partitionBy("bucket").orderBy("epoch")
    result = of_epoch.select(
        "bucket",
        F.sum("times").over(so_far),
        F.sum("counts").over(so_far),
        F.min("lowest").over(so_far),
        F.max("last").over(so_far),
    )
    return Counter(map(tuple, result.collect()))
