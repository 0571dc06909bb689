"""The ``anabranch.workload`` data source: generated events as a Spark stream, or as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from anabranch.core.errors import SettingsError
from anabranch.workload.events import chunk_rows, event_schema, generate_batches
from anabranch.workload.options import INGESTION_TIME, SourceOptions
from anabranch.workload.schedule import Position, Schedule

NAME = "anabranch.workload"

_TIME = pa.timestamp("us", tz="UTC")


def wall_clock_us() -> int:
    return time.time_ns() // 1000


def register(spark: SparkSession) -> None:
    """Make ``spark.readStream.format("anabranch.workload")`` and ``spark.read...`` known to this session."""
    spark.dataSource.register(WorkloadDataSource)


class WorkloadDataSource(DataSource):
    """What Spark asks for the schema and for readers."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        options = SourceOptions.parse(self.options)
        return from_arrow_schema(_full_schema(options, options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions.parse(self.options)
        if options.pace.rows is None:
            raise SettingsError("A batch read needs an end. Give the option rows, or use readStream.")
        return TableReader(options, _check_schema(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = SourceOptions.parse(self.options)
        return StreamReader(options, _check_schema(options, schema))


@dataclass
class EventRange(InputPartition):
    """The events that one task makes."""

    first: int
    end: int
    arrivals: Schedule


class EventReader:
    """The part that runs in tasks: from a range of event numbers to Arrow batches."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self.options = options
        self.columns = columns

    def split(self, first: int, end: int, arrivals: Schedule) -> list[EventRange]:
        """Contiguous ranges of equal size, none of them empty."""
        tasks = min(self.options.partitions, end - first)
        bounds = [first + (end - first) * task // tasks for task in range(tasks + 1)] if tasks > 0 else []
        return [EventRange(low, high, arrivals) for low, high in pairwise(bounds)]

    def batches(self, events: EventRange) -> Iterator[pa.RecordBatch]:
        spec = self.options.spec_for(events.arrivals)
        schema = _full_schema(self.options, self.columns)
        made = [name for name in self.columns if name != INGESTION_TIME]
        step = chunk_rows(spec)
        for first in range(events.first, events.end, step):
            count = min(step, events.end - first)
            arrays = {}
            if made:
                batch = next(generate_batches(spec, first, count, made))
                arrays = dict(zip(made, batch.columns, strict=True))
            if INGESTION_TIME in self.columns:
                arrays[INGESTION_TIME] = pa.array(events.arrivals.times_us(first, count)).view(_TIME)
            yield pa.RecordBatch.from_arrays([arrays[name] for name in self.columns], schema=schema)


class TableReader(DataSourceReader):
    """Events 0 .. rows - 1 as a table. Arrival times follow the event schedule, so it is always the same table."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._events = EventReader(options, columns)
        self._rows = options.pace.rows or 0
        own = options.spec.schedule
        rate = options.pace.rows_per_second if options.event_time_is_arrival else None
        self._arrivals = Schedule(own.origin_row, own.origin_us, rate or own.rows_per_second)

    def partitions(self) -> list[EventRange]:
        # Spark takes an empty list for "one partition, of no particular kind", so an empty table is an empty range.
        return self._events.split(0, self._rows, self._arrivals) or [EventRange(0, 0, self._arrivals)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, EventRange)
        return self._events.batches(partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Events as they arrive. Offsets are positions, and hold all that is needed to make the same rows again."""

    def __init__(
        self, options: SourceOptions, columns: tuple[str, ...], clock_us: Callable[[], int] = wall_clock_us
    ) -> None:
        self._events = EventReader(options, columns)
        self._clock_us = clock_us
        self._pace = options.pace
        self._max_rows = options.max_rows_per_epoch
        self._beginning: Position | None = None
        self._latest: Position | None = None
        #: With the trigger availableNow: the moment after which nothing arrives any more.
        self._closing_us: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        # Spark may ask more than once before the first epoch; the stream starts but once.
        if self._beginning is None:
            self._beginning = self._pace.beginning(self._now_us())
        return self._beginning.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        rows_max = self._pace.rows_per_epoch or self._max_rows
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        position = Position.from_json(start)
        self._latest = self._pace.next_position(position, now_us=self._now_us(), rows_max=rows_max)
        # Spark compares offsets as texts, so "nothing new" is the very same document.
        return dict(start) if self._latest == position else self._latest.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """How far the stream could be read by now, from which monitoring tells how far a query is behind."""
        if self._latest is None or self._pace.rows_per_second is None:
            return None
        return self._pace.next_position(self._latest, now_us=self._now_us()).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        if self._pace.rows_per_epoch is not None and self._pace.rows is None:
            raise SettingsError(
                "With rowsPerEpoch the trigger availableNow would never end. Give the option rows, "
                "or use another trigger."
            )
        # Rows by the epoch come when they are asked for, and the option rows is their end.
        if self._pace.rows_per_epoch is None:
            self._closing_us = self._clock_us()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[EventRange]:
        last = Position.from_json(end)
        # The start of the first epoch is not in Spark's log, only its end is; so the end says when rows arrived.
        return self._events.split(Position.from_json(start).row, last.row, last.schedule)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, EventRange)
        return self._events.batches(partition)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Nothing to do: events are made anew whenever they are asked for."""

    def _now_us(self) -> int:
        return self._clock_us() if self._closing_us is None else self._closing_us


def _full_schema(options: SourceOptions, columns: tuple[str, ...]) -> pa.Schema:
    fields = {field.name: field for field in event_schema(options.spec)}
    fields[INGESTION_TIME] = pa.field(INGESTION_TIME, _TIME)
    return pa.schema([fields[name] for name in columns])


def _check_schema(options: SourceOptions, schema: StructType) -> tuple[str, ...]:
    """The columns to make. A schema that the user gave chooses columns; it cannot change what they are."""
    columns = tuple(schema.fieldNames())
    known = {*event_schema(options.spec).names, INGESTION_TIME}
    given = to_arrow_schema(schema, timezone="UTC")
    if not known.issuperset(columns) or not given.equals(_full_schema(options, columns)):
        raise SettingsError(
            f"The schema '{schema.simpleString()}' does not fit the source's columns. "
            "Leave the schema out, and choose columns by the option columns."
        )
    return columns
