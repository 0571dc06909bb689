"""The input of the operators' benchmark, as a batch: keys come and go epoch by epoch, and what it says is joined is."""

from collections import Counter, defaultdict
from datetime import timedelta
from typing import Any

import pytest
from bench.sources import EPOCH_MS, ROWS_MS, Size, first_sightings, moving_keys, second_sightings, timed_keys
from bench.workloads import WORKLOADS, Workload
from pyspark.sql import DataFrame, SparkSession

EPOCHS = 4
SIZES = [Size(8, 1), Size(6, 3)]


def numbers(spark: SparkSession, size: Size) -> DataFrame:
    return spark.range(EPOCHS * size.rows).toDF("value")


def by_epoch(rows: DataFrame) -> list[list[Any]]:
    """The rows of each epoch, which is a minute. None of them is in the last part of it."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    collected = rows.orderBy("time").collect()
    start = collected[0].time
    for row in collected:
        epoch, into_epoch = divmod(row.time - start, timedelta(milliseconds=EPOCH_MS))
        assert into_epoch < timedelta(milliseconds=ROWS_MS)
        found[epoch].append(row)
    assert sorted(found) == list(range(EPOCHS))
    return [found[epoch] for epoch in range(EPOCHS)]


@pytest.mark.parametrize("size", SIZES)
def test_every_key_is_in_both_halves_of_each_epoch(spark: SparkSession, size: Size) -> None:
    for rows in by_epoch(timed_keys(numbers(spark, size), size)):
        assert len(rows) == size.rows
        limit = rows[0].time + timedelta(milliseconds=ROWS_MS / 2)
        for half in ([row for row in rows if row.time < limit], [row for row in rows if row.time >= limit]):
            assert Counter(row.key for row in half) == dict.fromkeys(range(size.half), size.rows_per_key)


@pytest.mark.parametrize("size", SIZES)
def test_half_of_the_keys_are_new_and_the_others_were_new_before(spark: SparkSession, size: Size) -> None:
    known: set[int] = set()
    fresh: set[int] = set()
    for rows in by_epoch(moving_keys(numbers(spark, size), size)):
        counts = Counter(row.key for row in rows)
        assert set(counts.values()) == {size.rows_per_key}
        assert len(counts) == size.keys
        if known:
            assert set(counts) & known == fresh
        # In the first epoch, those that are new only seem to be: no epoch was before.
        fresh = set(sorted(set(counts) - known)[-size.half :])
        assert len(fresh) == size.half
        known |= set(counts)


@pytest.mark.parametrize("size", SIZES[:1])
def test_each_first_sighting_has_one_second_sighting_within_a_minute(spark: SparkSession, size: Size) -> None:
    values = numbers(spark, size)
    firsts, seconds = by_epoch(first_sightings(values, size)), by_epoch(second_sightings(values, size))
    assert len({row.key for rows in firsts for row in rows}) == EPOCHS * size.keys
    for epoch, rows in enumerate(seconds):
        came = [{row.key for row in firsts[e]} for e in (epoch, epoch - 1) if e >= 0]
        assert [len(keys & {row.key for row in rows}) for keys in came] == [size.half] * len(came)
    (join,) = [workload for workload in WORKLOADS if workload.family == "joins"]
    assert results(join, values, size) == EPOCHS * size.keys - size.half


def results(workload: Workload, values: DataFrame, size: Size) -> int:
    flow = workload.flow(lambda: values, size)
    return int(flow.build(flow.rows).count())
