"""The stream reader without Spark: what Spark asks of it, in the order in which Spark asks."""

import json
import pickle
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from anabranch.core.errors import SettingsError
from anabranch.workload import generate
from anabranch.workload.source import SourceOptions, StreamReader

START_US = 1_700_000_000_000_000


@dataclass
class Clock:
    now_us: int = START_US

    def __call__(self) -> int:
        return self.now_us


def reader_of(clock: Clock, **given: object) -> StreamReader:
    options = SourceOptions.parse({name: str(value) for name, value in given.items()})
    return StreamReader(options, options.columns, clock)


def rows_between(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> pa.Table:
    """What the tasks of an epoch make, each with its own copy of the reader, as in Spark."""
    batches = []
    for partition in reader.partitions(start, end):
        task, work = pickle.loads(pickle.dumps((reader, partition)))
        batches += list(task.read(work))
    return pa.Table.from_batches(batches).combine_chunks()


def logged(offset: dict[str, Any]) -> dict[str, Any]:
    """An offset after its way through Spark's log."""
    return dict(json.loads(json.dumps(offset)))


def test_a_replay_by_another_process_gives_the_same_rows_and_times() -> None:
    clock = Clock()
    reader = reader_of(clock, rowsPerSecond=1000, partitions=3)
    start = reader.initialOffset()
    clock.now_us += 2_500_000
    end = logged(reader.latestOffset(start, reader.getDefaultReadLimit()))
    first = rows_between(reader, start, end)
    assert first.num_rows == 2501
    # The start of the first epoch is in no log, so the new process makes one of its own.
    other = reader_of(Clock(START_US + 10**9), rowsPerSecond=1000, partitions=3)
    assert rows_between(other, other.initialOffset(), end) == first


def test_arrival_times_are_scheduled_from_the_start_on() -> None:
    clock = Clock()
    reader = reader_of(clock, rowsPerSecond=10, columns="ingestion_time,timestamp")
    start = reader.initialOffset()
    clock.now_us += 250_000
    table = rows_between(reader, start, reader.latestOffset(start, ReadAllAvailable()))
    expected = [START_US, START_US + 100_000, START_US + 200_000]
    assert table.column("ingestion_time").cast(pa.int64()).to_pylist() == expected
    assert table.column("timestamp") == table.column("ingestion_time")


def test_the_stream_starts_but_once() -> None:
    clock = Clock()
    reader = reader_of(clock, rowsPerSecond=10)
    first = reader.initialOffset()
    clock.now_us += 10**6
    assert reader.initialOffset() == first


def test_after_a_pause_epochs_are_bounded_and_reach_the_present() -> None:
    clock = Clock()
    reader = reader_of(clock, rowsPerSecond=100, maxRowsPerEpoch=4000)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(4000)
    offset = logged(reader.latestOffset(reader.initialOffset(), limit))
    # A driver that was away for 100 seconds.
    clock = Clock(START_US + 100_000_000)
    reader = reader_of(clock, rowsPerSecond=100, maxRowsPerEpoch=4000)
    rows = [offset["row"]]
    for _ in range(4):
        offset = logged(reader.latestOffset(offset, limit))
        rows.append(offset["row"])
    assert rows == [1, 4001, 8001, 10001, 10001]


def test_a_limit_of_all_available_overrides_the_bound() -> None:
    clock = Clock()
    reader = reader_of(clock, rowsPerSecond=100, maxRowsPerEpoch=10)
    start = reader.initialOffset()
    clock.now_us += 10**6
    assert reader.latestOffset(start, ReadAllAvailable())["row"] == 101


@pytest.mark.parametrize("limit", [ReadMaxRows(400), ReadAllAvailable()])
def test_every_epoch_takes_its_rows_exactly(limit: ReadLimit) -> None:
    reader = reader_of(Clock(), rowsPerEpoch=400, rows=1000)
    assert reader.getDefaultReadLimit() == ReadMaxRows(400)
    offset = reader.initialOffset()
    sizes = []
    for _ in range(4):
        end = reader.latestOffset(offset, limit)
        sizes.append(sum(part.end - part.first for part in reader.partitions(offset, end)))
        offset = end
    assert sizes == [400, 400, 200, 0]


def test_nothing_new_is_told_by_the_very_same_offset() -> None:
    reader = reader_of(Clock(), rowsPerEpoch=5, rows=5)
    end = logged(reader.latestOffset(reader.initialOffset(), ReadMaxRows(5)))
    assert json.dumps(reader.latestOffset(end, ReadMaxRows(5))) == json.dumps(end)
    assert reader.partitions(end, end) == []


def test_partitions_share_the_rows_evenly_and_in_order() -> None:
    reader = reader_of(Clock(), rowsPerEpoch=10, partitions=4)
    start = reader.initialOffset()
    parts = reader.partitions(start, reader.latestOffset(start, ReadMaxRows(10)))
    assert [(part.first, part.end) for part in parts] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    few = reader_of(Clock(), rowsPerEpoch=2, partitions=4)
    assert len(few.partitions(start, few.latestOffset(start, ReadMaxRows(2)))) == 2


def test_rows_are_those_of_the_generator() -> None:
    reader = reader_of(Clock(), rowsPerEpoch=70_000, partitions=1, skew=1.1, columns="server_name,id")
    start = reader.initialOffset()
    table = rows_between(reader, start, reader.latestOffset(start, ReadMaxRows(70_000)))
    spec = SourceOptions.parse({"skew": "1.1"}).spec
    assert table == generate(spec, 0, 70_000, ["server_name", "id"]).combine_chunks()


def test_available_now_closes_the_stream_at_that_moment() -> None:
    clock = Clock()
    reader = reader_of(clock, rowsPerSecond=10)
    start = reader.initialOffset()
    clock.now_us += 10**6
    reader.prepareForTriggerAvailableNow()
    clock.now_us += 10**9
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end["row"] == 11
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_available_now_leaves_the_arrival_times_of_epochs_alone() -> None:
    clock = Clock()
    reader = reader_of(clock, rowsPerEpoch=1, rows=10)
    reader.prepareForTriggerAvailableNow()
    clock.now_us += 777
    assert reader.latestOffset(reader.initialOffset(), ReadMaxRows(1))["origin_us"] == START_US + 777


def test_available_now_without_an_end_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"would never end. Give the option rows"):
        reader_of(Clock(), rowsPerEpoch=5).prepareForTriggerAvailableNow()


def test_the_reported_offset_shows_how_far_a_query_is_behind() -> None:
    clock = Clock()
    reader = reader_of(clock, rowsPerSecond=100, maxRowsPerEpoch=10)
    assert reader.reportLatestOffset() is None
    start = reader.initialOffset()
    clock.now_us += 10**6
    assert reader.latestOffset(start, ReadMaxRows(10))["row"] == 10
    clock.now_us += 10**6
    reported = reader.reportLatestOffset()
    assert reported is not None
    assert reported["row"] == 201
