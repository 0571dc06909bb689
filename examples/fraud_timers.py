"""Fraud detection: a StatefulProcessor with value and map state, and event-time timers that let state go.

Two rules for the payments of a card:
 - a tiny payment, such as thieves make to try a card, and a large one within a minute;
 - payments in three countries within ten minutes.

What a card must remember is small and soon of no use: a timer forgets each piece of it when the watermark says that
nothing older can come. (Time to live, ``getMapState(..., ttlDurationMs)``, goes by the time of day instead, and which
fraud is found must not depend on when the job runs.) The rows are sent by ``anabranch.testing.StreamTest``, which also
kills a state worker and adds one in the middle: the alarms are the same.

Run it with ``.venv/bin/python examples/fraud_timers.py`` (less than a minute).
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from anabranch.testing import KillWorker, Rescale, Rows, Step, StreamTest

TINY, LARGE = 1.0, 500.0
MINUTE_MS = 60_000
COUNTRIES_MS = 10 * MINUTE_MS


class FraudRules(StatefulProcessor):
    """Remembers of a card when it was tried, and where it was used last in the past ten minutes."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.tried = handle.getValueState("tried", "at_ms long")
        self.countries = handle.getMapState("countries", "country string", "at_ms long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002
        for row in sorted(rows, key=lambda row: row.at):
            at_ms = int(row.at.timestamp() * 1000)
            tried = self.tried.get()
            if row.amount >= LARGE and tried and 0 <= at_ms - tried[0] <= MINUTE_MS:
                yield Row(card=key[0], at=row.at, alarm=f"{row.amount:.0f} soon after a tiny payment")
                self.tried.clear()
            if row.amount <= TINY:
                self.tried.update((at_ms,))
                self.handle.registerTimer(at_ms + MINUTE_MS)
            self.countries.updateValue((row.country,), (at_ms,))
            self.handle.registerTimer(at_ms + COUNTRIES_MS)
            near = [country for (country,), (last,) in self.countries.iterator() if at_ms - last < COUNTRIES_MS]
            if len(near) > 2:
                yield Row(card=key[0], at=row.at, alarm=f"in {', '.join(sorted(near))} within ten minutes")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: ARG002
        now_ms = expiredTimerInfo.getExpiryTimeInMs()
        tried = self.tried.get()
        if tried and tried[0] + MINUTE_MS <= now_ms:
            self.tried.clear()
        for country, (last,) in list(self.countries.iterator()):
            if last + COUNTRIES_MS <= now_ms:
                self.countries.removeKey(country)
        return iter(())


def alarms(payments: Any) -> Any:
    return (
        payments.withWatermark("at", "1 minute")
        .stage("rules")
        .groupBy("card")
        .transformWithState(FraudRules(), "card string, at timestamp, alarm string", "append", "eventTime")
    )


def payment(card: str, at: str, amount: float, country: str) -> tuple[str, datetime, float, str]:
    return card, datetime.fromisoformat(f"2026-01-01 {at}"), float(amount), country


STORY: list[Step] = [
    Rows([payment("1111", "12:00:00", 0.5, "DE"), payment("2222", "12:00:10", 20, "FR")]),
    KillWorker(),
    Rows([payment("1111", "12:00:40", 900, "DE"), payment("2222", "12:03:00", 35, "ES")]),
    Rescale(workers=3),
    Rows([payment("2222", "12:06:00", 12, "PT"), payment("3333", "12:06:10", 0.9, "IT")]),
    # Large, but more than a minute after the tiny one.
    Rows([payment("3333", "12:09:00", 800, "IT")]),
]


def main(spark: SparkSession) -> dict[str, Any]:
    """Return the alarms, and how many countries were remembered before and after a quiet hour."""
    schema = "card string, at timestamp, amount double, country string"
    with StreamTest(spark, schema, alarms, outputMode="append") as test:
        found = [row for rows in test.play(STORY) for row in rows]
        for row in found:
            print(f"{row.at:%H:%M:%S} card {row.card}: {row.alarm}")
        before = len(test.state("rules", "countries"))
        test.send([payment("4444", "13:30:00", 10, "DE")])
        after = len(test.state("rules", "countries"))
        print(f"Countries remembered: {before}; an hour later: {after}")
    return {"alarms": [(row.card, row.alarm) for row in found], "before": before, "after": after}


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
