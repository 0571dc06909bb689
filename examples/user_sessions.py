"""Sessions of users: what they did until they were away for 30 minutes, found in two ways that agree.

The first is Spark's session_window in append mode: a row for each session, once, when the watermark has passed its end.
The second is a StatefulProcessor that keeps open sessions in a list and lets an event-time timer close each of them:
the place to start from when a session needs rules that no window has.

Run it with ``.venv/bin/python examples/user_sessions.py`` (less than a minute).
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch

GAP_MS = 30 * 60 * 1000
OUTPUT = "user string, start_ms bigint, end_ms bigint, clicks bigint"
#: Who clicked when; each list is a file, and so an epoch. Bob's click of 9:25 comes late, and makes one session of two.
CLICKS = [
    {"ann": ["09:00", "09:10", "09:25"], "bob": ["09:02", "09:40"]},
    {"bob": ["09:25"], "cyd": ["09:45", "09:46"]},
    {"ann": ["10:30", "10:31"], "cyd": ["10:05"]},
    {"bob": ["12:00"]},
]


class Sessions(StatefulProcessor):
    """Keeps the open sessions of a user, each with its start, its end and the number of its clicks."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.open = handle.getListState("open", "start_ms long, end_ms long, clicks long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002
        clicks = [(row.ms, row.ms + GAP_MS, 1) for row in rows]
        sessions: list[tuple[int, int, int]] = []
        for start, end, count in sorted([*map(tuple, self.open.get()), *clicks]):
            if sessions and start <= sessions[-1][1]:
                first, last, before = sessions.pop()
                sessions.append((first, max(last, end), before + count))
            else:
                sessions.append((start, end, count))
        self.open.put(sessions)
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        for _, end, _ in sessions:
            self.handle.registerTimer(end)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: ARG002
        now_ms = expiredTimerInfo.getExpiryTimeInMs()
        sessions = [tuple(session) for session in self.open.get()]
        if still_open := [session for session in sessions if session[1] > now_ms]:
            self.open.put(still_open)
        else:
            self.open.clear()
        for start, end, clicks in sessions:
            if end <= now_ms:
                yield Row(user=key[0], start_ms=start, end_ms=end, clicks=clicks)


def with_windows(clicks: Any) -> Any:
    counted = clicks.groupBy("user", F.session_window("at", "30 minutes")).agg(F.count("*").alias("clicks"))
    return counted.select("user", "session_window.start", "session_window.end", "clicks")


def with_timers(clicks: Any) -> Any:
    closed = (
        clicks.withColumn("ms", F.unix_millis("at"))
        .groupBy("user")
        .transformWithState(Sessions(), OUTPUT, "append", "eventTime")
    )
    times = (F.timestamp_millis(name).alias(name.removesuffix("_ms")) for name in ("start_ms", "end_ms"))
    return closed.select("user", *times, "clicks")


def main(spark: SparkSession) -> dict[str, list[Row]]:
    """Return the sessions that each of the two ways finds."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "clicks").mkdir()
        for number, users in enumerate(CLICKS):
            rows = [{"user": user, "at": f"2026-01-01 {at}:00"} for user, times in users.items() for at in times]
            file = Path(folder) / "clicks" / f"{number}.json"
            file.write_text("\n".join(map(json.dumps, rows)))
            os.utime(file, (number, number))  # Spark takes files in the order of their times
        for build in (with_windows, with_timers):
            source = spark.readStream.schema("user string, at timestamp").option("maxFilesPerTrigger", 1)
            clicks = anabranch.stream(source.json(f"{folder}/clicks")).withWatermark("at", "30 minutes")
            query = (
                build(clicks)
                .writeStream.outputMode("append")
                .format("memory")
                .queryName(build.__name__)
                .option("checkpointLocation", f"{folder}/{build.__name__}")
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            sessions = spark.table(build.__name__).orderBy("user", "start")
            print(f"{build.__name__}:")
            sessions.show()
            found[build.__name__] = sessions.collect()
    print("Both agree." if found["with_windows"] == found["with_timers"] else "They differ.")
    return found


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
