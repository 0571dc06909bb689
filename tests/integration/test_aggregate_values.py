"""Aggregates of values at the ends of their types: Spark's, though rows come in several epochs."""

import math
from decimal import Decimal

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from support.aggregated import QUANTILES, Epochs, check, feed_of, ours
from support.oracle import Oracle

NAN, INF = math.nan, math.inf
_MOST = Decimal("9" * 28 + "." + "9" * 10)
DOUBLES: dict[str, list[float | None]] = {
    "nothing": [None] * 4,
    "one": [1.5],
    "two": [1.0, 2.0],
    "some NaN": [NAN, 1.0, NAN, 2.0, 0.5],
    "NaN only": [NAN] * 4,
    "zeros": [0.0, -0.0, -0.0, 0.0, 1.0],
    "infinite": [INF, 1.0, 2.0, INF],
    "of both signs": [INF, -INF, 1.0, 0.0],
    # Their sum divided by their number is not 3.7, and for some of the largest it is infinite.
    "the same": [3.7] * 7,
    "the same, large": [1.7e308] * 6,
    "large": [1e308, 1e308, 1.1e308, 1.7e308, 9e307, 1.2e308, 1.5e308],
    "less large": [1e100, 2e100, 3.5e100, -1e100, 7e100, 1e99],
    "small": [1e-60, 2e-60, 5e-60, 1e-61, 0.0, 3e-60],
    "smallest": [5e-324, 1e-323, 0.0, 5e-324],
}
LONGS = {
    "largest": [2**63 - 1, 0, None, 2**63 - 1 - 2**40, 5],
    "least": [-(2**63), 0, 1, 7],
    "no doubles": [2**53 + 1, 2**53 + 3, 2**53 + 5, 2**53 + 1, 2**60 + 1],
}
DECIMALS = {
    "too large together": [_MOST, _MOST - 1, _MOST - 2, _MOST],
    "all digits": [Decimal("12345678901234567890.1234567891"), Decimal("12345678901234567890.1234567890"), Decimal(2)],
    "one decimal": [Decimal("1.25")],
}


def test_values_at_the_ends_of_their_types(spark: SparkSession, oracle: Oracle) -> None:
    epochs: Epochs = [[], [], []]
    for position, groups in enumerate((DOUBLES, LONGS, DECIMALS)):
        for key, values in groups.items():
            for number, value in enumerate(values):
                epochs[number % 3].append((key, *(value if position == i else None for i in range(3))))
    feed = feed_of(spark, oracle, "k string, d double, x long, m decimal(38,10)", epochs)
    d = F.col("d")
    # The third and fourth powers of others are no doubles, and with some of the powers Spark divides by zero.
    plain = F.when((F.abs(d) < 1e50) & ((F.abs(d) > 1e-50) | (d == 0)), d)
    # Which of 0.0 and -0.0 comes first is not said.
    one_zero = d + F.lit(0.0)
    names = "var_pop stddev avg sum try_sum min max median product sum_distinct approx_count_distinct count_distinct"
    check(
        oracle,
        feed,
        [
            *[getattr(F, name)("d").alias(name) for name in names.split()],
            F.skewness(plain), F.kurtosis(plain), F.corr(plain, plain * 2).alias("corr"),
            F.regr_slope(plain, plain + 1).alias("slope"), F.covar_pop("d", "d"), F.regr_sxx("d", "d"),
            F.sort_array(F.collect_set("d")), F.sort_array(F.collect_list("d")), F.expr("mode(d, true)"),
            F.percentile(one_zero, [0.0, 0.3, 0.9, 1.0]).alias("exactly"),
            F.min_by("d", "d"), F.max_by("d", "d"), F.expr("avg(distinct d)"),
            F.expr("percentile_disc(0.4) within group (order by d + 0.0 desc)"),
            F.percentile_approx(F.when(~F.isnan("d"), d), list(QUANTILES)).alias("approximately"),
            F.avg("x"), F.median("x"), F.variance("x"), F.try_sum("x"), F.expr("try_sum(distinct x)"),
            F.expr("try_avg(distinct x)"), F.percentile_approx("x", [0.0, 0.5, 1.0]),
            F.try_sum("m"), F.try_avg("m"), F.median("m"), F.variance("m"), F.expr("try_sum(distinct m)"),
            F.expr("try_avg(distinct m)"), F.percentile_approx("m", [0.0, 0.5, 1.0]),
            F.expr("sum(distinct m) filter (where m < 1e25)"), F.expr("avg(distinct m) filter (where m < 1e25)"),
        ],
    )  # fmt: skip


def test_nan_is_above_every_number_to_percentile_approx(spark: SparkSession, oracle: Oracle) -> None:
    """Spark's own result depends on the order in which rows come."""
    groups = {"some": [NAN, 1.0, INF, 2.0, NAN, 0.5, 3.0], "only": [NAN] * 3, "none": [2.0, 1.0]}
    epochs = [[(key, value) for key, values in groups.items() for value in values[i::3]] for i in range(3)]
    feed = feed_of(spark, oracle, "k string, d double", epochs)
    columns = [F.percentile_approx("d", [0.0, 0.4, 0.7, 0.72, 1.0]), F.percentile_approx(F.col("d").cast("float"), 0.9)]
    found = {row[0]: [str(value) for value in (*row[1], row[2])] for row in ours(oracle, feed, columns).epochs[0]}
    assert found["some"] == ["0.5", "2.0", "inf", "nan", "nan", "nan"]
    assert found["only"] == ["nan"] * 6
    assert found["none"] == ["1.0", "1.0", "2.0", "2.0", "2.0", "2.0"]
