"""The options of the ``anabranch.workload`` source, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from anabranch.core.errors import SettingsError
from anabranch.workload.events import LIMITS, WorkloadSpec, check_columns, check_limits, event_schema
from anabranch.workload.schedule import Pace, Schedule

#: When a row entered the stream; the source adds it to the columns of the events.
INGESTION_TIME = "ingestion_time"

#: As Spark's own rate source.
DEFAULT_ROWS_PER_SECOND = 1.0
DEFAULT_PARTITIONS = 2

_PARTITIONS_MAX = 10_000
_ROWS_MAX = 2**53
_RATE_MAX = 1e9
_SPEC_OPTIONS = {
    "keys": "keys",
    "ids": "ids",
    "skew": "skew",
    "seed": "seed",
    "payloadBytes": "payload_bytes",
    "disorderMs": "disorder_ms",
}
OPTION_NAMES = (
    "rowsPerSecond",
    "rowsPerEpoch",
    "maxRowsPerEpoch",
    "rows",
    "partitions",
    "columns",
    "eventsPerSecond",
    *_SPEC_OPTIONS,
)


@dataclass(frozen=True)
class SourceOptions:
    """What the user asked the source for."""

    spec: WorkloadSpec
    pace: Pace
    #: The most rows that one epoch takes when a stream with a rate is behind; None is no bound.
    max_rows_per_epoch: int | None
    partitions: int
    columns: tuple[str, ...]
    #: Whether event times follow the arrival of the rows, rather than a pace of their own.
    event_time_is_arrival: bool

    @staticmethod
    def parse(given: Mapping[str, str]) -> SourceOptions:
        """Check the options of a reader. Their names count without regard to case, as in all of Spark."""
        values = _Values(given)
        pace = _pace(values)
        spec = _spec(values)
        max_rows = values.integer("maxRowsPerEpoch", 1, _ROWS_MAX)
        if max_rows is not None and pace.rows_per_epoch is not None:
            raise SettingsError(
                "The option maxRowsPerEpoch bounds a stream that has a rate, but rowsPerEpoch is given, which is "
                "exact. Leave one of the two out."
            )
        return SourceOptions(
            spec=spec,
            pace=pace,
            max_rows_per_epoch=max_rows,
            partitions=values.integer("partitions", 1, _PARTITIONS_MAX) or DEFAULT_PARTITIONS,
            columns=_columns(values, spec),
            event_time_is_arrival=pace.rows_per_epoch is None and "eventsPerSecond" not in values,
        )

    def spec_for(self, arrivals: Schedule) -> WorkloadSpec:
        """The specification of the events that arrive on this schedule."""
        return replace(self.spec, schedule=arrivals) if self.event_time_is_arrival else self.spec


class _Values:
    """The options by name, each converted or refused with its name in the message."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        known = {name.lower(): name for name in OPTION_NAMES}
        for name in self._given:
            if name not in known:
                near = get_close_matches(name, known, 1)
                advice = f"Did you mean {known[near[0]]}?" if near else f"Choose from {', '.join(OPTION_NAMES)}."
                raise SettingsError(f"The option {name} of the anabranch.workload source is unknown. {advice}")

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def text(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def integer(self, name: str, low: float, high: float) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            raise SettingsError(f"The option {name} is '{text}'. Give a whole number.") from None
        if not low <= value <= high:
            raise SettingsError(f"The option {name} is {value}. Give a number between {low} and {high}.")
        return value

    def number(self, name: str) -> float | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise SettingsError(f"The option {name} is '{text}'. Give a number.")
        return value

    def rate(self, name: str) -> float | None:
        value = self.number(name)
        if value is not None and not 0 < value <= _RATE_MAX:
            raise SettingsError(f"The option {name} is {value:g}. Give a number above 0, up to {_RATE_MAX:g}.")
        return value


def _pace(values: _Values) -> Pace:
    rate = values.rate("rowsPerSecond")
    per_epoch = values.integer("rowsPerEpoch", 1, _ROWS_MAX)
    if rate is not None and per_epoch is not None:
        raise SettingsError("The options rowsPerSecond and rowsPerEpoch exclude each other. Leave one of them out.")
    if per_epoch is None and rate is None:
        rate = DEFAULT_ROWS_PER_SECOND
    return Pace(rows_per_second=rate, rows_per_epoch=per_epoch, rows=values.integer("rows", 0, _ROWS_MAX))


def _spec(values: _Values) -> WorkloadSpec:
    spec = WorkloadSpec()
    changes: dict[str, float] = {}
    for option, field in _SPEC_OPTIONS.items():
        value = values.number(option) if field == "skew" else values.integer(option, *LIMITS[field])
        if value is not None:
            check_limits({field: value}, label=lambda _, option=option: f"The option {option}")  # type: ignore[misc]
            changes[field] = value
    rate = values.rate("eventsPerSecond")
    schedule = spec.schedule if rate is None else replace(spec.schedule, rows_per_second=rate)
    return replace(spec, schedule=schedule, **changes)  # type: ignore[arg-type]


def _columns(values: _Values, spec: WorkloadSpec) -> tuple[str, ...]:
    known = [*event_schema(spec).names, INGESTION_TIME]
    text = values.text("columns")
    if text is None:
        return tuple(known)
    chosen = tuple(name.strip() for name in text.split(",") if name.strip())
    check_columns(chosen, known, label="The option columns")
    return chosen
