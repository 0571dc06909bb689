"""Aggregates over epochs of rows: what Spark gives for all rows at once, and what a query of ours does in the end."""

from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession

from support.oracle import Oracle, Result, differences, names_and_types
from support.streams import EpochFeed

QUANTILES = (0.0, 0.01, 0.25, 0.5, 0.9, 1.0)
Epochs = list[list[tuple[Any, ...]]]


def feed_of(spark: SparkSession, oracle: Oracle, schema: str, epochs: Epochs) -> EpochFeed:
    feed = EpochFeed(spark, oracle.new_folder("input") / "files", schema)
    feed.add(*epochs)
    return feed


def ours(oracle: Oracle, feed: EpochFeed, columns: list[Column]) -> Result:
    """The result of the last epoch, of a query over all of them."""
    found = oracle.ours(lambda rows: rows.groupBy("k").agg(*columns), feed.stream(), "complete")
    return Result({0: found.epochs[max(found.epochs)]}, found.schemas)


def natively(feed: EpochFeed, columns: list[Column]) -> DataFrame:
    """What Spark gives for all rows at once; not as a stream, because its streams refuse some aggregates."""
    return feed.spark.read.schema(feed.schema).parquet(str(feed.folder)).groupBy("k").agg(*columns)


def check(oracle: Oracle, feed: EpochFeed, columns: list[Column]) -> None:
    native = natively(feed, columns)
    expected = Result({0: native.collect()}, [names_and_types(native.schema)])
    found = ours(oracle, feed, columns)
    assert found.schemas == expected.schemas
    assert not differences(expected, found), "\n".join(differences(expected, found))
