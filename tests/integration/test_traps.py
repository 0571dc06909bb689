"""What a naive engine gets wrong: results read twice or never, merged partitions, failing tasks, crowded workers."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import anabranch
from support.counting import (
    RESULT,
    Attempts,
    Tally,
    assert_ran_once,
    counted,
    fail_first_time,
    multiset,
    tallied,
    writer_of,
)
from support.oracle import Oracle, drain
from support.streams import Collector, EpochFeed

# Tasks cannot import a test: what it defines travels with them.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# ----------------------------------------------------------------------------------- what foreachBatch may do


def test_state_is_complete_whatever_a_function_does_with_the_rows(
    counting_feed: EpochFeed,
    oracle: Oracle,
    expected: list[Counter[Any]],
    attempts: Attempts,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found: dict[int, Any] = {}

    def show(rows: DataFrame) -> None:
        rows.show(1)

    def read_first(rows: DataFrame) -> Any:
        return rows.limit(1).collect()

    def filter_all(rows: DataFrame) -> Any:
        return rows.filter(F.lit(False)).collect()

    def ignore(rows: DataFrame) -> None:
        del rows

    def read_twice(rows: DataFrame) -> Any:
        return rows.count(), multiset(rows.collect())

    def write_one_file(rows: DataFrame) -> Any:
        rows.coalesce(1).write.parquet(str(tmp_path / "one"))
        return multiset(rows.sparkSession.read.parquet(str(tmp_path / "one")).collect())

    def sort(rows: DataFrame) -> Any:
        return [row["k"] for row in rows.orderBy(F.desc("k")).collect()]

    def join_itself(rows: DataFrame) -> Any:
        return multiset(rows.join(rows.select("k", F.col("n").alias("again")), "k").drop("again").collect())

    def collect(rows: DataFrame) -> Any:
        return multiset(rows.collect())

    uses = [show, read_first, filter_all, ignore, read_twice, write_one_file, sort, join_itself, collect]

    def misuse(rows: DataFrame, epoch: int) -> None:
        found[epoch] = uses[epoch](rows)

    drain(
        writer_of(counted(anabranch.stream(counting_feed.stream())), tmp_path / "ck", **oracle.options).foreachBatch(
            misuse
        )
    )
    assert found[8] == expected[8]
    assert_ran_once(attempts, 9)
    assert "only showing top 1 row" in capfd.readouterr().out
    assert set(map(tuple, found[1])) < set(expected[1])
    assert (found[2], found[3]) == ([], None)
    assert found[4] == (sum(expected[4].values()), expected[4])
    assert found[5] == expected[5]
    assert found[6] == sorted((key for key, _, _ in expected[6]), reverse=True)
    assert found[7] == expected[7]


def test_a_processor_runs_once_for_a_key_though_its_output_is_read_twice(
    counting_feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    found: list[Counter[Any]] = []

    def read_often(rows: DataFrame, epoch: int) -> None:
        if epoch % 2:
            rows.filter("n > 100").count()
            rows.orderBy("k").limit(3).collect()
        found.append(multiset(rows.collect()))

    stream = tallied(Tally(str(tmp_path / "journal")))(anabranch.stream(counting_feed.stream()))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(read_often))
    assert found == expected
    called = Counter((tmp_path / "journal").read_text().split())
    assert called == Counter(key for epoch in expected for key, _, _ in epoch.elements())
    assert_ran_once(attempts, 9)


# ------------------------------------------------------------------- operations recorded after a stateful stage


def ignore_input(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    del frames
    yield from ()


def take_some(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for frame in frames:
        yield frame.head(1)
        return


RECORDED: dict[str, Callable[[Any], Any]] = {
    "coalesce": lambda rows: rows.coalesce(1),
    "repartition": lambda rows: rows.repartition(5),
    "repartitionByRange": lambda rows: rows.repartitionByRange(3, "n"),
    "cross join": lambda rows: rows.crossJoin(rows.sparkSession.createDataFrame([(1,), (2,)], "i int")).drop("i"),
    "join with nothing": lambda rows: rows.join(rows.sparkSession.createDataFrame([], "k string"), "k"),
    "nothing left": lambda rows: rows.filter(F.lit(False)),
    "a constant": lambda rows: rows.filter(F.col("k").isNull() & F.col("k").isNotNull()),
    "input ignored": lambda rows: rows.mapInPandas(ignore_input, RESULT),
    "input half read": lambda rows: rows.mapInPandas(take_some, RESULT),
}


@pytest.mark.parametrize("after", RECORDED)
def test_operations_after_a_stage_do_not_touch_its_state(
    counting_feed: EpochFeed,
    oracle: Oracle,
    expected: list[Counter[Any]],
    attempts: Attempts,
    tmp_path: Path,
    after: str,
) -> None:
    operations = RECORDED[after]
    collector = Collector()
    first, last = split_feed(counting_feed, tmp_path)
    drain(
        writer_of(operations(counted(anabranch.stream(first.stream()))), tmp_path / "ck", **oracle.options)
        .format("parquet")
        .option("path", str(tmp_path / "out"))
    )
    assert_ran_once(attempts, 2)
    last()
    drain(
        writer_of(counted(anabranch.stream(first.stream())), tmp_path / "ck", **oracle.options).foreachBatch(collector)
    )
    assert multiset(collector.epochs[2]) == expected[2]
    written = multiset(counting_feed.spark.read.schema(RESULT).parquet(str(tmp_path / "out")).collect())
    both = expected[0] + expected[1]
    if after in ("coalesce", "repartition", "repartitionByRange"):
        assert written == both
    elif after == "cross join":
        assert written == both + both
    elif after == "input half read":
        assert written <= both
    else:
        assert not written


def split_feed(whole: EpochFeed, folder: Path) -> tuple[EpochFeed, Callable[[], None]]:
    """A feed of the first two epochs, and how to give it the third."""
    part = EpochFeed(whole.spark, folder / "input", "k string, v long")
    files = sorted(whole.folder.glob("epoch-*.parquet"))[:3]
    for file in files[:2]:
        (part.folder / file.name).write_bytes(file.read_bytes())
    return part, lambda: (part.folder / files[2].name).write_bytes(files[2].read_bytes())


def test_sorting_in_complete_mode_runs_state_logic_once(
    counting_feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    found: dict[int, list[Any]] = {}

    def keep(rows: DataFrame, epoch: int) -> None:
        found[epoch] = [tuple(row) for row in rows.collect()]

    stream = counted(anabranch.stream(counting_feed.stream())).orderBy(F.desc("total"), "k")
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).outputMode("complete").foreachBatch(keep))
    assert found[8] == sorted(expected[8], key=lambda row: (-row[2], row[0]))
    assert_ran_once(attempts, 9)


# ------------------------------------------------------------------------------------------------ bound columns


def test_columns_of_the_streaming_dataframe_work_before_the_first_stage(
    counting_feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    df = counting_feed.stream()
    collector = Collector()
    bound = anabranch.stream(df).filter(df.v >= 0).withColumn("w", df["v"] * 1).groupBy(df.k)
    stream = bound.agg(F.count(df.k).alias("n"), F.sum(df.v).alias("total"))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


@pytest.mark.parametrize(
    "use",
    [
        lambda counts, df: counts.filter(df.v > 1),
        lambda counts, df: counts.select(df.k),
        lambda counts, df: counts.withColumn("x", df["k"]),
        lambda counts, df: counts.groupBy(df.k).transformWithState(Tally("unused"), RESULT, "update", "none"),
        lambda _, df: tallied(Tally("unused"))(anabranch.stream(df)).groupBy("k").agg(F.sum(df.v)),
    ],
    ids=["filter", "select", "withColumn", "groupBy", "agg"],
)
def test_columns_of_the_streaming_dataframe_are_refused_after_it(
    counting_feed: EpochFeed, use: Callable[[Any, Any], Any]
) -> None:
    df = counting_feed.stream()
    with pytest.raises(anabranch.UnsupportedError, match=r"such as df\.x.*Use its name instead"):
        use(counted(anabranch.stream(df)), df)


# ------------------------------------------------------------------------------------------------- failing tasks


def test_an_attempt_that_fails_before_the_stage_changes_nothing_twice(
    counting_feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    marker = tmp_path / "failed"

    def checked(value: Any) -> Any:
        fail_first_time(marker)
        return value

    collector = Collector()
    stream = counted(
        anabranch.stream(counting_feed.stream()).withColumn("v", F.udf(checked, "long", useArrow=False)("v"))
    )
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert marker.exists()
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


def test_an_attempt_that_fails_after_it_was_sealed_changes_nothing_twice(
    counting_feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], attempts: Attempts, tmp_path: Path
) -> None:
    marker = tmp_path / "failed"

    def fail_once(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            fail_first_time(marker)
            yield frame

    collector = Collector()
    stream = counted(anabranch.stream(counting_feed.stream())).mapInPandas(fail_once, RESULT)
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert marker.exists()
    assert max(len(numbers) for numbers in attempts[0].values()) == 2
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


def test_a_processor_that_fails_in_its_first_attempt_changes_nothing_twice(
    counting_feed: EpochFeed, oracle: Oracle, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    collector = Collector()
    stream = tallied(Tally(str(tmp_path / "journal"), fail_first=True))(anabranch.stream(counting_feed.stream()))
    drain(writer_of(stream, tmp_path / "ck", **oracle.options).foreachBatch(collector))
    assert (tmp_path / "journal.failed").exists()
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected
