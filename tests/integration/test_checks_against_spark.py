"""What Spark refuses on streams is refused here too, after stateful stages as before them: Spark itself is asked."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import anabranch
from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark.java import java_class
from anabranch.plan.validation import check_output_mode

OUTPUT = "k long, ts timestamp"
MODES = ("append", "update", "complete")

Build = Callable[[Any], Any]


class Silent(StatefulProcessor):
    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        del key, rows, timerValues
        yield from ()

    def close(self) -> None:
        pass


def silent(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    del key, frames, state
    yield from ()


def group_state(rows: Any, mode: str) -> Any:
    return rows.groupBy("k").applyInPandasWithState(silent, OUTPUT, "n long", mode, "NoTimeout")


STATEFUL: dict[str, Build] = {
    "aggregate": lambda rows: rows.groupBy("k").count().select("k", F.current_timestamp().alias("ts")),
    "windows": lambda rows: (
        rows.groupBy(F.window("ts", "1 second").alias("w"), "k").count().select("k", F.window_time("w").alias("ts"))
    ),
    "dropDuplicates": lambda rows: rows.dropDuplicates(["k"]),
    "distinct": lambda rows: rows.distinct(),
    "process": lambda rows: rows.groupBy("k").transformWithState(Silent(), OUTPUT, "append", "none"),
    "group state append": lambda rows: group_state(rows, "append"),
    "group state update": lambda rows: group_state(rows, "update"),
}
STATELESS: dict[str, Build] = {
    "window function": lambda rows: rows.select("k", F.row_number().over(Window.orderBy("k")).alias("rank")),
    "aggregate function": lambda rows: rows.select(F.count("*").alias("n")),
    "increasing id": lambda rows: rows.withColumn("id", F.monotonically_increasing_id()),
    "union with a batch": lambda rows: rows.union(
        rows.sparkSession.createDataFrame([], "k long, ts timestamp").select("k", "ts")
    ),
    "computed": lambda rows: rows.filter("k > 1").withColumn("more", F.explode(F.array(F.lit(1), F.col("k")))),
    "join with a batch": lambda rows: rows.join(rows.sparkSession.range(3).withColumnRenamed("id", "k"), "k", "left"),
}
#: Where these go different ways, by what comes first, what comes next and the output mode; see docs/compatibility.md.
ALLOWED_HERE = {
    # Every row is final in append mode, whatever comes next.
    *((first, "group state append", "append") for first in ("windows", "group state append")),
    # Every epoch has the whole result.
    *(("windows", what, "complete") for what in STATELESS),
}
REFUSED_HERE = {
    # The result would no longer be complete.
    *((first, second, "complete") for first in ("aggregate", "windows") for second in ("dropDuplicates", "distinct")),
    # Recorded operations keep no state: this one would count the rows of each epoch by themselves.
    *((first, "aggregate function", "update") for first in STATEFUL),
    ("process", "aggregate function", "complete"),
}


def streamed(spark: SparkSession) -> DataFrame:
    rows = spark.readStream.format("rate").load()
    return rows.select(F.col("value").alias("k"), F.col("timestamp").alias("ts")).withWatermark("ts", "1 second")


def allowed_by_spark(rows: DataFrame, mode: str) -> bool:
    checker = java_class("org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker")
    modes = java_class("org.apache.spark.sql.streaming.OutputMode")
    try:
        checker.checkForStreaming(rows._jdf.queryExecution().analyzed(), getattr(modes, mode.capitalize())())
    except PySparkException:
        return False
    return True


def allowed_here(build: Callable[[], Any]) -> set[str]:
    """The output modes in which the query may run."""
    allowed = set()
    with contextlib.suppress(UnsupportedError):
        stream = build()
        for mode in MODES:
            with contextlib.suppress(UnsupportedError):
                check_output_mode(stream._pipeline, mode)
                allowed.add(mode)
    return allowed


def test_what_spark_refuses_after_a_stateful_stage_is_refused(spark: SparkSession) -> None:
    rows = streamed(spark)
    surprises = []
    for first, second in [*product(STATEFUL, STATEFUL), *product(("windows", "process"), STATELESS)]:
        build = {**STATEFUL, **STATELESS}[second]
        native = build(STATEFUL[first](rows))
        found = allowed_here(lambda: build(STATEFUL[first](anabranch.stream(rows))))  # noqa: B023
        for mode in MODES:
            expected = allowed_by_spark(native, mode)
            if (first, second, mode) in ALLOWED_HERE | REFUSED_HERE:
                expected = (first, second, mode) in ALLOWED_HERE
            if (mode in found) is not expected:
                surprises.append(f"{first} > {second} in {mode} mode: {not expected} instead of {expected}")
    assert surprises == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda counts: counts.stage("firsts").groupBy("k").transformWithState(Silent(), OUTPUT, "append", "none"),
            r"Stage firsts comes after an aggregation, which is not supported in output mode update.*second query",
        ),
        (
            lambda counts: counts.groupBy("k").transformWithState(Silent(), OUTPUT, "update", "none"),
            r"Stage stage2 comes after an aggregation.*outputMode\('append'\)",
        ),
        (
            lambda counts: counts.select("k", F.row_number().over(Window.orderBy("count"))),
            r"select\('k'.* after stage stage1 is not supported.*Window function is not supported.*foreachBatch",
        ),
        (
            lambda counts: group_state(counts, "update"),
            r"Stage stage2: applyInPandasWithState in outputMode 'update' is not supported together with an",
        ),
    ],
)
def test_a_refusal_names_the_stage_and_what_to_do(spark: SparkSession, build: Build, message: str) -> None:
    counts = anabranch.stream(streamed(spark)).groupBy("k").count()
    with pytest.raises(UnsupportedError, match=message):
        build(counts).writeStream.outputMode("update").format("noop").start()
