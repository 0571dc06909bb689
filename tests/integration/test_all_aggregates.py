"""Every aggregate that can be merged, alone and in expressions: the rows that Spark gives, in every epoch."""

import datetime as dt
import math
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import Any

import pytest
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

import anabranch
from support.oracle import Oracle, Result, differences, names_and_types, run
from support.streams import EpochFeed

COLUMNS = {
    "k": "string",
    "u": "long",
    "x": "long",
    "i": "int",
    "small": "byte",
    "d": "double",
    "f": "float",
    "m": "decimal(20,4)",
    "s": "string",
    "b": "boolean",
    "t": "timestamp",
    "day": "date",
    "many": "array<int>",
    "pair": "struct<a: double, b: array<string>>",
    "h": "binary",
    "theta": "binary",
    "kll": "binary",
}
DDL = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())
Columns = Callable[[], list[Column]]
_DOUBLES = [0.0, -0.0, 1.5, -2.25, 8.125, 100.0, 3.0]
_ODD = [0.0, math.nan, 1.0]


@pytest.fixture(scope="module")
def epochs(spark: SparkSession) -> list[list[tuple[Any, ...]]]:
    """Rows of few keys; of "nothing" all values are null, and "late" comes in the last epoch only."""
    sketches = [
        spark.range(first, first + 40).selectExpr(
            "hll_sketch_agg(id)", "theta_sketch_agg(id, 8)", "kll_sketch_agg_double(cast(id as double))"
        ).first()
        for first in (0, 20, 1000)
    ]  # fmt: skip
    chance = random.Random(7)

    def row(number: int, epoch: int) -> tuple[Any, ...]:
        keys = ["a", "b", None, "nothing", *(["late"] if epoch > 1 else [])]
        key = chance.choice(keys)
        pick = chance.choice
        values = (
            number, chance.randrange(-40, 40), pick([1, 1, 2, 3]), pick([1, 2, 7]), pick(_DOUBLES), pick(_DOUBLES),
            Decimal(chance.randrange(-(10**6), 10**6)) / 100, pick(["", "x", "y", "zz", "日本"]), pick([True, False]),
            dt.datetime(2024, 1, 1) + dt.timedelta(seconds=chance.randrange(10**6)),
            dt.date(2024, 1, 1) + dt.timedelta(days=chance.randrange(90)),
            pick([[], [1], [1, None], [1, 2], [3]]), (pick(_ODD), pick([None, ["p"], ["p", "q"]])),
            *map(bytes, pick(sketches)),
        )  # fmt: skip
        return key, *(None if key == "nothing" or chance.random() < 0.1 else value for value in values)

    return [[row(100 * epoch + number, epoch) for number in range(48)] for epoch in range(3)]


def exact() -> list[Column]:
    return [
        F.count("*"), F.count("x", ), F.count_distinct("i"), F.count_distinct("i", "s", "b"), F.sum_distinct("i"),
        F.expr("avg(distinct m)"), F.expr("sum(distinct d)"), F.count_distinct("d"), F.count_distinct("pair"),
        F.expr("min(distinct i)"), F.sum("x"), F.try_sum("x"), F.try_sum("m"), F.try_avg("m"), F.try_avg("x"),
        F.avg("m"), F.min("pair"), F.max("pair"), F.min("many"), F.max("many"), F.max("t"), F.min("day"), F.max("f"),
        F.product("i"), F.bool_and("b"), F.bool_or("b"), F.every("b"), F.some("b"), F.count_if("b"),
        F.bit_and("x"), F.bit_or("small"), F.bit_xor("i"),
        F.min_by("s", "u"), F.max_by("pair", "u"), F.expr("max_by(u, struct(d, u))"),
        F.sort_array(F.collect_list("s")).alias("list"), F.sort_array(F.collect_set("d")),
        F.sort_array(F.array_agg("i")),
        F.sort_array(F.collect_set("many")).alias("arrays"), F.sort_array(F.expr("collect_list(distinct s)")),
        F.expr("mode(i, true)"), F.expr("mode() within group (order by s desc)"), F.median("d"),
        F.percentile("x", 0.3), F.percentile("m", [0.0, 0.25, 1.0]), F.expr("sum(make_dt_interval(0, x))"),
        F.expr("percentile_cont(0.9) within group (order by x desc)"),
        F.expr("percentile_disc(0.4) within group (order by x)"), F.length(F.listagg("s", F.lit("; "))),
    ]  # fmt: skip


def computed() -> list[Column]:
    both = [F.corr, F.covar_pop, F.covar_samp, F.regr_avgx, F.regr_avgy, F.regr_count, F.regr_intercept, F.regr_r2]
    both += [F.regr_slope, F.regr_sxx, F.regr_sxy, F.regr_syy]
    one = [F.variance, F.var_samp, F.var_pop, F.stddev, F.stddev_pop, F.stddev_samp, F.skewness, F.kurtosis]
    return [
        # Times pi, so that no result lies where it may be rounded either way.
        *[F.round(function("d", "x") * math.pi, 6) for function in both],
        *[F.round(function(name) * math.pi, 6) for function in one for name in ("x", "d")],
        F.stddev("m").isNull(),
        (F.sum("x") / F.count("d")).alias("ratio"),
        (F.max("x") - F.min("x")).alias("range"),
        F.round(F.avg("m"), 1),
        F.when(F.sum("x") > F.lit(0), F.lit("more")).otherwise(F.max("s")).alias("word"),
        F.expr("sum(x) + count(*)"),
        F.expr("nullif(sum(x), 0) as no_zero"),
        F.sum("x").cast("string"),
        F.concat(F.col("k"), F.lit("="), F.max("s")).alias("with_key"),
        F.struct(F.min("x").alias("low"), F.max("x").alias("high")).alias("bounds"),
        F.expr("sum(x) filter (where b)"),
        F.expr("count(*) filter (where i > 1)"),
        F.expr("count(distinct s) filter (where b)"),
        F.expr("sort_array(collect_list(s) filter (where not b))"),
        F.expr("max(struct(x, u)).u"),
        F.sum(F.col("x") * 2 + 1),
        F.sum(F.when(F.col("b"), F.col("x"))),
    ]


def synopses() -> list[Column]:
    def some(quantile: Column) -> Column:
        """Spark fails on quantiles of nothing."""
        return F.when(F.count("x") > 0, quantile)

    return [
        F.approx_count_distinct("x"), F.approx_count_distinct("s", 0.01), F.approx_count_distinct("d"),
        F.round(F.hll_sketch_estimate(F.hll_sketch_agg("x"))), F.hll_sketch_estimate(F.hll_union_agg("h")),
        F.theta_sketch_estimate(F.theta_sketch_agg("s")), F.theta_sketch_estimate(F.theta_union_agg("theta")),
        F.theta_sketch_estimate(F.theta_intersection_agg("theta")).alias("common"),
        some(F.kll_sketch_get_quantile_bigint(F.kll_sketch_agg_bigint("x"), F.lit(0.3))),
        some(F.kll_sketch_get_quantile_double(F.kll_sketch_agg_double("d", 400), F.array(F.lit(0.1), F.lit(0.9)))),
        some(F.kll_sketch_get_quantile_float(F.kll_sketch_agg_float("f"), F.lit(0.5))),
        F.kll_sketch_get_n_double(F.kll_merge_agg_double("kll")),
        F.percentile_approx("x", 0.5), F.percentile_approx("m", [0.1, 0.9], 100), F.approx_percentile("t", 0.7),
        F.percentile_approx("day", 0.5), F.percentile_approx("i", [0.5]),
        F.expr("transform(approx_top_k(i, 1, 100), e -> e.item)"),
        F.expr("sort_array(approx_top_k(s, 10, 64))"),
        F.count_min_sketch("x", F.lit(0.2), F.lit(0.8), F.lit(3)),
        F.bitmap_count(F.bitmap_construct_agg(F.col("x") + 50)), F.bitmap_or_agg(F.lit(bytes(4096))).alias("bits"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def spark_gives(spark: SparkSession, epochs: list[list[tuple[Any, ...]]]) -> Callable[[Columns], Result]:
    """What Spark makes of all rows up to each epoch, in one query for all epochs.

    Not as a stream, because Spark's streams refuse aggregates over distinct values.
    """

    @cache
    def result(columns: Columns) -> Result:
        rows = [(number, *row) for number in range(len(epochs)) for epoch in epochs[: number + 1] for row in epoch]
        found = spark.createDataFrame(rows, f"epoch int, {DDL}").groupBy("epoch", "k").agg(*columns())
        of_epochs: dict[int, list[Any]] = {number: [] for number in range(len(epochs))}
        for epoch, *row in found.collect():
            of_epochs[epoch].append(tuple(row))
        return Result(of_epochs, [names_and_types(found.schema)[1:]])

    return result


@pytest.mark.parametrize(
    ("columns", "mode"),
    [
        (exact, "update"),
        # The same values as in update mode, and the mode that synopses have.
        pytest.param(exact, "complete", marks=pytest.mark.slow),
        (computed, "update"),
        (synopses, "complete"),
    ],
)
def test_aggregates(
    spark: SparkSession,
    oracle: Oracle,
    epochs: list[list[tuple[Any, ...]]],
    spark_gives: Callable[[Columns], Result],
    columns: Columns,
    mode: str,
) -> None:
    """Ours stops after two epochs, and goes on from its checkpoint."""
    feed = EpochFeed(spark, oracle.new_folder("input") / "files", DDL)
    checkpoint = oracle.new_folder("ours")
    ours = Result()
    for part in (epochs[:2], epochs[2:]):
        feed.add(*part)
        stream = anabranch.stream(feed.stream()).groupBy("k").agg(*columns())
        found = run(stream.writeStream.options(**oracle.options), checkpoint, mode)
        ours.epochs.update(found.epochs)
        assert found.schemas == [names_and_types(stream.schema)]
        ours.schemas = found.schemas
    native = spark_gives(columns)
    if mode == "update":
        keys = [{row[0] for row in rows} for rows in epochs]
        shown = {epoch: [row for row in rows if row[0] in keys[epoch]] for epoch, rows in native.epochs.items()}
        native = Result(shown, native.schemas)
    assert ours.schemas == native.schemas
    assert not differences(native, ours), "\n".join(differences(native, ours))


def test_first_and_last_are_of_the_first_and_last_epoch(spark: SparkSession, oracle: Oracle) -> None:
    feed = EpochFeed(spark, oracle.new_folder("input") / "files", "k string, v int")
    feed.add([("a", None), ("b", 1)], [("a", 2), ("b", 2), ("c", 3)], [("a", 4), ("b", None), ("c", 5)])
    columns = [F.first("v"), F.last("v"), F.first("v", True), F.last("v", True), F.any_value("v", True)]
    found = oracle.ours(lambda rows: rows.groupBy("k").agg(*columns), feed.stream(), "complete")
    last = {row[0]: tuple(row)[1:] for row in found.epochs[2]}
    assert last == {"a": (None, 4, 2, 4, 2), "b": (1, None, 1, 2, 1), "c": (3, 5, 3, 5, 3)}


def test_errors_of_synopses_are_within_their_bounds(spark: SparkSession, oracle: Oracle) -> None:
    """100,000 values in four epochs: all different in x, and in z the more frequent the smaller."""
    folder = oracle.new_folder("input") / "files"
    feed = EpochFeed(spark, folder, "x long, z long")
    chance = random.Random(3)
    values = [(x, int(1 / (chance.random() + 1e-4))) for x in range(100_000)]
    chance.shuffle(values)
    feed.add(*[values[first : first + 25_000] for first in range(0, 100_000, 25_000)])
    quantiles = F.array(*[F.lit(p) for p in (0.01, 0.5, 0.99)])
    columns = [
        F.approx_count_distinct("x"),
        F.hll_sketch_estimate(F.hll_sketch_agg("x")),
        F.theta_sketch_estimate(F.theta_sketch_agg("x")),
        F.kll_sketch_get_quantile_bigint(F.kll_sketch_agg_bigint("x"), quantiles),
        F.kll_sketch_get_quantile_double(F.kll_sketch_agg_double(F.col("x").cast("double")), quantiles),
        F.percentile_approx("x", [0.01, 0.5, 0.99], 1000),
        F.expr("approx_top_k(z, 5, 128)"),
        F.count_min_sketch("z", F.lit(0.001), F.lit(0.99), F.lit(1)),
    ]
    found = oracle.ours(lambda rows: rows.agg(*columns), feed.stream(), "complete")
    (distinct, hll, theta, longs, doubles, percentiles, top, counters) = found.epochs[3][0]
    # Three standard deviations.
    assert distinct == pytest.approx(100_000, rel=3 * 1.04 / math.sqrt(512))
    assert hll == pytest.approx(100_000, rel=3 * 1.04 / math.sqrt(4096))
    assert theta == pytest.approx(100_000, rel=3 / math.sqrt(4096 - 1))
    # Twice the error that holds 99 times of 100, as the sketches draw lots.
    assert longs == pytest.approx([1_000, 50_000, 99_000], abs=2 * 0.0133 * 100_000)
    assert doubles == pytest.approx([1_000, 50_000, 99_000], abs=2 * 0.0133 * 100_000)
    assert percentiles == pytest.approx([1_000, 50_000, 99_000], abs=2 * 100_000 / 1000)
    true = Counter(z for _, z in values)
    assert [entry["item"] for entry in top] == [z for z, _ in true.most_common(5)]
    assert all(abs(entry["count"] - true[entry["item"]]) <= 4.5 / 128 * 100_000 for entry in top)
    java: Any = spark.sparkContext._jvm
    sketch = java.org.apache.spark.util.sketch.CountMinSketch.readFrom(bytes(counters))
    assert sketch.totalCount() == 100_000
    assert all(0 <= sketch.estimateCount(z) - true[z] <= 0.001 * 100_000 for z in (1, 2, 3, 10, 100))
