"""Every operator's state is rescaled, recovered and migrated as all state is: what comes out stays the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from anabranch.testing import KillWorker, Rescale, Restart, Rows, Step, StreamTest

SCHEMA = "kind string, user string, at timestamp, amount bigint"
NOON = datetime(2026, 1, 1, 12)


def epoch(number: int) -> Rows:
    """Rows of many users, each with one that comes again, and an order of times that is not quite that of arrival."""
    rows = []
    for user in range(40):
        at = NOON + timedelta(seconds=20 * number + (user * 7) % 13 - (9 if user % 5 == 0 else 0))
        rows.append(("view" if user % 2 else "click", f"user{user % 23}", at, user + number))
    return Rows([*rows, rows[number]])


#: Far enough in the future to let everything go out that waits for event time.
LAST = Rows([("view", "nobody", NOON + timedelta(hours=2), 1), ("click", "nobody", NOON + timedelta(hours=2), 1)])
INPUTS = [*map(epoch, range(5)), LAST]
#: After each of the inputs but the last.
DISTURBANCES: list[list[Step]] = [
    [Rescale(workers=3, parallelism=3)],
    [KillWorker(1)],
    [Rescale(workers=1)],
    [Restart(crash=True, settings={"workers": 2})],
    [Rescale(workers=3), KillWorker(2)],
]


def windows(stream: Any) -> Any:
    rows = stream.withWatermark("at", "10 seconds").groupBy(F.window("at", "30 seconds", "15 seconds"), "user")
    return rows.agg(F.count("*").alias("n"), F.avg("amount").alias("mean"), F.collect_set("kind").alias("kinds"))


def sessions(stream: Any) -> Any:
    rows = stream.withWatermark("at", "10 seconds").groupBy(F.session_window("at", "15 seconds"), "user")
    return rows.agg(F.sum("amount").alias("total"), F.stddev("amount").alias("spread"))


def duplicates(stream: Any) -> Any:
    return (
        stream.withWatermark("at", "10 seconds").dropDuplicatesWithinWatermark(["user", "kind"]).select("user", "kind")
    )


def matches(stream: Any) -> Any:
    rows = stream.withWatermark("at", "10 seconds")
    views = rows.filter("kind = 'view'").select(F.col("user").alias("viewer"), F.col("at").alias("seen"), "amount")
    clicks = rows.filter("kind = 'click'").select("user", F.col("at").alias("clicked"))
    near = F.expr("viewer = user and clicked >= seen and clicked <= seen + interval 30 seconds")
    return views.join(clicks, near, "left_outer")


def timers(stream: Any) -> Any:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Visits(StatefulProcessor):
        """Ends a visit after 15 seconds without rows; keeps what it saw in a value, a list and a map."""

        def init(self, handle: Any) -> None:
            self._handle = handle
            self._count = handle.getValueState("count", "n bigint")
            self._amounts = handle.getListState("amounts", "amount bigint")
            self._kinds = handle.getMapState("kinds", "kind string", "n bigint")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            del key, timerValues
            for timer in list(self._handle.listTimers()):
                self._handle.deleteTimer(timer)
            seen = sorted(rows, key=lambda row: (row.at, row.amount))
            self._count.update(((self._count.get() or (0,))[0] + len(seen),))
            for row in seen:
                self._amounts.appendValue((row.amount,))
                self._kinds.updateValue((row.kind,), ((self._kinds.getValue((row.kind,)) or (0,))[0] + 1,))
            self._handle.registerTimer(int(seen[-1].at.timestamp() * 1000) + 15_000)
            yield from ()

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
            from pyspark.sql import Row

            del timerValues, expiredTimerInfo
            kinds = sorted((kind[0], n[0]) for kind, n in self._kinds.iterator())
            amounts = sorted(amount for (amount,) in self._amounts.get())
            yield Row(user=key[0], visit=f"{self._count.get()[0]} {amounts} {kinds}")
            self._count.clear()
            self._amounts.clear()
            self._kinds.clear()

        def close(self) -> None:
            pass

    rows = stream.withWatermark("at", "10 seconds").groupBy("user")
    return rows.transformWithState(Visits(), "user string, visit string", "append", "eventTime")


def outputs(spark: SparkSession, build: Callable[[Any], Any], steps: Sequence[Step], store: str) -> Counter[str]:
    with StreamTest(spark, SCHEMA, build, outputMode="append", store=store) as test:
        return Counter(str(row) for rows in test.play(steps) for row in rows)


@pytest.mark.parametrize(
    ("build", "store"),
    [(windows, "memory"), (sessions, "rocksdb"), (duplicates, "memory"), (matches, "rocksdb"), (timers, "memory")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_comes_out_is_what_an_undisturbed_run_gives(
    spark: SparkSession, build: Callable[[Any], Any], store: str
) -> None:
    quiet = outputs(spark, build, INPUTS, store)
    disturbed: list[Step] = []
    for position, rows in enumerate(INPUTS):
        disturbed += [rows, *(DISTURBANCES[position] if position < len(DISTURBANCES) else [])]
    assert outputs(spark, build, disturbed, store) == quiet
    assert len(quiet) > 20
