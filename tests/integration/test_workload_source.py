"""The workload source in a real Spark: exact epochs, replay, catching up, and errors when a stream is loaded."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from anabranch.workload import WorkloadSpec, event_schema, generate, register
from anabranch.workload.schedule import Position

WAIT_S = 60


@pytest.fixture(autouse=True)
def _registered(spark: SparkSession) -> None:
    register(spark)


def load(spark: SparkSession, **options: object) -> DataFrame:
    reader = spark.readStream.format("anabranch.workload")
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


class Epochs:
    """A sink that keeps the rows of each epoch, ordered as the source made them."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.seen: dict[int, list[pa.Table]] = {}
        self.fail_after = fail_after

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        self.seen.setdefault(epoch, []).append(rows.toArrow().combine_chunks())
        if self.fail_after == epoch:
            raise RuntimeError("the sink fails")

    def sizes(self) -> list[int]:
        return [self.seen[epoch][-1].num_rows for epoch in sorted(self.seen)]

    def rows(self) -> pa.Table:
        return pa.concat_tables([self.seen[epoch][-1] for epoch in sorted(self.seen)]).combine_chunks()


def run(stream: DataFrame, sink: Callable[[DataFrame, int], None], checkpoint: Path) -> None:
    """Run a stream until all that is available has been read."""
    writer = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()


def last_position(checkpoint: Path) -> Position:
    """The source's offset in the newest entry of Spark's log."""
    newest = max(
        (path for path in (checkpoint / "offsets").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    return Position.from_json(json.loads(newest.read_text().splitlines()[-1]))


def test_every_epoch_takes_exactly_its_rows_until_the_end(spark: SparkSession, tmp_path: Path) -> None:
    sink = Epochs()
    stream = load(spark, rowsPerEpoch=1000, rows=2500, partitions=3, skew=1.1, keys=50, payloadBytes=9)
    run(stream, sink, tmp_path)
    assert sink.sizes() == [1000, 1000, 500]
    expected = generate(WorkloadSpec(keys=50, skew=1.1, payload_bytes=9), 0, 2500).combine_chunks()
    table = sink.rows()
    assert table.drop_columns(["ingestion_time"]).to_pylist() == expected.to_pylist()
    times = [seen[-1].column("ingestion_time").unique() for seen in sink.seen.values()]
    assert [len(unique) for unique in times] == [1, 1, 1]
    assert times[0][0].as_py() < times[1][0].as_py() < times[2][0].as_py()


def test_epochs_are_exact_with_a_running_query_too(spark: SparkSession, tmp_path: Path) -> None:
    writer = load(spark, rowsPerEpoch=123, columns="id").writeStream.format("noop")
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    try:
        deadline_s = time.monotonic() + WAIT_S
        while len(query.recentProgress) < 3 and time.monotonic() < deadline_s:
            query.awaitTermination(0.05)
        sizes = [progress["numInputRows"] for progress in query.recentProgress]
    finally:
        query.stop()
    assert len(sizes) >= 3
    assert set(sizes) == {123}


def test_an_epoch_that_failed_is_read_again_with_the_same_rows_and_times(spark: SparkSession, tmp_path: Path) -> None:
    stream = load(spark, rowsPerSecond=2000, disorderMs=100)
    failing, sink = Epochs(fail_after=0), Epochs()
    with pytest.raises(StreamingQueryException, match="the sink fails"):
        run(stream, failing, tmp_path)
    run(load(spark, rowsPerSecond=2000, disorderMs=100), sink, tmp_path)
    assert sink.seen[0][-1] == failing.seen[0][-1]
    # The first epoch's start is in no log, yet the rows after it follow its clock.
    position = last_position(tmp_path)
    spec = WorkloadSpec(disorder_ms=100, schedule=position.schedule)
    assert position.row == sink.rows().num_rows > 1
    assert (
        sink.rows().column("timestamp").to_pylist() == generate(spec, 0, position.row).column("timestamp").to_pylist()
    )
    arrivals = generate(replace(spec, disorder_ms=0), 0, position.row, ["timestamp"]).column(0)
    assert sink.rows().column("ingestion_time").to_pylist() == arrivals.to_pylist()


def test_a_stream_with_a_rate_keeps_it_and_catches_up_after_a_pause(spark: SparkSession, tmp_path: Path) -> None:
    options = {"rowsPerSecond": 1000, "columns": "id,ingestion_time", "maxRowsPerEpoch": 700}
    first, second = Epochs(), Epochs()
    run(load(spark, **options), first, tmp_path)
    began_us = last_position(tmp_path).schedule.origin_us
    stream = load(spark, **options)
    resumed_us = time.time_ns() // 1000
    run(stream, second, tmp_path)
    ended_us = time.time_ns() // 1000
    total = last_position(tmp_path).row
    assert (resumed_us - began_us) // 1000 <= total <= (ended_us - began_us) // 1000 + 1
    assert max(second.sizes()) <= 700
    assert sum(first.sizes()) + sum(second.sizes()) == total
    times = pa.concat_tables([first.rows(), second.rows()]).column("ingestion_time").cast(pa.int64()).to_pylist()
    assert times == [began_us + 1000 * number for number in range(total)]


def test_a_batch_read_is_the_same_table_every_time(spark: SparkSession) -> None:
    reader = spark.read.format("anabranch.workload").option("rows", 5000).option("partitions", 3)
    table = reader.load().toArrow().combine_chunks()
    assert table == reader.load().toArrow().combine_chunks()
    assert (
        table.drop_columns(["ingestion_time"]).to_pylist()
        == generate(
            replace(WorkloadSpec(), schedule=replace(WorkloadSpec().schedule, rows_per_second=1.0)), 0, 5000
        ).to_pylist()
    )
    assert table.column("ingestion_time").to_pylist() == table.column("timestamp").to_pylist()
    assert reader.option("rows", 0).load().count() == 0


def test_a_batch_read_without_an_end_is_refused(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match=r"A batch read needs an end. Give the option rows"):
        spark.read.format("anabranch.workload").load().count()


def test_columns_are_chosen_by_option_or_by_schema(spark: SparkSession) -> None:
    by_option = load(spark, rowsPerEpoch=1, columns="server_name,ingestion_time")
    assert by_option.schema.simpleString() == "struct<server_name:string,ingestion_time:timestamp>"
    everything = load(spark, rowsPerEpoch=1, payloadBytes=3)
    assert everything.columns == [*event_schema(WorkloadSpec(payload_bytes=3)).names, "ingestion_time"]
    schema = StructType([StructField("server_name", StringType()), StructField("id", LongType())])
    rows = spark.read.format("anabranch.workload").schema(schema).option("rows", 3).load().toArrow()
    assert rows.to_pylist() == generate(WorkloadSpec(), 0, 3, ["server_name", "id"]).to_pylist()


def test_a_schema_that_does_not_fit_is_refused(spark: SparkSession) -> None:
    wrong = spark.read.format("anabranch.workload").schema("id string").option("rows", 3).load()
    with pytest.raises(AnalysisException, match="does not fit the source's columns"):
        wrong.count()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rowsPerSecond": "-1"}, "The option rowsPerSecond is -1"),
        ({"rowPerSecond": "1"}, "Did you mean rowsPerSecond"),
        ({"rowsPerEpoch": "1", "keys": "zero"}, "The option keys is 'zero'"),
    ],
)
def test_a_wrong_option_is_named_when_the_stream_is_loaded(
    spark: SparkSession, options: dict[str, str], message: str
) -> None:
    with pytest.raises(AnalysisException, match=message):
        load(spark, **options)


def test_an_endless_stream_cannot_be_read_to_its_end(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(StreamingQueryException, match="Give the option rows"):
        run(load(spark, rowsPerEpoch=5), Epochs(), tmp_path)
