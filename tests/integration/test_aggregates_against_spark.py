"""Every aggregate over every type, by keys of every type: the same rows, names and types as Spark's own."""

import datetime as dt
import math
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import Oracle, external_worker
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from streams import EpochFeed

#: Each example is a run of both engines, so there are few of them, and none is made smaller.
few_examples = settings(
    max_examples=2,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

# Sums and averages of these come out the same in whatever order they are taken.
_EIGHTHS = st.integers(-(2**18), 2**18).map(lambda number: number / 8)
_TIMES = st.datetimes(dt.datetime(1971, 1, 1), dt.datetime(2261, 1, 1))
_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)

NUMBERS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "bytes": ("byte", st.integers(-128, 127)),
    "shorts": ("short", st.integers(-(2**15), 2**15 - 1)),
    "ints": ("int", st.integers(-(2**31), 2**31 - 1)),
    "longs": ("long", st.integers(-(2**45), 2**45)),
    "floats": ("float", _EIGHTHS | st.sampled_from([math.inf, math.nan])),
    "doubles": ("double", _EIGHTHS | st.sampled_from([-math.inf, math.nan])),
    "cents": ("decimal(10,2)", st.decimals("-99999999.99", "99999999.99", places=2)),
    "shares": ("decimal(20,4)", st.decimals("-9999999999999999.9999", "9999999999999999.9999", places=4)),
    "exact": ("decimal(38,10)", st.decimals(-(10**25), 10**25, places=10)),
    "numerals": ("string", _EIGHTHS.map(str)),
}
OTHERS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "texts": ("string", _TEXTS),
    "extremes": ("long", st.sampled_from([-(2**63), 2**63 - 1, 0])),
    "dates": ("date", st.dates(dt.date(1900, 1, 1), dt.date(9999, 12, 31))),
    "moments": ("timestamp", _TIMES),
    "wall_times": ("timestamp_ntz", _TIMES),
    "flags": ("boolean", st.booleans()),
    "blobs": ("binary", st.binary(max_size=5).map(bytearray)),
}
KEYS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "an int": ("int", st.sampled_from([-(2**31), -1, 0, 7, 2**31 - 1])),
    "a long": ("long", st.sampled_from([-(2**63), -1, 0, 7, 2**63 - 1])),
    "a string": ("string", st.sampled_from(["", "a", "A", "ä", "日本", "a "]) | _TEXTS),
    "a binary": ("binary", st.binary(max_size=3).map(bytearray)),
    "a date": ("date", OTHERS["dates"][1]),
    "a timestamp": ("timestamp", _TIMES),
    "a timestamp_ntz": ("timestamp_ntz", _TIMES),
    "a small decimal": ("decimal(10,2)", NUMBERS["cents"][1] | st.just(Decimal("0.00"))),
    "a large decimal": ("decimal(38,10)", NUMBERS["exact"][1]),
    "a boolean": ("boolean", st.booleans()),
    "a double": ("double", st.sampled_from([0.0, -0.0, math.nan, -math.nan, math.inf, 1.5])),
    "a float": ("float", st.sampled_from([0.0, -0.0, math.nan, -math.inf, 1.5])),
    "a struct": (
        "struct<a: int, b: struct<c: string, d: double>>",
        st.tuples(
            st.sampled_from([None, 1, 2]),
            st.none() | st.tuples(st.sampled_from([None, "x", ""]), st.sampled_from([None, 0.0, -0.0, math.nan])),
        ),
    ),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Two state workers for all tests of this module: starting some for each query would take longer than the query."""
    with external_worker("--id", "one") as one, external_worker("--id", "two", "--store", "rocksdb") as two:
        yield Oracle(tmp_path_factory.mktemp("oracle"), [one["address"], two["address"]])


def feed_of(spark: SparkSession, folder: Path, columns: dict[str, str]) -> EpochFeed:
    return EpochFeed(spark, folder / f"input-{random.getrandbits(64):x}", ", ".join(f"`{n}` {t}" for n, t in columns.items()))


class Epochs(list[list[tuple[Any, ...]]]):
    """Lists of rows, too many to be shown when a test fails."""

    def __repr__(self) -> str:
        return f"Epochs of {', '.join(str(len(rows)) for rows in self)} rows"


@st.composite
def epochs_of(draw: st.DrawFn, columns: dict[str, st.SearchStrategy[Any]], epochs: int = 3) -> Epochs:
    """Epochs of rows whose values come from a small pool for each column, so that they meet again; some are null."""
    pools = [draw(st.lists(values, min_size=3, max_size=6)) for values in columns.values()]
    chance = random.Random(draw(st.integers(0, 2**32)))
    sizes = [draw(st.integers(10, 40)) for _ in range(epochs)]
    return Epochs(
        [tuple(None if chance.random() < 0.15 else chance.choice(pool) for pool in pools) for _ in range(size)]
        for size in sizes
    )


def all_aggregates() -> list[Column]:
    found = [F.count("*"), F.count(F.lit(1)).alias("ones"), F.count(F.lit(None))]
    found += [function(name) for name in NUMBERS for function in (F.sum, F.avg)]
    found += [function(name) for name in [*NUMBERS, *OTHERS] for function in (F.count, F.min, F.max)]
    return found


VALUES = {**NUMBERS, **OTHERS}


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_every_aggregate_of_every_type(spark: SparkSession, oracle: Oracle, mode: str) -> None:
    columns = {"k": st.integers(0, 5), **{name: values for name, (_, values) in VALUES.items()}}

    @few_examples
    @given(epochs_of(columns))
    def check(epochs: Epochs) -> None:
        feed = feed_of(spark, oracle.folder, {"k": "int", **{name: kind for name, (kind, _) in VALUES.items()}})
        feed.add(*epochs)
        native = oracle.check(lambda rows: rows.groupBy("k").agg(*all_aggregates()), feed, mode)
        assert len(native.epochs) == 3

    check()
