"""Pipelines of all kinds of stateful operators, over events. They work on a DataFrame of Spark's as well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

# Tasks run in processes that do not have this package on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

EVENTS = "kind string, user string, at timestamp, amount bigint"
_DELAY = "10 seconds"
#: How long a user may be away before a visit ends.
_AWAY_MS = 5_000

Pipeline = Callable[[Any], Any]


def windows(events: Any) -> Any:
    rows = events.withWatermark("at", _DELAY).groupBy(F.window("at", "30 seconds", "15 seconds"), "user")
    return rows.agg(F.count("*").alias("n"), F.avg("amount").alias("mean"), F.collect_set("kind").alias("kinds"))


def windows_of_windows(events: Any) -> Any:
    short = events.withWatermark("at", _DELAY).groupBy(F.window("at", "10 seconds"), "user", "kind")
    counted = short.agg(F.count("*").alias("n")).select(F.window_time("window").alias("at"), "kind", "n")
    long = counted.groupBy(F.window("at", "1 minute").alias("minute"), "kind")
    return long.agg(F.sum("n").alias("n"), F.count("*").alias("users"), F.max("n").alias("most"))


def sessions(events: Any) -> Any:
    rows = events.withWatermark("at", _DELAY).groupBy(F.session_window("at", "15 seconds"), "user")
    return rows.agg(F.sum("amount").alias("total"), F.stddev("amount").alias("spread"))


def duplicates(events: Any) -> Any:
    """What comes in the same second of a minute; so all duplicates of an epoch have one time, whichever is first."""
    rows = events.withColumn("second", F.second("at")).withWatermark("at", _DELAY)
    return rows.dropDuplicatesWithinWatermark(["user", "kind", "second"]).select("user", "kind", "at")


def _views_and_clicks(events: Any) -> tuple[Any, Any]:
    rows = events.withWatermark("at", _DELAY)
    views = rows.filter("kind = 'view'").select(F.col("user").alias("viewer"), F.col("at").alias("seen"), "amount")
    return views, rows.filter("kind = 'click'").select("user", F.col("at").alias("clicked"))


def matches(events: Any) -> Any:
    views, clicks = _views_and_clicks(events)
    near = F.expr("viewer = user and clicked >= seen and clicked <= seen + interval 30 seconds")
    return views.join(clicks, near, "full_outer")


# --------------------------------------------------------------------------------------------------- processors


class Visits(StatefulProcessor):
    """Ends a visit after a while without rows; keeps what it saw in a value, a list and a map."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n bigint")
        self._amounts = handle.getListState("amounts", "amount bigint")
        self._kinds = handle.getMapState("kinds", "kind string", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del key, timerValues
        for timer in list(self._handle.listTimers()):
            self._handle.deleteTimer(timer)
        seen = sorted((row.ms, row.amount, row.kind) for row in rows)
        self._count.update(((self._count.get() or (0,))[0] + len(seen),))
        for _, amount, kind in seen:
            self._amounts.appendValue((amount,))
            self._kinds.updateValue((kind,), ((self._kinds.getValue((kind,)) or (0,))[0] + 1,))
        self._handle.registerTimer(seen[-1][0] + _AWAY_MS)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        del timerValues, expiredTimerInfo
        kinds = sorted((kind[0], n[0]) for kind, n in self._kinds.iterator())
        amounts = sorted(amount for (amount,) in self._amounts.get())
        yield Row(user=key[0], visit=f"{self._count.get()} {amounts} {kinds}")
        self._count.clear()
        self._amounts.clear()
        self._kinds.clear()

    def close(self) -> None:
        pass


def visits(events: Any) -> Any:
    rows = events.withColumn("ms", F.unix_millis("at")).withWatermark("at", _DELAY).groupBy("user")
    return rows.transformWithState(Visits(), "user string, visit string", "append", "eventTime")


def absences(events: Any) -> Any:
    """When users were last seen, and what they had spent, once they have been away for a while."""

    def note(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        spent, last_ms = state.get if state.exists else (0, 0)
        if state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"user": [key[0]], "spent": [spent], "last_ms": [last_ms]})
            return
        for frame in frames:
            spent, last_ms = spent + int(frame.amount.sum()), max(last_ms, int(frame.ms.max()))
        state.update((spent, last_ms))
        state.setTimeoutTimestamp(max(last_ms + _AWAY_MS, state.getCurrentWatermarkMs() + 1))

    rows = events.withColumn("ms", F.unix_millis("at")).withWatermark("at", _DELAY).groupBy("user")
    output = "user string, spent bigint, last_ms bigint"
    return rows.applyInPandasWithState(note, output, "spent bigint, last_ms bigint", "append", "EventTimeTimeout")


def totals(events: Any) -> Any:
    """In columns, all users of a partition at once. Spark has no such operator: `totals_by_spark` gives the same."""

    def add(keys: pa.Table, rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        of_key = rows.group_by("_key").aggregate([("amount", "sum"), ("amount", "count")]).sort_by("_key")
        n = pc.add(pc.fill_null(state["n"], 0), of_key["amount_count"])
        total = pc.add(pc.fill_null(state["total"], 0), of_key["amount_sum"])
        return pa.table({"user": keys["user"], "n": n, "total": total}), pa.table({"n": n, "total": total})

    return events.groupBy("user").processInArrow(add, "user string, n bigint, total bigint", "n bigint, total bigint")


def totals_by_spark(events: Any) -> Any:
    return events.groupBy("user").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))


# ---------------------------------------------------------------------------- duplicates and joins of other kinds


def firsts(events: Any) -> Any:
    """Whatever a user has ever done, once. All columns are compared, so it makes no difference which row is first."""
    return events.select("user", "kind", F.pmod("amount", F.lit(5)).alias("fifth")).dropDuplicates()


def pairs(events: Any) -> Any:
    """Views, each with the clicks of the same user that came before or after it."""
    views, clicks = _views_and_clicks(events)
    near = "viewer = user and clicked >= seen - interval 20 seconds and clicked <= seen + interval 20 seconds"
    return views.join(clicks, F.expr(near))


_FOLLOWED = "viewer = user and clicked > seen and clicked <= seen + interval 30 seconds"


def answered(events: Any) -> Any:
    """Views that were followed by a click, once each."""
    views, clicks = _views_and_clicks(events)
    return views.join(clicks, F.expr(_FOLLOWED), "left_semi")


def answered_by_spark(events: Any) -> Any:
    """The same by an inner join: Spark's semi join leaves out some rows (see docs/compatibility.md)."""
    views, clicks = _views_and_clicks(events)
    joined = views.withColumn("id", F.expr("uuid()")).join(clicks, F.expr(_FOLLOWED))
    return joined.dropDuplicates(["id"]).select(*views.columns)


# ------------------------------------------------------------------------------------------------ processing time

#: How long a user's balance waits for rows, and how long it is known what the user did. In soaks nobody can tell what
#: time it is in an epoch that is repeated: for queries whose clock stands still.
_WAIT_MS = 20_000
_KNOWN_MS = 30_000


class Balances(StatefulProcessor):
    """Gives out what a user spent after a while without rows, and with every row what the user did lately."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._spent = handle.getValueState("spent", "total bigint")
        self._kinds = handle.getMapState("kinds", "kind string", "n bigint", _KNOWN_MS)
        self._amounts = handle.getListState("amounts", "amount bigint", _KNOWN_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        frame = pd.concat(list(rows))
        for timer in list(self._handle.listTimers()):
            self._handle.deleteTimer(timer)
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + _WAIT_MS)
        self._spent.update(((self._spent.get() or (0,))[0] + int(frame.amount.sum()),))
        for kind, n in frame.groupby("kind").size().items():
            self._kinds.updateValue((kind,), ((self._kinds.getValue((kind,)) or (0,))[0] + int(n),))
        self._amounts.appendList([(int(amount),) for amount in sorted(frame.amount)])
        kinds = sorted((kind, n) for (kind,), (n,) in self._kinds.iterator())
        yield self._row(key, f"{kinds} {sorted(amount for (amount,) in self._amounts.get())}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        late_ms = timerValues.getCurrentProcessingTimeInMs() - expiredTimerInfo.getExpiryTimeInMs()
        yield self._row(key, f"away, and noticed {late_ms} ms later")
        self._spent.clear()

    def _row(self, key: Any, about: str) -> pd.DataFrame:
        return pd.DataFrame({"user": [key[0]], "total": [(self._spent.get() or (0,))[0]], "about": [about]})

    def close(self) -> None:
        pass


def balances(events: Any) -> Any:
    """Of some of the rows, so that not every user is there all the time."""
    rows = events.where("pmod(amount, 3) = 0").groupBy("user")
    output = "user string, total bigint, about string"
    return rows.transformWithStateInPandas(Balances(), output, "append", "processingTime")
