"""The input of the benchmarks: made up by Spark itself, cheap, repeatable, and the same for both sides."""

from __future__ import annotations

import math

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

#: Consecutive multiples of the golden ratio are as far from each other as can be.
_GOLDEN = 0.6180339887498949


def numbers(spark: SparkSession, *, rows: int, partitions: int) -> DataFrame:
    """A stream of 0, 1, 2, … in a column `value`: `rows` of them in every epoch, one epoch after the other."""
    return (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows)
        .option("numPartitions", partitions)
        .load()
    )


def all_keys(values: DataFrame, keys: int) -> DataFrame:
    """Rows that touch every key equally often: each run of `keys` rows is another order of all keys.

    The order shifts from run to run, so that every key comes from every partition of the source.
    """
    value = F.col("value")
    run = F.expr(f"value div {keys}")
    return values.select(_scattered(value % keys + run, keys).alias("key"), (value % 1000).alias("amount"))


def loaded_keys(values: DataFrame, keys: int, *, rows_per_key: int) -> DataFrame:
    """First every key once, to load the state; then keys from all over the state, `rows_per_key` rows of each.

    An epoch of n rows then touches n / rows_per_key different keys, however many there are.
    """
    value = F.col("value")
    later = F.expr(f"(value - {keys}) div {rows_per_key}")
    position = F.when(value < keys, value).otherwise(later)
    return values.select(_scattered(position, keys).alias("key"), (value % 1000).alias("amount"))


def _scattered(position: Column, keys: int) -> Column:
    """A position's key: neighbours are far apart, and `keys` neighbours are all different."""
    return F.pmod(position % keys * multiplier(keys), F.lit(keys)).cast("long")


def multiplier(keys: int) -> int:
    """A number near the golden section of `keys` that has no factor in common with it."""
    number = max(1, round(keys * _GOLDEN))
    while math.gcd(number, keys) != 1:
        number += 1
    return number
