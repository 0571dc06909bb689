"""Mistakes are told when a query is built or started, with their name and a way out, and leave nothing running."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.core.errors import (
    SettingsError,
    UnsupportedError,
)
from support.streams import EpochFeed

SCHEMA = "k string, v long, flag boolean, many array<int>, pairs map<string, int>, both struct<a: int, b: array<int>>"


@pytest.fixture(scope="module")
def feed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path_factory.mktemp("bad") / "input", SCHEMA)
    feed.add([("a", 1, True, [1], {"x": 1}, (1, [2]))])
    return feed


@pytest.fixture
def rows(feed: EpochFeed) -> anabranch.Stream:
    return anabranch.stream(feed.stream())


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    assert worker_children() == []


def worker_children() -> list[int]:
    """The state workers that this process has started and that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "anabranch" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def counted(rows: Any) -> Any:
    return rows.groupBy("k").count()


def writer_of(stream: Any, checkpoint: Path, **options: Any) -> Any:
    return stream.writeStream.outputMode("update").format("noop").options(checkpointLocation=str(checkpoint), **options)


# -------------------------------------------------------------------------------------------- building a query


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda rows: rows.groupBy("nope").count(), AnalysisException, "nope"),
        (lambda rows: rows.groupBy("k").agg(F.sum("nope")), AnalysisException, "nope"),
        (lambda rows: rows.filter("nope > 1"), AnalysisException, "nope"),
        (lambda rows: counted(rows).select("nope"), AnalysisException, "nope"),
        (lambda rows: rows.groupBy("k").agg(F.sum("flag")), AnalysisException, "flag"),
        (lambda rows: rows.filtr("v > 1"), AttributeError, "'filtr'.* Did you mean 'filter'"),
        (lambda rows: rows.groupBy("k").sums("v"), AttributeError, "'sums'"),
        (lambda rows: rows.groupBy(3), UnsupportedError, "by its name or as a Column, not as a int"),
    ],
)
def test_a_name_that_is_not_there(rows: Any, build: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(rows)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (lambda: F.histogram_numeric("v", F.lit(3)), r"histogram_numeric cannot be merged .*transformWithState"),
        (lambda: F.max_by("v", "v", 2), "max_by cannot be merged"),
        (lambda: F.expr("stddev(distinct v)"), "distinct values, which is supported for count, sum"),
        (lambda: F.expr("listagg(k) within group (order by v)"), "without WITHIN GROUP"),
        (lambda: F.percentile("v", 0.5, F.col("v")), "has a frequency"),
        (lambda: F.max(F.expr("k collate unicode_ci")), "with a collation"),
        (lambda: F.col("k"), "'k' has no aggregate"),
        (lambda: F.explode(F.collect_list("v")), "more than expressions of aggregates"),
        (lambda: "v", "agg takes Columns .* not a str"),
        (lambda: {"v": "measure"}, "measure cannot be merged"),
    ],
)
def test_an_aggregate_that_is_not_supported(rows: Any, column: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        rows.groupBy("k").agg(column())


def test_no_aggregate_at_all(rows: Any) -> None:
    with pytest.raises(UnsupportedError, match="at least one aggregate"):
        rows.groupBy("k").agg()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda: "many", "'many' is of type array<int>, which cannot be a key.*to_json"),
        (lambda: "pairs", "'pairs' is of type map<string,int>"),
        (lambda: "both", "'both.b' is of type array<int>"),
        (lambda: F.make_dt_interval(F.lit(1)).alias("i"), "'i' is of type interval day to second"),
        (lambda: F.expr("k collate unicode_ci").alias("c"), "'c' has the collation UNICODE_CI"),
        (lambda: F.parse_json(F.lit("1")).alias("j"), "'j' is of type variant|GROUP_EXPRESSION_TYPE_IS_NOT_ORDERABLE"),
    ],
)
def test_a_key_of_a_type_that_cannot_be_one(rows: Any, key: Callable[[], Any], message: str) -> None:
    with pytest.raises((UnsupportedError, AnalysisException), match=message):
        rows.groupBy(key()).count()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda rows: rows.groupBy("k", F.upper("k").alias("k")).count(), "Two key columns are called 'k'"),
        (lambda rows: counted(counted(rows)), "aggregation after another aggregation"),
        (lambda rows: rows.groupBy(F.session_window(F.current_timestamp(), "5 s")).count(), "needs another key"),
        (lambda rows: rows.limit(3), "limit is not available.*foreachBatch"),
        (lambda rows: rows.drop("pairs").distinct(), "which cannot be a key"),
        (lambda rows: rows.dropDuplicates(["k", "many"]), "'many' is of type array<int>, which cannot be a key"),
        (lambda rows: rows.groupBy("k").pivot("v"), "pivot is not supported"),
        (lambda rows: rows.groupBy("k").applyInPandas(len, "v int"), "Use transformWithState"),
        (lambda rows: rows.collect(), "collect is not available.*memory sink"),
        (lambda rows: rows.orderBy("k"), "only after an aggregation"),
        (lambda rows: counted(rows).withWatermark("k", "1 s"), "withWatermark comes before"),
        (lambda rows: rows.stage(" "), "name that is not empty"),
        (lambda rows: counted(rows.stage("a")).stage("a"), "a stage 'a' already"),
        (lambda rows: rows.stage("a", parallelism=0), "parallelism of stage 'a' must be between 1"),
        (lambda rows: rows.stage("a", parallelism=10**6), "parallelism of stage 'a'"),
    ],
)
def test_an_operation_that_is_not_supported(rows: Any, build: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(rows)


def test_only_dataframes_can_be_streams_and_only_streaming_ones_can_be_written(spark: SparkSession) -> None:
    with pytest.raises(UnsupportedError, match=r"This is a batch, and writeStream is for streams.*toDF\(\)\.write"):
        _ = anabranch.stream(spark.range(3)).writeStream
    with pytest.raises(UnsupportedError, match="not a str"):
        anabranch.stream("rows")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- settings and sinks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anabranch.worker": 2}, "anabranch.worker in the writer's options. Did you mean anabranch.workers"),
        ({"anabranch.workers": "two"}, "anabranch.workers is 'two' in the writer's options; .* a whole number"),
        ({"anabranch.workers": 0}, "anabranch.workers is 0; it must be between 1 and"),
        ({"anabranch.workers": 5, "anabranch.keyGroups": 4}, "5 workers cannot share 4 key groups"),
        ({"anabranch.parallelism": -1}, "anabranch.parallelism is -1"),
        ({"anabranch.keyGroups": 10**6}, "anabranch.keyGroups is 1000000"),
        ({"anabranch.store": "rockdb"}, "anabranch.store is 'rockdb'.*Did you mean rocksdb"),
        ({"anabranch.routingCache": "perhaps"}, "anabranch.routingCache is 'perhaps'.*true or false"),
        ({"anabranch.drain": False, "anabranch.migration": "eager"}, "drain is false.*migration is eager.*Leave"),
        ({"anabranch.requestTimeout": "soon"}, "anabranch.requestTimeout is 'soon'.*number of seconds"),
        ({"anabranch.requestTimeout": -1}, "anabranch.requestTimeout must be more than 0"),
        ({"anabranch.requestTimeout": "nan"}, "anabranch.requestTimeout must be more than 0"),
        ({"anabranch.workerAddresses": "here"}, "'here' is not host:port"),
        ({"anabranch.workerAddresses": "here:99999"}, "'here:99999' is not host:port"),
        ({"anabranch.workerAddresses": "here:1,[::1]:2"}, "workers at here:1 can be reached.* Set anabranch.token"),
    ],
)
def test_a_setting_that_makes_no_sense(rows: Any, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        writer_of(counted(rows), tmp_path / "ck", **options).start()
    assert not (tmp_path / "ck").exists()


def test_settings_name_the_place_that_they_come_from(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(counted(rows), tmp_path / "ck")
    spark = rows.sparkSession
    spark.conf.set("spark.anabranch.keyGroup", "7")
    try:
        with pytest.raises(
            SettingsError, match=r"keyGroup in the Spark configuration. Did you mean anabranch\.keyGroups"
        ):
            writer.start()
    finally:
        spark.conf.unset("spark.anabranch.keyGroup")
    monkeypatch.setenv("ANABRANCH_WORKERS", "many")
    with pytest.raises(SettingsError, match=r"anabranch\.workers is 'many' in the environment"):
        writer.start()
    monkeypatch.delenv("ANABRANCH_WORKERS")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anabranch.toml").write_text("[anabranch]\nwokers = 3\n")
    with pytest.raises(SettingsError, match=r"wokers in anabranch\.toml. Did you mean anabranch\.workers"):
        writer.start()
    (tmp_path / "anabranch.toml").write_text("[anabranch\n")
    with pytest.raises(SettingsError, match=r"anabranch\.toml cannot be read"):
        writer.start()


@pytest.mark.parametrize(
    ("build", "mode", "message"),
    [
        (counted, "append", "append needs a watermark for an aggregation.*outputMode..update"),
        (counted, "updated", "Unknown output mode 'updated'"),
        (lambda rows: rows, "complete", "complete needs an aggregation"),
        (lambda rows: counted(rows).orderBy("k"), "update", "Sorting needs outputMode..complete"),
        (lambda rows: counted(rows).sort("k"), "update", "Sorting needs outputMode..complete"),
    ],
)
def test_an_output_mode_that_is_not_supported(
    rows: Any, tmp_path: Path, build: Callable[[Any], Any], mode: str, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        writer_of(build(rows), tmp_path / "ck").outputMode(mode).start()
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda writer: writer.format("parqet"), "no sink 'parqet'. Did you mean 'parquet'"),
        (lambda writer: writer.format("kafka"), "no sink 'kafka'.*foreachBatch"),
        (lambda writer: writer.format("parquet"), "parquet sink needs a directory"),
        (lambda writer: writer.format("json").outputMode("complete").option("path", "x"), "complete is not supported"),
        (lambda writer: writer.format("csv").option("path", "x").partitionBy("day"), "no column 'day'"),
        (lambda writer: writer.partitionBy("k"), "partitionBy is for files"),
        (lambda writer: writer.format("memory"), "memory sink needs queryName"),
        (lambda writer: writer.option("numRows", 3), "Unknown option 'numRows' for the noop sink"),
        (lambda writer: writer.format("console").option("numRows", "few"), "numRows of the console sink is 'few'"),
        (lambda writer: writer.format("console").option("rows", 3), "Unknown option 'rows' for the console sink"),
        (lambda writer: writer.foreachBatch(print), "one sink: foreachBatch or format"),
        (lambda writer: writer.foreachBatch("print"), "foreachBatch needs a function"),
        (lambda writer: writer.foreach(print), "one sink: foreach, a format or a table"),
        (
            lambda writer: writer.format("").foreachBatch(print).option("header", True),
            "Unknown option 'header' for the foreachBatch sink. Remove it",
        ),
        (lambda writer: writer.format("").foreach(print).option("path", "x"), "Unknown option 'path' for the foreach"),
        (
            lambda writer: writer.format("").foreach(print).partitionBy("k"),
            "partitionBy is for files, not for the f",
        ),
        (lambda writer: writer.queryName(" "), "name must not be empty"),
        (lambda writer: writer.trigger(continuous="1 s"), "exactly one of processingTime"),
        (lambda writer: writer.trigger(once=True, availableNow=True), "exactly one of processingTime"),
    ],
)
def test_a_sink_that_makes_no_sense(rows: Any, tmp_path: Path, configure: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        configure(writer_of(counted(rows), tmp_path / "ck")).start()
    assert not (tmp_path / "ck").exists()


def test_a_trigger_that_spark_does_not_understand_leaves_nothing_behind(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="every now and then"):
        writer_of(counted(rows), tmp_path / "ck").trigger(processingTime="every now and then").start()


def test_a_query_whose_sink_outlives_it_needs_a_checkpoint(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"option..checkpointLocation"):
        counted(rows).writeStream.outputMode("update").format("json").start(str(tmp_path / "out"))
