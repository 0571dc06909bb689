"""A query that comes back to its checkpoint with more or fewer calls, or with fewer fields of state."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import verify
from anabranch.core.errors import CheckpointError
from support.oracle import drain
from support.streams import Collector, EpochFeed

# Tasks cannot import a test: what it defines travels with them.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Build = Callable[[Any], Any]
ENCODING = "spark.sql.streaming.stateStore.encodingFormat"


class Runs:
    """One checkpoint, and the queries that use it one after another, an epoch of rows each."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.checkpoint = folder / "ck"
        self.feed = EpochFeed(spark, folder / "input", "k long, v long")

    def run(self, rows: list[tuple[int, int]], build: Build, **options: Any) -> list[Any]:
        """What comes of these rows; none, where the query is to be refused."""
        if rows:
            self.feed.add(rows)
        writer = (
            build(anabranch.stream(self.feed.stream()))
            .writeStream.outputMode("update")
            .foreachBatch(collector := Collector())
        )
        options = {"anabranch.workers": 1, "anabranch.parallelism": 1, **options}
        drain(writer.options(checkpointLocation=str(self.checkpoint), **options))
        (result,) = collector.epochs.values()
        return sorted(result)


@pytest.fixture
def runs(spark: SparkSession, tmp_path: Path) -> Runs:
    return Runs(spark, tmp_path)


def test_calls_before_a_stateful_stage_come_and_go(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """As in Spark: which rows come does not change what the state is."""
    plain = runs.run([(1, 1), (2, 1)], lambda rows: rows.filter("k > 0").groupBy("k").count())
    assert plain == [Row(k=1, count=1), Row(k=2, count=1)]

    def more(rows: Any) -> Any:
        return rows.filter("k > 0").filter("v < 9").select("k", "v").groupBy("k").count()

    assert runs.run([(1, 1), (2, 9)], more) == [Row(k=1, count=2)]
    assert runs.run([(1, 1), (2, 9)], lambda rows: rows.groupBy("k").count()) == [
        Row(k=1, count=3),
        Row(k=2, count=2),
    ]
    query = (
        more(anabranch.stream(runs.feed.stream()))
        .writeStream.outputMode("update")
        .foreachBatch(Collector())
        .option("checkpointLocation", str(runs.checkpoint))
        .start()
    )
    try:
        assert sorted(query.state("stage2").collect()) == [Row(k=1, count=3), Row(k=2, count=2)]
        query.explain()
        assert "*4 'stage2' (its state is that of stage 2): groupBy" in capsys.readouterr().out
    finally:
        query.stop()


def test_a_stage_that_the_user_named_keeps_its_state_wherever_it_stands(runs: Runs) -> None:
    assert runs.run([(1, 1)], lambda rows: rows.stage("counts").groupBy("k").count()) == [Row(k=1, count=1)]
    moved = runs.run([(1, 1)], lambda rows: rows.filter("k > 0").stage("counts").groupBy("k").count())
    assert moved == [Row(k=1, count=2)]
    with pytest.raises(CheckpointError, match="has the stateful stage counts"):
        runs.run([], lambda rows: rows.filter("k > 0").stage("others").groupBy("k").count())


def test_two_stages_are_told_apart_by_their_order(runs: Runs) -> None:
    def build(rows: Any) -> Any:
        return (
            rows.dropDuplicates(["k", "v"])
            .groupBy("k")
            .transformWithState(Latest("v long"), "k long, t string", "update", "none")
        )

    assert runs.run([(1, 5), (1, 5)], build) == [Row(k=1, t="None 5")]
    later = runs.run([(1, 5), (1, 6)], lambda rows: build(rows.filter("k > 0").filter("v > 0")))
    assert later == [Row(k=1, t="(5,) 6")]


class Latest(StatefulProcessor):
    """Remembers values of the last row under the names of its fields, and shows what it has found of them."""

    def __init__(self, fields: str) -> None:
        self._fields = fields

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._latest = handle.getValueState("latest", self._fields)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        del timerValues
        values = [row.v for row in rows]
        found = self._latest.get()
        self._latest.update(tuple(values[-1] for _ in self._fields.split(",")))
        yield Row(k=key[0], t=f"{found} {values[-1]}")

    def close(self) -> None:
        pass


def processed(fields: str) -> Build:
    return lambda rows: rows.groupBy("k").transformWithState(Latest(fields), "k long, t string", "update", "none")


@pytest.mark.parametrize("snapshots", [False, True])
def test_fields_of_state_may_be_dropped_where_spark_allows_it(spark: SparkSession, runs: Runs, snapshots: bool) -> None:
    options = {"anabranch.snapshotEpochs": 1 if snapshots else 100}
    assert runs.run([(1, 1), (2, 1)], processed("a long, b long, c long"), **options) == [
        Row(k=1, t="None 1"),
        Row(k=2, t="None 1"),
    ]
    with pytest.raises(
        CheckpointError, match=r"field b is not in this query.*To drop b with all values, set \S+encodingFormat to avro"
    ):
        runs.run([], processed("c long, a long"))
    spark.conf.set(ENCODING, "avro")
    try:
        assert runs.run([(1, 2)], processed("c long, a long"), **options) == [Row(k=1, t="(1, 1) 2")]
        with pytest.raises(CheckpointError, match="field b cannot change from bigint to string"):
            runs.run([], processed("c long, a long, b string"))
    finally:
        spark.conf.unset(ENCODING)
    assert runs.run([(1, 3), (2, 3)], processed("c long, a long")) == [Row(k=1, t="(2, 2) 3"), Row(k=2, t="(1, 1) 3")]
    assert verify(Storage(str(runs.checkpoint))).problems == ()
