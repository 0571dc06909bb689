"""The input of the benchmarks: made up by Spark itself, cheap, repeatable, and the same for both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

#: Consecutive multiples of the golden ratio are as far from each other as can be.
_GOLDEN = 0.6180339887498949
#: Event time: each epoch has a minute of its own. Its rows fill the first part only, so that nothing of what the
#: watermark decides hangs on a millisecond.
EPOCH_MS, ROWS_MS = 60_000, 45_000
_START_MS = 1_767_225_600_000  # 2026-01-01


@dataclass(frozen=True)
class Size:
    """The size of an epoch. Half of its keys, at least one, may differ in what they do from the other half."""

    keys: int
    rows_per_key: int

    @property
    def rows(self) -> int:
        return self.keys * self.rows_per_key

    @property
    def half(self) -> int:
        return self.keys // 2


def numbers(spark: SparkSession, *, rows: int, partitions: int) -> DataFrame:
    """Make a stream of 0, 1, 2, … in a column `value`: `rows` of them in every epoch, one epoch after the other."""
    return (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows)
        .option("numPartitions", partitions)
        .load()
    )


def all_keys(values: DataFrame, keys: int, *more: Column) -> DataFrame:
    """Make rows that touch every key equally often, with `more` columns: each run of `keys` rows has all keys.

    The order shifts from run to run, so that every key comes from every partition of the source.
    """
    value = F.col("value")
    run = F.expr(f"value div {keys}")
    return values.select(_scattered(value % keys + run, keys).alias("key"), (value % 1000).alias("amount"), *more)


def loaded_keys(values: DataFrame, keys: int, *, rows_per_key: int) -> DataFrame:
    """Make every key once, to load the state; then keys from all over the state, `rows_per_key` rows of each.

    An epoch of n rows then touches n / rows_per_key different keys, however many there are.
    """
    value = F.col("value")
    later = F.expr(f"(value - {keys}) div {rows_per_key}")
    position = F.when(value < keys, value).otherwise(later)
    return values.select(_scattered(position, keys).alias("key"), (value % 1000).alias("amount"))


def event_time(size: Size) -> Column:
    """Give the rows of `numbers` a time: it rises with them, and every epoch starts a minute after the one before."""
    into_epoch = f"value % {size.rows} * {ROWS_MS} div {size.rows}"
    return F.timestamp_millis(F.expr(f"{_START_MS} + value div {size.rows} * {EPOCH_MS} + {into_epoch}")).alias("time")


def timed_keys(values: DataFrame, size: Size) -> DataFrame:
    """Make rows with a time that touch half of the keys of the size, equally often, in both halves of each epoch."""
    return all_keys(values, size.half, event_time(size))


def moving_keys(values: DataFrame, size: Size) -> DataFrame:
    """Make rows with a time, and keys that come and go: half of an epoch's are new, half were new the epoch before."""
    block = F.expr(f"value div {size.rows} + value div {size.half} % 2")
    rows = all_keys(values, size.half, event_time(size), block.alias("block"))
    return rows.select((F.col("key") + F.col("block") * size.half).alias("key"), "amount", "time")


def first_sightings(values: DataFrame, size: Size) -> DataFrame:
    """Make rows with a time and keys that no epoch before had."""
    return _sightings(values, size, F.lit(0))


def second_sightings(values: DataFrame, size: Size) -> DataFrame:
    """Make each key of `first_sightings` again: half of them in the same epoch, half exactly a minute later."""
    return _sightings(values, size, F.col("place") % 2)


def _sightings(values: DataFrame, size: Size, epochs_ago: Column) -> DataFrame:
    place = _scattered(F.col("value"), size.keys).alias("place")
    epoch = F.expr(f"value div {size.rows}").alias("epoch")
    rows = values.select(place, epoch, (F.col("value") % 1000).alias("amount"), event_time(size))
    key = F.col("place") + (F.col("epoch") - epochs_ago) * size.keys
    return rows.select(key.alias("key"), "amount", "time")


def _scattered(position: Column, keys: int) -> Column:
    """Give positions their keys: neighbours are far apart, and `keys` neighbours are all different."""
    return F.pmod(position % keys * multiplier(keys), F.lit(keys)).cast("long")


def multiplier(keys: int) -> int:
    """Return a number near the golden section of `keys` that has no factor in common with it."""
    number = max(1, round(keys * _GOLDEN))
    while math.gcd(number, keys) != 1:
        number += 1
    return number
