"""Spark's own StatefulProcessor on Anabranch: the same rows as Spark gives, in rows and in pandas."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from support.streams import EpochFeed, run_anabranch, run_native

# Tasks run in processes that do not have the tests on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

EPOCHS = [
    [("a", 1, "x"), ("b", 2, "y"), ("a", 3, "x")],
    [("a", 10, "z"), ("c", 20, "x")],
    [("b", 7, "y"), ("c", 5, "x"), ("c", 6, "w")],
]
OUTPUT = "k string, n long, total long, items string"


class Ledger(StatefulProcessor):
    """Uses all three kinds of state: a running sum, the last values, and counts by tag."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "n long, total long")
        self.recent = handle.getListState("recent", "v long")
        self.tags = handle.getMapState("tags", "tag string", "n long")

    def add(self, values: list[tuple[int, str]]) -> tuple[int, int, str]:
        n, total = self.total.get() if self.total.exists() else (0, 0)
        for value, tag in values:
            n, total = n + 1, total + value
            self.recent.appendValue((value,))
            seen = self.tags.getValue((tag,))
            self.tags.updateValue((tag,), ((seen[0] if seen else 0) + 1,))
        if total > 25:
            self.recent.put([(0,)])
        self.total.update((n, total))
        recent = sorted(row[0] for row in self.recent.get())
        tags = sorted((key[0], value[0]) for key, value in self.tags.iterator())
        return n, total, f"{recent} {tags}"

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        del timerValues
        n, total, items = self.add([(row.v, row.tag) for row in rows])
        yield Row(k=key[0], n=n, total=total, items=items)


class LedgerOfFrames(Ledger):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        del timerValues
        values = [(int(v), tag) for frame in rows for v, tag in zip(frame["v"], frame["tag"], strict=True)]
        n, total, items = self.add(values)
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total], "items": [items]})


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path / "input", "k string, v long, tag string")
    feed.add(*EPOCHS)
    return feed


@pytest.fixture
def _rocksdb(spark: SparkSession) -> Iterator[None]:
    """Spark's transformWithState needs its RocksDB store."""
    name = "spark.sql.streaming.stateStore.providerClass"
    spark.conf.set(name, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    yield
    spark.conf.unset(name)


@pytest.mark.usefixtures("_rocksdb")
@pytest.mark.parametrize("pandas", [False, True])
def test_a_processor_gives_what_it_gives_on_spark(feed: EpochFeed, tmp_path: Path, pandas: bool) -> None:
    def process(rows: Any) -> Any:
        grouped = rows.groupBy("k")
        method = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
        return method(LedgerOfFrames() if pandas else Ledger(), OUTPUT, "update", "none")

    ours = run_anabranch(process, feed.stream(), tmp_path / "ours", options={"anabranch.store": "rocksdb"})
    native = run_native(process, feed.stream(), tmp_path / "native")
    assert ours.multisets() == native.multisets()
    feed.add([("a", 1, "q"), ("b", 1, "y"), ("d", 1, "d")])
    again = run_anabranch(process, feed.stream(), tmp_path / "ours", options={"anabranch.workers": 3})
    natively = run_native(process, feed.stream(), tmp_path / "native")
    assert again.multisets() == natively.multisets()


def test_stages_follow_one_another(feed: EpochFeed, tmp_path: Path) -> None:
    """A processor's output goes through a second stateful stage, with a parallelism of its own."""

    def chained(rows: Any) -> Any:
        ledger = rows.stage("ledger", parallelism=3).groupBy("k").transformWithState(Ledger(), OUTPUT, "update", "none")
        return ledger.filter("n < 100").groupBy(F.length("k").alias("width")).agg(F.count("*").alias("reports"))

    ours = run_anabranch(chained, feed.stream(), tmp_path / "ours")
    assert [dict(epoch) for epoch in ours.multisets()] == [
        {"(1, 2)": 1},
        {"(1, 4)": 1},
        {"(1, 6)": 1},
    ]
