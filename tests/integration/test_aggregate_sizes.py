"""Every aggregate at the sizes where its algorithm takes another way.

A HyperLogLog++ of m registers counts linearly up to a threshold, corrects its bias up to 5 m, and takes the raw
estimate above that; sketches are exact until they are full. One query answers for all sizes: each size is a key.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.operators.aggregate import functions
from support.aggregated import QUANTILES, Epochs, check, feed_of, natively, ours
from support.oracle import Oracle, Result
from support.streams import EpochFeed

#: Around the thresholds, 2.5 m and 5 m for 16, 32, 128 and 512 registers.
SIZES = (
    *(0, 1, 2, 3, 9, 10, 11, 20, 39, 41, 60, 79, 81, 120, 159, 161, 200, 319, 321, 390, 400, 410, 500, 639, 641, 900),
    *(1250, 1300, 1400, 1700, 2000, 2300, 2550, 2600, 3000, 5000),
)
#: Enough where nothing changes with the size.
FEW_SIZES = (0, 1, 2, 3, 10, 41, 900, 3000)
#: The same as SIZES for 4,096 and 8,192 registers, and more values than any sketch here can hold.
LARGE_SIZES = (0, 1, 3_000, 6_400, 6_600, 10_200, 10_300, 20_000, 20_500, 30_000, 41_000, 65_000, 66_000, 10**5, 10**6)


def epochs_of(sizes: Sequence[int]) -> Epochs:
    """Of each size as many different values, in three epochs, some of them in two; a size of 0 has nulls only."""
    chance = random.Random(5)
    epochs: Epochs = [[], [], []]
    for size in sizes:
        values: list[int | None] = [*range(size)] or [None]
        chance.shuffle(values)
        for epoch, (first, last) in enumerate([(0, size // 3), (size // 4, 2 * size // 3), (size // 2, max(size, 1))]):
            epochs[epoch] += [(size, value) for value in values[first:last]]
    return epochs


def text() -> Column:
    return F.concat(F.lit("value "), F.col("x").cast("string"))


def registers(*deviations: float) -> list[Column]:
    """approx_count_distinct with more and fewer registers, and of several types."""
    x = F.col("x")
    kinds = [text(), x.cast("double") / 7, x.cast("float"), F.timestamp_seconds("x"), F.struct("x", text()), x % 100]
    return [
        *(F.approx_count_distinct("x", deviation).alias(f"within {deviation}") for deviation in deviations),
        *(F.approx_count_distinct(kind).alias(f"of kind {i}") for i, kind in enumerate(kinds)),
    ]


def skewed() -> Column:
    return F.floor(F.sqrt(F.col("x").cast("double"))).cast("int")


def moments() -> list[Column]:
    of_one = (F.var_pop, F.var_samp, F.stddev, F.stddev_pop, F.skewness, F.kurtosis)
    of_two = (F.corr, F.covar_pop, F.covar_samp, F.regr_avgx, F.regr_avgy, F.regr_count, F.regr_intercept, F.regr_r2)
    of_two += (F.regr_slope, F.regr_sxx, F.regr_sxy, F.regr_syy)
    return [*[function("x") for function in of_one], *[function("x", skewed()) for function in of_two]]


def exact() -> list[Column]:
    """What has one right answer, however many values there are."""
    x = F.col("x")
    return [
        F.count("x"), F.sum("x"), F.avg("x"), F.min("x"), F.max(text()), F.min_by(text(), "x"), F.max_by("x", text()),
        F.try_sum("x"), F.try_avg("x"), F.count_if(x % 3 == 0), F.bool_and(x < 900), F.bool_or(x > 900),
        F.xxhash64(F.sort_array(F.collect_list("x"))).alias("list"),
        F.xxhash64(F.sort_array(F.collect_set(text()))).alias("set"),
        F.xxhash64(F.sort_array(F.collect_union(F.array(skewed(), x % 50)))).alias("union"),
        F.length(F.listagg(text(), F.lit(", "))), F.bit_xor("x"), F.bit_or("x"), F.bit_and("x"),
        F.expr("mode(x, true)"), F.mode(skewed(), True).alias("mode"), F.median("x"),
        F.percentile("x", list(QUANTILES)), F.percentile(skewed(), 0.3).alias("percentile"),
        F.expr("percentile_disc(0.9) within group (order by x desc)"),
        F.product((x % 3 - 1).cast("double")).alias("product"),
        F.xxhash64(F.count_min_sketch("x", F.lit(0.05), F.lit(0.9), F.lit(3))).alias("count_min"),
        F.bitmap_count(F.bitmap_construct_agg(x % 32768)).alias("bitmap"),
        F.expr("transform(approx_top_k(cast(sqrt(x) as int), 1, 5000), e -> e.count)").alias("top"),
    ]  # fmt: skip


def sketched() -> list[Column]:
    """What is exact as long as it has room for all values."""
    quantiles = F.array(*map(F.lit, QUANTILES))

    def some(found: Column) -> Column:
        """Spark fails on quantiles of nothing."""
        return F.when(F.count("x") > 0, found)

    return [
        F.first("x").alias("first"), F.last("x").alias("last"), F.any_value("x").alias("any"),
        F.count_distinct("x").alias("distinct"), F.count_distinct(text(), F.col("x") % 7).alias("pairs"),
        F.hll_sketch_estimate(F.hll_sketch_agg("x")).alias("hll 4096"),
        F.hll_sketch_estimate(F.hll_sketch_agg(text(), 6)).alias("hll 64"),
        F.theta_sketch_estimate(F.theta_sketch_agg("x")).alias("theta 4096"),
        F.theta_sketch_estimate(F.theta_sketch_agg(text(), 8)).alias("theta 256"),
        some(F.kll_sketch_get_quantile_bigint(F.kll_sketch_agg_bigint("x"), quantiles)).alias("ranks within 0.0133"),
        some(F.kll_sketch_get_quantile_double(F.kll_sketch_agg_double(F.col("x").cast("double")), quantiles)).alias(
            "doubles within 0.0133"
        ),
        some(F.kll_sketch_get_quantile_float(F.kll_sketch_agg_float(F.col("x").cast("float"), 1000), quantiles)).alias(
            "floats within 0.0033"
        ),
        F.percentile_approx("x", list(QUANTILES)).alias("finest within 0.00011"),
        F.percentile_approx("x", list(QUANTILES), 100).alias("coarse within 0.01"),
        F.percentile_approx("x", list(QUANTILES), 1_000_000).alias("too fine within 0.00011"),
    ]  # fmt: skip


def merged() -> list[Column]:
    """What is made of sketches and bitmaps that come as rows."""
    quantiles = F.array(*map(F.lit, QUANTILES))
    return [
        F.hll_sketch_estimate(F.hll_union_agg("hll")).alias("hll 4096"),
        F.theta_sketch_estimate(F.theta_union_agg("theta")).alias("theta 4096"),
        # A third of all values is in common, so it is known as well as by a sketch of a third of the size.
        F.theta_sketch_estimate(F.theta_intersection_agg("theta")).alias("common 1365"),
        F.kll_sketch_get_quantile_bigint(F.kll_merge_agg_bigint("longs"), quantiles).alias("longs within 0.0133"),
        F.kll_sketch_get_quantile_double(F.kll_merge_agg_double("doubles"), quantiles).alias("doubles within 0.0133"),
        F.kll_sketch_get_quantile_float(F.kll_merge_agg_float("floats"), quantiles).alias("floats within 0.0133"),
        F.bitmap_count(F.bitmap_or_agg("bits")).alias("all bits"),
        F.bitmap_count(F.bitmap_and_agg("bits")).alias("common bits"),
    ]


def thirds_of(size: int) -> list[range]:
    """So many values in two parts, which have a third of them in common; of one value there is one part."""
    return [part for part in (range(2 * size // 3), range(size // 3, size)) if part]


def feed_of_sketches(spark: SparkSession, oracle: Oracle, sizes: Sequence[int]) -> EpochFeed:
    """An epoch of sketches for each of the parts."""
    parts = [(size, i, part.start, part.stop - 1) for size in sizes for i, part in enumerate(thirds_of(size))]
    x = F.col("x")
    rows = spark.createDataFrame(parts, "k int, part int, first long, last long")
    sketches = rows.select("k", "part", F.explode(F.sequence("first", "last")).alias("x")).groupBy("part", "k").agg(
        F.hll_sketch_agg("x"), F.theta_sketch_agg("x"), F.kll_sketch_agg_bigint("x"),
        F.kll_sketch_agg_double(x.cast("double")), F.kll_sketch_agg_float(x.cast("float")),
        F.bitmap_construct_agg(x % 32768),
    ).collect()  # fmt: skip
    epochs = [[(k, *map(bytes, found)) for part, k, *found in sketches if part == i] for i in range(2)]
    kinds = ", ".join(f"{name} binary" for name in ("hll", "theta", "longs", "doubles", "floats", "bits"))
    return feed_of(spark, oracle, f"k int, {kinds}", epochs)


@pytest.fixture(scope="module")
def sizes(spark: SparkSession, oracle: Oracle) -> EpochFeed:
    return feed_of(spark, oracle, "k int, x long", epochs_of(SIZES))


@pytest.fixture(scope="module")
def large_sizes(spark: SparkSession, oracle: Oracle) -> EpochFeed:
    return feed_of(spark, oracle, "k int, x long", epochs_of(LARGE_SIZES))


@pytest.fixture
def compiled(spark: SparkSession) -> Iterator[None]:
    """Spark compiles expressions, as it does unless it is told otherwise."""
    names = ("spark.sql.codegen.wholeStage", "spark.sql.codegen.factoryMode")
    usual = [spark.conf.get(name) for name in names]
    for name, value in zip(names, ("true", "FALLBACK"), strict=True):
        spark.conf.set(name, value)
    yield
    for name, value in zip(names, usual, strict=True):
        spark.conf.set(name, str(value))


@pytest.mark.usefixtures("compiled")
def test_distinct_values_are_counted_as_spark_does_at_every_size(oracle: Oracle, sizes: EpochFeed) -> None:
    check(oracle, sizes, registers(0.39, 0.2, 0.1, 0.05))


def test_exact_aggregates_are_sparks_at_every_size(spark: SparkSession, oracle: Oracle) -> None:
    check(oracle, feed_of(spark, oracle, "k int, x long", epochs_of(FEW_SIZES)), exact() + moments())


def test_sketches_are_exact_or_within_their_error_at_every_size(oracle: Oracle, sizes: EpochFeed) -> None:
    check_sketches(ours(oracle, sizes, sketched()), SIZES)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("counts", [SIZES[1:], pytest.param(LARGE_SIZES[1:], marks=pytest.mark.slow)], ids=max)
def test_merged_sketches_are_exact_or_within_their_error(
    spark: SparkSession, oracle: Oracle, counts: Sequence[int]
) -> None:
    check_merged(ours(oracle, feed_of_sketches(spark, oracle, counts), merged()), counts)


def test_every_aggregate_is_among_those_that_are_compared_at_every_size(
    spark: SparkSession, oracle: Oracle, sizes: EpochFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, asked = functions._TABLE, set[str]()
    sketches = feed_of_sketches(spark, oracle, [1])

    class Noting(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return super().get(name, default)

    monkeypatch.setattr(functions, "_TABLE", Noting(known))
    for feed, columns in ((sizes, registers(0.05) + exact() + moments() + sketched()), (sketches, merged())):
        anabranch.stream(feed.stream()).groupBy("k").agg(*columns)
    assert set(known) - asked == set()


# A million values take minutes.
@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_distinct_values_are_counted_as_spark_does_up_to_a_million(oracle: Oracle, large_sizes: EpochFeed) -> None:
    check(oracle, large_sizes, registers(0.05, 0.02, 0.017)[:4])


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_exact_aggregates_are_sparks_up_to_a_million_values(oracle: Oracle, large_sizes: EpochFeed) -> None:
    check(oracle, large_sizes, exact())


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_moments_are_sparks_up_to_a_million_values(oracle: Oracle, large_sizes: EpochFeed) -> None:
    """But for the last digits, which depend on the order of rows."""
    expected = {row["k"]: list(row) for row in natively(large_sizes, moments()).collect()}
    for row in ours(oracle, large_sizes, moments()).epochs[0]:
        assert list(row) == pytest.approx(expected.pop(row["k"]), rel=1e-9, abs=1e-9, nan_ok=True)
    assert not expected


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_sketches_are_within_their_error_up_to_a_million_values(oracle: Oracle, large_sizes: EpochFeed) -> None:
    check_sketches(ours(oracle, large_sizes, sketched()), LARGE_SIZES)


def rows_of(found: Result, sizes: Sequence[int]) -> dict[int, dict[str, Any]]:
    rows = {row["k"]: row.asDict() for row in found.epochs[0]}
    assert sorted(rows) == sorted(sizes)
    return {rows[size].pop("k"): rows[size] for size in sizes}


def check_sketches(found: Result, sizes: Sequence[int]) -> None:
    epochs = epochs_of(sizes)
    for size, row in rows_of(found, sizes).items():
        parts = [part for epoch in epochs if (part := [value for k, value in epoch if k == size])]
        # Which of an epoch's values it is, Spark does not say either.
        assert {row.pop("first"), row.pop("any")} <= set(parts[0])
        assert row.pop("last") in parts[-1]
        assert (row.pop("distinct"), row.pop("pairs")) == (size, size)
        check_estimates(row, sorted(value for part in parts for value in part if value is not None), {})


def check_merged(found: Result, sizes: Sequence[int]) -> None:
    for size, row in rows_of(found, sizes).items():
        parts = thirds_of(size)
        common = set(parts[0]).intersection(*parts)
        assert row.pop("all bits") == len({value % 32768 for part in parts for value in part})
        bits = [{value % 32768 for value in part} for part in parts]
        assert row.pop("common bits") == len(bits[0].intersection(*bits))
        check_estimates(row, sorted(chain.from_iterable(parts)), {"common": len(common)})


def check_estimates(row: dict[str, Any], ordered: list[int], counts: dict[str, int]) -> None:
    """Columns say by their names what they estimate, and how well; `counts` has what is not the number of values."""
    for name, value in row.items():
        kind, *_, number = name.split()
        if "within" in name:
            check_quantiles(value, ordered, float(number), f"{name}, {len(ordered)} values: {value}")
        else:
            count = counts.get(kind, len(set(ordered)))
            # Four standard deviations; the smallest sketches hold eight values as they are.
            error = 0 if count <= 8 else 4 * 1.04 / math.sqrt(int(number))
            assert value == pytest.approx(count, rel=error + 1e-4), f"{name}, {count} values"


def check_quantiles(found: list[float] | None, ordered: list[int], error: float, what: str) -> None:
    if not ordered:
        assert found is None, what
        return
    assert found is not None, what
    # Twice the error that holds 99 times of 100, as the sketches draw lots; they are exact for some 200 values.
    slack = 2 * error * len(ordered) if len(ordered) > 200 else 0
    for quantile, value in zip(QUANTILES, found, strict=True):
        rank = max(math.ceil(quantile * len(ordered)), 1)
        low, high = (min(max(round(rank + sign * slack), 1), len(ordered)) for sign in (-1, 1))
        assert ordered[low - 1] <= value <= ordered[high - 1], what


@pytest.mark.parametrize(
    "aggregate",
    ["median(make_dt_interval(x))", "percentile_approx(make_dt_interval(x), 0.5)", "max(make_ym_interval(0, x))"],
)
def test_aggregates_of_intervals_that_are_not_supported_say_so(sizes: EpochFeed, aggregate: str) -> None:
    rows = anabranch.stream(sizes.stream()).withColumn("x", F.col("x").cast("int"))
    with pytest.raises(anabranch.UnsupportedError, match="Cast it to a number"):
        rows.groupBy("k").agg(F.expr(aggregate))
