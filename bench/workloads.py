"""The work of the benchmark `operators`: a table of queries, each with its input and the state that it must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bench import user_code
from bench.figures import Budget
from bench.sides import SPARK, Build, Rows, totals
from bench.sources import Size, all_keys, first_sightings, moving_keys, second_sightings, timed_keys

#: With the minutes of the sources it settles what is over in an epoch: always whole epochs of rows, with seconds to
#: spare. What the watermark decides is then the same on both sides, to the row.
_DELAY = "55 seconds"
_SESSION_GAP = "62 seconds"
#: An epoch's minute falls half into one window and half into the next.
_WINDOW, _WINDOW_SHIFT = "1 minute", "22500 milliseconds"
_JOIN = "key = seen_key AND seen_time BETWEEN time AND time + INTERVAL 1 MINUTE"
#: After so many epochs, as much state goes in an epoch as comes.
SETTLED_EPOCHS = 3
_QUICK = Size(2_000, 2)

#: Makes a new stream of 0, 1, 2, …
Numbers = Callable[[], DataFrame]


@dataclass(frozen=True)
class Flow:
    """An input and what is done with it."""

    rows: DataFrame
    build: Build
    #: What it is compared with, on Anabranch as well; None: the same on Spark's own state.
    rival: Build | None = None


@dataclass(frozen=True)
class Workload:
    """A line of the table of work."""

    #: What it is chosen by; several lines may have the same.
    family: str
    text: str
    flow: Callable[[Numbers, Size], Flow]
    #: How many rows of state each side holds after every epoch, once the state has settled.
    state_rows: Callable[[Size], int]
    size: Size
    quick: Size = _QUICK
    mode: str = "append"
    #: Spark takes many seconds for an epoch of the usual size.
    is_slow: bool = False
    #: The name of what it is compared with.
    rival: str = SPARK
    budget: Budget | None = None
    #: A class of the user's that runs for every key on pandas, which takes its time on both sides.
    pandas: type | None = None


def _windows(numbers: Numbers, size: Size) -> Flow:
    def build(rows: Rows) -> Rows:
        window = F.window("time", _WINDOW, _WINDOW, _WINDOW_SHIFT)
        return _totals(rows.withWatermark("time", _DELAY).groupBy(window, "key"))

    return Flow(timed_keys(numbers(), size), build)


def _sessions(numbers: Numbers, size: Size) -> Flow:
    def build(rows: Rows) -> Rows:
        return _totals(rows.withWatermark("time", _DELAY).groupBy(F.session_window("time", _SESSION_GAP), "key"))

    return Flow(moving_keys(numbers(), size), build)


def _totals(grouped: Any) -> Rows:
    return grouped.agg(F.count(F.lit(1)).alias("rows"), F.sum("amount").alias("total"))


def _joins(numbers: Numbers, size: Size) -> Flow:
    seen = second_sightings(numbers(), size).toDF("seen_key", "seen_amount", "seen_time")
    others = seen.withWatermark("seen_time", _DELAY)

    def build(rows: Rows) -> Rows:
        return rows.withWatermark("time", _DELAY).join(others, F.expr(_JOIN))

    return Flow(first_sightings(numbers(), size), build)


def _duplicates(numbers: Numbers, size: Size) -> Flow:
    def build(rows: Rows) -> Rows:
        return rows.withWatermark("time", _DELAY).dropDuplicatesWithinWatermark(["key"])

    return Flow(moving_keys(numbers(), size), build)


def _event_timers(method: str, processor: type, numbers: Numbers, size: Size) -> Flow:
    def build(rows: Rows) -> Rows:
        grouped = rows.withWatermark("time", "0 seconds").groupBy("key")
        return getattr(grouped, method)(processor(), user_code.OUTPUT, "Update", "EventTime")

    return Flow(moving_keys(numbers(), size).withColumn("time_ms", F.unix_millis("time")), build)


def _time_to_live(method: str, processor: type, numbers: Numbers, size: Size) -> Flow:
    def build(rows: Rows) -> Rows:
        return getattr(rows.groupBy("key"), method)(processor(), user_code.OUTPUT, "Update", "ProcessingTime")

    return Flow(all_keys(numbers(), size.keys), build)


def _vectorised(numbers: Numbers, size: Size) -> Flow:
    def build(rows: Rows) -> Rows:
        return rows.groupBy("key").processInArrow(user_code.arrow_totals, user_code.OUTPUT, user_code.STATE)

    return Flow(all_keys(numbers(), size.keys), build, rival=totals)


def _processed(text: str, flow: Any, rows: type, pandas: type, state_rows: Callable[[Size], int]) -> list[Workload]:
    """Make the lines of a StatefulProcessor on rows and on pandas."""
    kinds = [
        ("rows", "transformWithState", rows, Budget(bound=20, aim=50)),
        ("pandas", "transformWithStateInPandas", pandas, Budget(bound=10, aim=30)),
    ]
    return [
        Workload(
            "timers", f"{text}, {kind}", partial(flow, method, processor), state_rows, Size(20_000, 1),
            quick=Size(200, 2), mode="update", is_slow=True, budget=budget,
            pandas=processor if kind == "pandas" else None,
        )
        for kind, method, processor, budget in kinds
    ]  # fmt: skip


def _as_many(size: Size) -> int:
    return size.keys


def _three_halves(size: Size) -> int:
    return 3 * size.half


WORKLOADS = (
    # An epoch goes on with one window of half the keys and begins the next; one that is over waits for the watermark.
    Workload("windows", "window count and sum", _windows, _three_halves, Size(200_000, 10)),
    # Those of an epoch's new keys, of its old ones, and of two epochs before.
    Workload("sessions", "session count and sum", _sessions, lambda size: 4 * size.half, Size(200_000, 2)),
    # Three epochs of first sightings and two of second ones.
    Workload("joins", "inner join, each side", _joins, lambda size: 5 * size.rows, Size(200_000, 1)),
    # The new keys of three epochs.
    Workload("duplicates", "dropDuplicatesWithinWatermark", _duplicates, _three_halves, Size(200_000, 2)),
    *_processed("timer", _event_timers, user_code.RowSessions, user_code.PandasSessions, _three_halves),
    *_processed("TTL", _time_to_live, user_code.FadingRowTotals, user_code.FadingPandasTotals, _as_many),
    *[
        Workload(
            "vectorised", "processInArrow", _vectorised, _as_many, Size(200_000, rows), Size(2_000, rows),
            mode="update", rival="agg",
            # Within 1.5 times as long.
            budget=Budget(bound=0.67, aim=1.0),
        )
        for rows in (1, 10)
    ],
)  # fmt: skip
FAMILIES = tuple(dict.fromkeys(workload.family for workload in WORKLOADS))


def chosen(families: str) -> list[Workload]:
    """Return the lines of the families that a text names, with commas between; ValueError if it names another."""
    names = [name.strip() for name in families.split(",") if name.strip()]
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        raise ValueError(f"{families!r} is not a choice of {', '.join(FAMILIES)}, with commas between.")
    return [workload for workload in WORKLOADS if workload.family in names]
