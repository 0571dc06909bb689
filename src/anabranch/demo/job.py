"""The job in PySpark's own words: 0 source, 1 filter, 2 work, 3 count, 4 a sink that notes how long rows took."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.api.query import StreamQuery
from anabranch.api.stream import Stream
from anabranch.demo.options import DemoOptions, RecordedEvents
from anabranch.demo.stages import COUNTED, CountPerServer, Work, prepare_task
from anabranch.workload.latency import Latencies, Millis, append_latencies, summary
from anabranch.workload.source import NAME as WORKLOAD
from anabranch.workload.source import register

#: The stages by number.
STAGES = ("source", "filter", "work", "count", "sink")
#: The one with state, which a rescale is about.
COUNT_STAGE = STAGES.index("count")
#: How much of the past percentiles and rates are taken from.
RECENT_S = 5.0

_REMEMBERED_EPOCHS = 10_000


@dataclass(frozen=True)
class LatencyPoint:
    """The latency of an epoch's rows, and when they had come to the sink."""

    reached_s: float
    p50_ms: int
    p99_ms: int


class LatencySink:
    """The function of foreachBatch: a file of latency lines for each epoch. One that runs again replaces its lines."""

    def __init__(self, directory: Path, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        #: When the rows of the last epochs had come, and how long each of them took.
        self._recent: deque[tuple[float, Millis]] = deque()
        self._history: deque[LatencyPoint] = deque(maxlen=_REMEMBERED_EPOCHS)
        self._rows: dict[int, int] = {}

    def record_latency(self, rows: DataFrame, epoch: int) -> None:
        arrived = rows.select("ingestion_time").toArrow().column(0)
        self.note(epoch, Latencies.between(arrived, datetime.now(UTC)))

    def note(self, epoch: int, latencies: Latencies) -> None:
        """Keep the lines of an epoch, in its file and for the view."""
        path = self._path(epoch)
        hidden = path.with_name(f".{path.name}.tmp")
        hidden.unlink(missing_ok=True)
        append_latencies(hidden, latencies)
        hidden.replace(path)
        now_s, figures = self._monotonic_s(), summary(latencies)
        with self._lock:
            self._recent.append((now_s, latencies.latency_ms))
            self._rows[epoch] = figures["count"]
            if figures["count"]:
                self._history.append(LatencyPoint(now_s, figures["p50_ms"], figures["p99_ms"]))

    def discard_after(self, epoch: int) -> None:
        """Forget the epochs after this one, and remove their lines."""
        with self._lock:
            for later in [number for number in self._rows if number > epoch]:
                del self._rows[later]
                self._path(later).unlink(missing_ok=True)

    def rows_of(self, epoch: int) -> int:
        """Return how many rows of an epoch have come."""
        with self._lock:
            return self._rows.get(epoch, 0)

    def rows_until(self, epoch: int) -> int:
        """Return how many rows of the epochs up to this one have come."""
        with self._lock:
            return sum(rows for number, rows in self._rows.items() if number <= epoch)

    def history(self) -> tuple[LatencyPoint, ...]:
        """Return the latency of each epoch so far."""
        with self._lock:
            return tuple(self._history)

    def recent_latencies(self) -> Latencies:
        """Return how long the rows of the last seconds took; when they arrived is not kept."""
        since_s = self._monotonic_s() - RECENT_S
        with self._lock:
            while self._recent and self._recent[0][0] < since_s:
                self._recent.popleft()
            latency_ms = np.concatenate([np.empty(0, np.int64), *(waited_ms for _, waited_ms in self._recent)])
        return Latencies(np.zeros_like(latency_ms), latency_ms)

    def _path(self, epoch: int) -> Path:
        return self.directory / f"epoch-{epoch:08d}.csv"


def read_edits(spark: SparkSession, options: DemoOptions, recorded: RecordedEvents | None) -> DataFrame:
    """Read stage 0: edits as they are made up, or one file of recorded ones in each epoch."""
    if recorded is not None:
        reader = spark.readStream.format(recorded.format).schema(recorded.schema).option("maxFilesPerTrigger", 1)
        if recorded.format == "csv":
            reader = reader.option("header", True)
        # Spark's current time is that of the epoch's beginning: this is when rows of a file arrive.
        edits = reader.load(str(recorded.directory.absolute()))
        return edits.select("id", "server_name", F.current_timestamp().alias("ingestion_time"))
    register(spark)
    return (
        spark.readStream.format(WORKLOAD)
        .option("columns", "id,server_name,ingestion_time")
        .option("rowsPerSecond", options.rate)
        .option("rows", options.rows)
        .option("maxRowsPerEpoch", options.max_rows_per_epoch)
        .option("partitions", options.parallelism)
        .option("keys", options.keys)
        .option("skew", options.skew)
        .load()
    )


def build_job(spark: SparkSession, options: DemoOptions, recorded: RecordedEvents | None = None) -> Stream:
    """Build stages 0 to 3; the sink is given when the job is started."""
    edits = read_edits(spark, options, recorded)
    work = Work(options.work_ms / 1000)
    count = CountPerServer(cpu_s_per_row=options.count_ms / 1000, junk_bytes=options.junk_bytes)
    counted: Stream = (
        anabranch.stream(edits)
        .stage("filter")
        .filter(F.col("id") % 4 != 0)
        # Generated edits come in as many partitions as are wanted; a recorded file may be a single one.
        .stage("work", parallelism=None if recorded is None else options.parallelism)
        .mapInArrow(work, edits.schema)
        .stage("count")
        .groupBy("server_name")
        .transformWithState(count, COUNTED, "update", "none")
    )
    return counted


def warm_up(spark: SparkSession, options: DemoOptions) -> None:
    """Start the Python side of tasks, so that the first rows do not wait for it."""
    spark.range(options.parallelism, numPartitions=options.parallelism).mapInArrow(prepare_task, "id LONG").collect()


def start_job(job: Stream, options: DemoOptions, sink: LatencySink, checkpoint: Path) -> StreamQuery:
    """Start the job, with stage 4: a sink that notes how long each row took."""
    settings: dict[str, Any] = {
        "anabranch.workers": options.workers,
        "anabranch.parallelism": options.parallelism,
        "anabranch.store": options.store,
        "anabranch.migration": options.migration,
        "anabranch.routingCache": options.routing_cache,
        "anabranch.drain": options.drain,
    }
    if options.redis_url is not None:
        settings["anabranch.redisUrl"] = options.redis_url
    return (
        job.writeStream.outputMode("update")
        .queryName("demo")
        .foreachBatch(sink.record_latency)
        .trigger(processingTime=options.trigger)
        .option("checkpointLocation", str(checkpoint))
        .options(**settings)
        .start()
    )
