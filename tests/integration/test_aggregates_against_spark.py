"""Every aggregate over every type, by keys of every type: the same rows, names and types as Spark's own."""

import datetime as dt
import math
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.operators.aggregate import stage as aggregate_stage
from support.oracle import Oracle, names_and_types
from support.streams import EpochFeed

Values = st.SearchStrategy[Any]

# Sums and averages of these come out the same in whatever order they are taken.
_EIGHTHS = st.integers(-(2**18), 2**18).map(lambda number: number / 8)
_TIMES = st.datetimes(dt.datetime(1971, 1, 1), dt.datetime(2261, 1, 1))
_DATES = st.dates(dt.date(1900, 1, 1), dt.date(9999, 12, 31))
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
_CENTS = st.decimals("-99999999.99", "99999999.99", places=2)
_EXACT = st.decimals(-(10**25), 10**25, places=10)

NUMBERS: dict[str, tuple[str, Values]] = {
    "bytes": ("byte", st.integers(-128, 127)),
    "shorts": ("short", st.integers(-(2**15), 2**15 - 1)),
    "ints": ("int", st.integers(-(2**31), 2**31 - 1)),
    "longs": ("long", st.integers(-(2**45), 2**45)),
    "floats": ("float", _EIGHTHS | st.sampled_from([math.inf, math.nan])),
    "doubles": ("double", _EIGHTHS | st.sampled_from([-math.inf, math.nan])),
    "cents": ("decimal(10,2)", _CENTS),
    "shares": ("decimal(20,4)", st.decimals("-9999999999999999.9999", "9999999999999999.9999", places=4)),
    "exact": ("decimal(38,10)", _EXACT),
    "numerals": ("string", _EIGHTHS.map(str)),
}
OTHERS: dict[str, tuple[str, Values]] = {
    "texts": ("string", _TEXTS),
    "extremes": ("long", st.sampled_from([-(2**63), 2**63 - 1, 0])),
    "dates": ("date", _DATES),
    "moments": ("timestamp", _TIMES),
    "wall_times": ("timestamp_ntz", _TIMES),
    "flags": ("boolean", st.booleans()),
    "blobs": ("binary", st.binary(max_size=5).map(bytearray)),
}
VALUES = {**NUMBERS, **OTHERS}
_SOME = [None, "x", "", 0.0, -0.0, math.nan]
#: For each kind of key its type, values that have to be among its keys, and where others come from.
KEYS: dict[str, tuple[str, list[Any], Values]] = {
    "int": ("int", [-(2**31), -1, 0, 2**31 - 1], st.integers(-5, 5)),
    "long": ("long", [-(2**63), -1, 0, 2**63 - 1], st.integers(-5, 5)),
    "string": ("string", ["", "a", "A", "a ", "ä", "a\u0308", "日本", "\0"], _TEXTS),
    "binary": ("binary", [bytearray(b""), bytearray(b"\0"), bytearray(b"\0\0")], st.binary(max_size=3).map(bytearray)),
    "date": ("date", [dt.date(1969, 12, 31)], _DATES),
    "timestamp": ("timestamp", [dt.datetime(1969, 12, 31, 23, 59, 59, 999999)], _TIMES),
    "timestamp_ntz": ("timestamp_ntz", [dt.datetime(2024, 3, 31, 2, 30)], _TIMES),
    "small decimal": ("decimal(10,2)", [Decimal("0.00"), Decimal("-0.01")], _CENTS),
    "large decimal": ("decimal(38,10)", [Decimal("0"), Decimal("-1E-10")], _EXACT),
    "boolean": ("boolean", [True, False], st.booleans()),
    "double": ("double", [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf], _EIGHTHS),
    "float": ("float", [0.0, -0.0, math.nan, -math.nan, math.inf], _EIGHTHS),
    "struct": (
        "struct<a: int, b: struct<c: string, d: double>>",
        [(a, b) for a in (None, 1) for b in (None, (None, None), ("x", 0.0), ("x", -0.0), ("", math.nan))],
        st.tuples(st.integers(0, 2), st.none()),
    ),
}


class Epochs(list[list[tuple[Any, ...]]]):
    """Lists of rows, too many to be shown when a test fails."""

    def __repr__(self) -> str:
        return f"Epochs of {', '.join(str(len(rows)) for rows in self)} rows"


@st.composite
def epochs_of(draw: st.DrawFn, columns: list[tuple[list[Any], Values]], epochs: int = 3) -> Epochs:
    """Epochs of rows whose values come from a small pool for each column, so that they meet again; some are null."""
    pools = [[*fixed, *draw(st.lists(values, min_size=3, max_size=6))] for fixed, values in columns]
    chance = random.Random(draw(st.integers(0, 2**32)))
    return Epochs(
        [tuple(None if chance.random() < 0.12 else chance.choice(pool) for pool in pools) for _ in range(size)]
        for size in [draw(st.integers(20, 50)) for _ in range(epochs)]
    )


def few_examples_of(values: st.SearchStrategy[Epochs], count: int) -> list[Epochs]:
    """Each is run by both engines, so there are few of them, and none is made smaller. Under a profile of more examples
    than usual (``--hypothesis-profile thorough``) there are more, and others each time."""
    found: list[Epochs] = []
    times = max(1, settings().max_examples // settings.get_profile("default").max_examples)

    @settings(
        max_examples=count * times,
        derandomize=times == 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(values)
    def draw(epochs: Epochs) -> None:
        found.append(epochs)

    draw()
    return found


@pytest.fixture
def ansi(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[bool]:
    """ANSI mode, on or off as the test asks."""
    spark.conf.set("spark.sql.ansi.enabled", request.param)
    yield request.param
    spark.conf.unset("spark.sql.ansi.enabled")


def feed_of(spark: SparkSession, oracle: Oracle, columns: dict[str, str], *epochs: Any) -> EpochFeed:
    ddl = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
    feed = EpochFeed(spark, oracle.new_folder("input") / "files", ddl)
    feed.add(*epochs)
    return feed


def all_aggregates() -> list[Column]:
    found = [F.count("*"), F.count(F.lit(1)).alias("ones"), F.count(F.lit(None)), F.sum(F.lit(2))]
    found += [function(name) for name in NUMBERS for function in (F.sum, F.avg)]
    found += [function(name) for name in VALUES for function in (F.count, F.min, F.max)]
    several = F.call_function("count", F.col("ints"), F.col("texts"), F.col("flags"))
    found += [several, several.alias("a name. with `marks`"), F.mean("ints").alias("ones")]
    return [*found, F.sum(F.col("ints") * 2 + F.col("bytes")), F.max(F.when(F.col("flags"), F.upper("texts")))]


@pytest.mark.parametrize("mode", ["update", pytest.param("complete", marks=pytest.mark.slow)])
def test_every_aggregate_of_every_type(spark: SparkSession, oracle: Oracle, mode: str) -> None:
    columns = [([], st.integers(0, 5)), *(([], values) for _, values in VALUES.values())]
    kinds = {"example": "int", "k": "int", **{name: kind for name, (kind, _) in VALUES.items()}}
    examples = few_examples_of(epochs_of(columns), 2)
    feed = feed_of(spark, oracle, kinds)
    feed.add(*[[(i, *row) for i, rows in enumerate(epoch) for row in rows] for epoch in zip(*examples, strict=True)])
    native = oracle.check(lambda rows: rows.groupBy("example", "k").agg(*all_aggregates()), feed, mode)
    assert len(native.epochs) == 3


@pytest.fixture(scope="module")
def keyed_epochs() -> list[list[tuple[Any, ...]]]:
    """Epochs of rows with a column for each kind of key."""
    columns = [*((fixed, values) for _, fixed, values in KEYS.values()), ([], st.integers(-9, 9))]
    one, two = few_examples_of(epochs_of(columns), 2)
    return [a + b for a, b in zip(one, two, strict=True)]


KEYED = {**{name: kind for name, (kind, _, _) in KEYS.items()}, "v": "long"}


@pytest.fixture(scope="module")
def keyed_feed(spark: SparkSession, oracle: Oracle, keyed_epochs: list[list[tuple[Any, ...]]]) -> EpochFeed:
    return feed_of(spark, oracle, KEYED, *keyed_epochs)


def tallied(*keys: Any) -> Callable[[Any], Any]:
    return lambda rows: rows.groupBy(*keys).agg(F.count("*").alias("n"), F.sum("v"), F.min("string"))


def test_keys_of_every_type(spark: SparkSession, oracle: Oracle, keyed_epochs: list[list[tuple[Any, ...]]]) -> None:
    """In one query: each row comes once for each kind of key, with a value of that kind and none of the others."""
    kinds = list(KEYS)

    def apart(row: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        *keys, value = row
        for position, kind in enumerate(kinds):
            others = [key if at == position else None for at, key in enumerate(keys)]
            yield kind, keys[kinds.index("string")], *others, value

    feed = feed_of(spark, oracle, {"kind": "string", "text": "string", **KEYED})
    feed.add(*[[each for row in epoch for each in apart(row)] for epoch in keyed_epochs])
    native = oracle.check(
        lambda rows: rows.groupBy("kind", *kinds).agg(F.count("*").alias("n"), F.sum("v"), F.min("text")), feed
    )
    assert len(native.epochs) == 3
    first = native.epochs[0]
    for kind in kinds:
        found = [row[kind] for row in first if row["kind"] == kind]
        assert None in found, kind
        assert len(found) > 2, kind


@pytest.mark.parametrize("kind", ["string", "double", "struct"])
def test_keys_in_complete_mode(oracle: Oracle, keyed_feed: EpochFeed, kind: str) -> None:
    oracle.check(tallied(kind), keyed_feed, "complete")


def test_keys_whose_rows_are_combined_before_they_are_moved(
    oracle: Oracle, keyed_feed: EpochFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregate_stage, "_FEW_ROWS", 0)
    monkeypatch.setattr(aggregate_stage, "_REPEATS_TO_COMBINE", 0)
    oracle.check(tallied("double", "struct"), keyed_feed)


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_several_and_computed_keys(oracle: Oracle, keyed_feed: EpochFeed, mode: str) -> None:
    keys = [
        "boolean",
        (F.col("int") % 3).alias("third"),
        F.upper("string"),
        F.struct(F.col("date").alias("day"), F.col("small decimal")).alias("pair"),
        F.window("timestamp", "10 seconds"),
    ]
    oracle.check(tallied(*keys), keyed_feed, mode)


def test_overlapping_windows_and_rows_without_a_time(oracle: Oracle, keyed_feed: EpochFeed) -> None:
    native = oracle.check(tallied(F.window("timestamp", "10 seconds", "5 seconds", "1 second"), "boolean"), keyed_feed)
    assert native.schemas[0][0] == ("window", "struct<start:timestamp,end:timestamp>")


def test_another_time_zone_changes_nothing(spark: SparkSession, oracle: Oracle, keyed_feed: EpochFeed) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        keys = ("timestamp", "timestamp_ntz", F.window("timestamp", "1 day"), F.to_date("timestamp"))
        oracle.check(
            lambda rows: rows.groupBy(*keys).agg(F.max("timestamp"), F.min("timestamp_ntz"), F.max("date")), keyed_feed
        )
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_aggregates_over_everything_also_where_there_is_nothing(spark: SparkSession, oracle: Oracle, mode: str) -> None:
    feed = feed_of(spark, oracle, {"v": "long", "d": "decimal(38,10)"}, [(-1, None)], [], [(3, None), (5, Decimal(1))])
    feed.add([(None, None)], [], [(7, Decimal(2)), (-8, Decimal(3))])
    aggregates = [F.count("*"), F.count("v"), F.sum("v"), F.avg("v"), F.sum("d"), F.avg("d"), F.min("v"), F.max("v")]
    oracle.check(lambda rows: rows.filter("v is null or v > 0").agg(*aggregates), feed, mode)


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_keys_where_there_is_nothing(spark: SparkSession, oracle: Oracle, mode: str) -> None:
    feed = feed_of(spark, oracle, {"k": "string", "v": "long"}, [("a", -1)], [("a", 1), ("b", None)], [], [("b", 2)])
    oracle.check(lambda rows: rows.filter("v is null or v > 0").groupBy("k").agg(F.sum("v"), F.avg("v")), feed, mode)


def test_values_of_any_type_can_be_counted(spark: SparkSession, oracle: Oracle) -> None:
    columns = {"k": "int", "many": "array<int>", "pairs": "map<string, int>", "both": "struct<a: int, b: array<int>>"}
    rows = [(1, [1], {"x": 1}, (1, None)), (1, None, None, None), (2, [], {}, (None, None)), (1, [None], None, None)]
    feed = feed_of(spark, oracle, columns, rows, rows[1:], rows[:2])
    counts = [F.count(name) for name in columns]
    several = F.call_function("count", F.col("many"), F.col("both.a"), F.col("pairs"))
    oracle.check(lambda stream: stream.groupBy("k").agg(*counts, several, F.max("both.a")), feed)


_MOST = Decimal("9999999999999999999999999999.9999999999")
_NEARLY = Decimal("9999999999999999999999999997.9999999999")


def overflowing(spark: SparkSession, oracle: Oracle) -> EpochFeed:
    one, most, least = Decimal(1), _MOST, _MOST.copy_negate()
    feed = feed_of(spark, oracle, {"k": "string", "v": "long", "d": "decimal(38,10)"})
    feed.add(
        [
            ("between", 2**63 - 1, most),
            ("within", 2**63 - 1, most),
            ("within", 1, most),
            ("near", 1, one),
            ("no", 0, None),
        ],
        [("between", 1, one), ("within", 1, one), ("near", 2, _NEARLY), ("below", -(2**63), least), ("no", 1, least)],
        [("between", 1, one), ("within", -5, least), ("below", -1, -one), ("near", 1, -one), ("no", 2, most)],
        [("between", None, None), ("within", None, None), ("below", 5, most), ("near", 0, one)],
    )
    return feed


def totals(rows: Any) -> Any:
    return rows.groupBy("k").agg(F.sum("v"), F.avg("v"), F.sum("d"), F.avg("d"), F.count("d"))


@pytest.mark.parametrize("ansi", [False], indirect=True)
def test_sums_without_ansi_wrap_around_or_become_null_for_good(spark: SparkSession, oracle: Oracle, ansi: bool) -> None:
    del ansi
    native = oracle.check(totals, overflowing(spark, oracle))
    last = {row["k"]: (row["sum(v)"], row["sum(d)"]) for epoch in sorted(native.epochs) for row in native.epochs[epoch]}
    assert last["between"] == (-(2**63) + 1, None)
    assert last["near"] == (4, Decimal("9999999999999999999999999998.9999999999"))


@pytest.mark.parametrize("ansi", [True], indirect=True)
@pytest.mark.parametrize(
    "epochs",
    [
        pytest.param([[(2**63 - 1, None), (1, None)]], id="longs within an epoch"),
        pytest.param([[(2**63 - 1, None)], [(1, None)]], id="longs between epochs"),
        pytest.param([[(None, _MOST), (None, _MOST)]], id="decimals within an epoch"),
        pytest.param([[(None, _MOST)], [(None, _MOST)]], id="decimals between epochs"),
    ],
)
def test_sums_with_ansi_fail_where_they_do_not_fit(
    spark: SparkSession, oracle: Oracle, epochs: list[list[tuple[Any, ...]]], ansi: bool
) -> None:
    del ansi
    feed = feed_of(spark, oracle, {"v": "long", "d": "decimal(38,10)"}, *epochs)
    query = lambda rows: rows.groupBy(F.lit("all").alias("k")).agg(F.sum("v"), F.sum("d"))  # noqa: E731
    with pytest.raises(StreamingQueryException, match="ARITHMETIC_OVERFLOW"):
        oracle.native(query, feed.stream())
    with pytest.raises((StreamingQueryException, anabranch.EpochError), match="ARITHMETIC_OVERFLOW"):
        oracle.ours(query, feed.stream())


@pytest.mark.parametrize(
    "query",
    [
        lambda rows: rows.groupBy("int").count(),
        lambda rows: rows.groupBy("int").sum(),
        lambda rows: rows.groupBy("int", "v").avg(),
        lambda rows: rows.groupBy(["int"]).mean("v", "double"),
        lambda rows: rows.groupBy("int").min("v"),
        lambda rows: rows.groupBy().max("v", "small decimal"),
        lambda rows: rows.groupBy("int").agg({"*": "count", "v": "sum", "double": "mean", "string": "max"}),
        lambda rows: rows.agg({"v": "avg"}),
        lambda rows: rows.groupBy("INT").agg(F.sum("V"), F.max(F.col("STRUCT.B.c"))),
        lambda rows: rows.groupBy(F.window("timestamp", "1 day")).count().select("window.start", "count"),
        lambda rows: rows.groupBy(rows["struct"]["b"], rows.int).agg(F.sum(rows.v), F.max(rows["small decimal"])),
        lambda rows: rows.groupBy("struct.b.c", F.col("v") + 1).agg(F.sum("large decimal"), F.avg("large decimal")),
        lambda rows: rows.groupBy(F.window("timestamp", "1 day").alias("day")).agg(F.count("v").alias("v")),
        lambda rows: rows.groupBy("v").agg(F.sum("v").alias("v"), F.max("v").alias("V")),
    ],
)
def test_a_result_is_named_and_typed_as_spark_does(keyed_feed: EpochFeed, query: Callable[[Any], Any]) -> None:
    rows = keyed_feed.stream()
    assert names_and_types(query(anabranch.stream(rows)).schema) == names_and_types(query(rows).schema)


def test_names_that_anabranch_uses_itself_can_be_those_of_columns(spark: SparkSession, oracle: Oracle) -> None:
    names = ["_all", "_key0", "_in0_0", "_buf0_0", "_partition", "_row", "key", "value.key"]
    feed = feed_of(spark, oracle, dict.fromkeys([*names, "_hash", "_op"], "long"), [(1,) * 10], [(1,) * 10, (5,) * 10])
    values = [F.sum("_hash").alias("_op"), F.max("_op").alias("_hash"), F.count("*").alias("key"), F.avg("_op")]
    quoted = [f"`{name}`" for name in names]
    values += [F.sum(name).alias("_group") for name in quoted]
    oracle.check(lambda rows: rows.groupBy(*quoted).agg(*values), feed)


@pytest.mark.parametrize("name", ["_hash", "_op", "_index", "_group", "_position"])
def test_names_of_state_columns_cannot_be_those_of_keys(keyed_feed: EpochFeed, name: str) -> None:
    grouped = anabranch.stream(keyed_feed.stream()).groupBy(F.col("int").alias(name))
    with pytest.raises(anabranch.UnsupportedError, match=f"The key column '{name}' has a name that .* Rename it"):
        grouped.count()
