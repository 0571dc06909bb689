"""The ``anabranch.workload`` data source: generated events as a Spark stream, or as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
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
from anabranch.workload.events import (
    LIMITS,
    WorkloadSpec,
    check_columns,
    check_limits,
    chunk_rows,
    event_schema,
    generate_batches,
)
from anabranch.workload.schedule import Position, Schedule, StreamPace

NAME = "anabranch.workload"
#: When a row entered the stream; the source adds it to the columns of the events.
INGESTION_TIME = "ingestion_time"

#: As Spark's own rate source.
_DEFAULT_ROWS_PER_SECOND = 1.0
_DEFAULT_PARTITIONS = 2
_PARTITIONS_MAX = 10_000
_ROWS_MAX = 2**53
_RATE_MAX = 1e9
_TIME = pa.timestamp("us", tz="UTC")
#: The whole numbers of a specification, by the option that sets them.
_SPEC_INTEGERS = {
    "keys": "keys",
    "ids": "ids",
    "seed": "seed",
    "payloadBytes": "payload_bytes",
    "disorderMs": "disorder_ms",
}
_OPTIONS = (
    *("rowsPerSecond", "rowsPerEpoch", "maxRowsPerEpoch", "rows", "partitions", "columns", "eventsPerSecond"),
    *("keys", "ids", "skew", "seed", "payloadBytes", "disorderMs"),
)


@dataclass(frozen=True)
class SourceOptions:
    """The options of a reader, checked."""

    spec: WorkloadSpec
    pace: StreamPace
    #: The most rows that one epoch takes when a stream with a rate is behind; None is no bound.
    max_rows_per_epoch: int | None
    partitions: int
    columns: tuple[str, ...]
    #: Whether event times follow the arrival of the rows, rather than a pace of their own.
    event_time_is_arrival: bool

    @staticmethod
    def parse(given: Mapping[str, str]) -> SourceOptions:
        """Check the options of a reader. Their names count without regard to case, as in all of Spark."""
        known = {name.lower(): name for name in _OPTIONS}
        values: dict[str, str] = {}
        for name, value in given.items():
            if name.lower() not in known:
                near = get_close_matches(name.lower(), known, 1)
                advice = f"Did you mean {known[near[0]]}?" if near else f"Choose from {', '.join(_OPTIONS)}."
                raise SettingsError(f"The option {name.lower()} of the anabranch.workload source is unknown. {advice}")
            values[known[name.lower()]] = value
        pace = _pace(values)
        spec = _spec(values)
        max_rows = _integer(values, "maxRowsPerEpoch", 1, _ROWS_MAX)
        if max_rows is not None and pace.rows_per_epoch is not None:
            raise SettingsError(
                "The option maxRowsPerEpoch bounds a stream that has a rate, but rowsPerEpoch is given, which is "
                "exact. Leave one of the two out."
            )
        columns = (*event_schema(spec).names, INGESTION_TIME)
        if "columns" in values:
            chosen = tuple(name.strip() for name in values["columns"].split(",") if name.strip())
            check_columns(chosen, columns, label="The option columns")
            columns = chosen
        return SourceOptions(
            spec=spec,
            pace=pace,
            max_rows_per_epoch=max_rows,
            partitions=_integer(values, "partitions", 1, _PARTITIONS_MAX) or _DEFAULT_PARTITIONS,
            columns=columns,
            event_time_is_arrival=pace.rows_per_epoch is None and "eventsPerSecond" not in values,
        )

    def spec_for(self, arrivals: Schedule) -> WorkloadSpec:
        """Return the specification of the events that arrive on this schedule."""
        return replace(self.spec, schedule=arrivals) if self.event_time_is_arrival else self.spec


def _pace(values: Mapping[str, str]) -> StreamPace:
    rate = _rate(values, "rowsPerSecond")
    per_epoch = _integer(values, "rowsPerEpoch", 1, _ROWS_MAX)
    if rate is not None and per_epoch is not None:
        raise SettingsError("The options rowsPerSecond and rowsPerEpoch exclude each other. Leave one of them out.")
    if per_epoch is None and rate is None:
        rate = _DEFAULT_ROWS_PER_SECOND
    return StreamPace(rows_per_second=rate, rows_per_epoch=per_epoch, rows=_integer(values, "rows", 0, _ROWS_MAX))


def _spec(values: Mapping[str, str]) -> WorkloadSpec:
    spec = WorkloadSpec()
    changes: dict[str, Any] = {
        field: _integer(values, option, *LIMITS[field]) for option, field in _SPEC_INTEGERS.items() if option in values
    }
    skew = _number(values, "skew")
    if skew is not None:
        check_limits({"skew": skew}, label=lambda name: f"The option {name}")
        changes["skew"] = skew
    rate = _rate(values, "eventsPerSecond")
    if rate is not None:
        changes["schedule"] = replace(spec.schedule, rows_per_second=rate)
    return replace(spec, **changes)


def _integer(values: Mapping[str, str], option: str, low: float, high: float) -> int | None:
    if option not in values:
        return None
    try:
        value = int(values[option])
    except ValueError:
        raise SettingsError(f"The option {option} is '{values[option]}'. Give a whole number.") from None
    if not low <= value <= high:
        raise SettingsError(f"The option {option} is {value}. Give a number between {low} and {high}.")
    return value


def _number(values: Mapping[str, str], option: str) -> float | None:
    if option not in values:
        return None
    try:
        value = float(values[option])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SettingsError(f"The option {option} is '{values[option]}'. Give a number.")
    return value


def _rate(values: Mapping[str, str], option: str) -> float | None:
    value = _number(values, option)
    if value is not None and not 0 < value <= _RATE_MAX:
        raise SettingsError(f"The option {option} is {value:g}. Give a number above 0, up to {_RATE_MAX:g}.")
    return value


def register(spark: SparkSession) -> None:
    """Make ``spark.readStream.format("anabranch.workload")`` and ``spark.read...`` known to this session."""
    spark.dataSource.register(WorkloadDataSource)


class WorkloadDataSource(DataSource):
    """The data source as Spark knows it: asked for a schema, then for a reader."""

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
    """Makes the events of a range, in a task. The readers of tables and of streams say which ranges there are."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self.options = options
        self.columns = columns

    def split(self, first: int, end: int, arrivals: Schedule) -> list[EventRange]:
        """Divide events into contiguous ranges of equal size, none of them empty."""
        tasks = min(self.options.partitions, end - first)
        bounds = [first + (end - first) * task // tasks for task in range(tasks + 1)] if tasks > 0 else []
        return [EventRange(low, high, arrivals) for low, high in pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, EventRange)
        spec = self.options.spec_for(partition.arrivals)
        schema = _full_schema(self.options, self.columns)
        made = [name for name in self.columns if name != INGESTION_TIME]
        step = chunk_rows(spec)
        for first in range(partition.first, partition.end, step):
            count = min(step, partition.end - first)
            arrays = {INGESTION_TIME: pa.array(partition.arrivals.times_us(first, count)).view(_TIME)}
            if made:
                batch = next(generate_batches(spec, first, count, made))
                arrays |= dict(zip(made, batch.columns, strict=True))
            yield pa.RecordBatch.from_arrays([arrays[name] for name in self.columns], schema=schema)


class TableReader(EventReader, DataSourceReader):
    """Events 0 .. rows - 1 as a table. Arrival times follow the event schedule, so it is always the same table."""

    def partitions(self) -> list[EventRange]:
        arrivals = self.options.spec.schedule
        if self.options.event_time_is_arrival and self.options.pace.rows_per_second is not None:
            arrivals = replace(arrivals, rows_per_second=self.options.pace.rows_per_second)
        # Spark takes an empty list for "one partition, of no particular kind", so an empty table is an empty range.
        return self.split(0, self.options.pace.rows or 0, arrivals) or [EventRange(0, 0, arrivals)]


def _wall_clock_us() -> int:
    return time.time_ns() // 1000


class StreamReader(EventReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Events as they arrive. Offsets are positions, and hold all that is needed to make the same rows again."""

    def __init__(
        self, options: SourceOptions, columns: tuple[str, ...], clock_us: Callable[[], int] = _wall_clock_us
    ) -> None:
        super().__init__(options, columns)
        self._clock_us = clock_us
        self._pace = options.pace
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
        rows_max = self._pace.rows_per_epoch or self.options.max_rows_per_epoch
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        position = Position.from_json(start)
        self._latest = self._pace.next_position(position, now_us=self._now_us(), rows_max=rows_max)
        # Spark compares offsets as texts, so "nothing new" is the very same document.
        return dict(start) if self._latest == position else self._latest.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return how far the stream could be read by now, from which monitoring tells how far a query is behind."""
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
        return self.split(Position.from_json(start).row, last.row, last.schedule)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Do nothing: events are made anew whenever they are asked for."""

    def _now_us(self) -> int:
        return self._clock_us() if self._closing_us is None else self._closing_us


def _full_schema(options: SourceOptions, columns: tuple[str, ...]) -> pa.Schema:
    fields = {field.name: field for field in event_schema(options.spec)}
    fields[INGESTION_TIME] = pa.field(INGESTION_TIME, _TIME)
    return pa.schema([fields[name] for name in columns])


def _check_schema(options: SourceOptions, schema: StructType) -> tuple[str, ...]:
    """Return the columns to make. A schema that the user gave chooses columns; it cannot change what they are."""
    columns = tuple(schema.fieldNames())
    known = {*event_schema(options.spec).names, INGESTION_TIME}
    given = to_arrow_schema(schema, timezone="UTC")
    if not known.issuperset(columns) or not given.equals(_full_schema(options, columns)):
        raise SettingsError(
            f"The schema '{schema.simpleString()}' does not fit the source's columns. "
            "Leave the schema out, and choose columns by the option columns."
        )
    return columns
