"""The references: that the models of the jobs say what Spark itself says."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from soak.driver import source
from soak.jobs import Values, aggregate, process
from soak.places import Places

_WAIT_S = 240
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def rows_by_spark(spark: SparkSession, job: str, places: Places, files_per_epoch: int) -> Counter[Values]:
    """What Spark alone makes of a job's input: by streaming, and where it cannot, by a query over all of it."""
    if job == "aggregate":
        return _by_streaming(spark, aggregate, places, files_per_epoch)
    ledgers = _by_streaming(spark, process, places, files_per_epoch)
    return ledgers if job == "process" else _second_stage(spark, ledgers, files_per_epoch)


def _by_streaming(
    spark: SparkSession, query: Callable[[Any], Any], places: Places, files_per_epoch: int
) -> Counter[Values]:
    """Spark's own state store, in update mode."""
    rows: Counter[Values] = Counter()

    def keep(batch: DataFrame, _: int) -> None:
        rows.update(map(tuple, batch.collect()))

    before = spark.conf.get(_PROVIDER, None)
    spark.conf.set(_PROVIDER, _ROCKSDB)
    try:
        writer = query(source(spark, places, files_per_epoch)).writeStream.outputMode("update").foreachBatch(keep)
        checkpoint = str(places.root / f"native-{uuid.uuid4().hex}")
        started = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        if not started.awaitTermination(_WAIT_S):
            raise TimeoutError(f"Spark's own query took longer than {_WAIT_S} s.")
    finally:
        if before is None:
            spark.conf.unset(_PROVIDER)
        else:
            spark.conf.set(_PROVIDER, before)
    return rows


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
