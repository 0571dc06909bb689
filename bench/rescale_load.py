"""The load of the benchmark `rescale`: first every key once, to fill the state; then so many rows a second.

The source is the one that Spark keeps in its driver's memory. Rows wait there while a query is down, and starting a
query again costs nothing on their account; a source in Python would add a second to every restart, Spark's too.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench.session import Lab
from bench.sources import loaded_keys

#: Rows come in bundles, as from a message broker: one bundle in this time.
_BUNDLE_S = 0.05
_ROWS_PER_KEY = 2
_FILL_ROWS_MAX = 500_000

#: Spark tells its in-memory sources apart by their numbers.
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Load:
    """Which rows come, and when: the same for every query."""

    keys: int
    rows_per_second: int

    @property
    def bundle_rows(self) -> int:
        return max(1, round(self.rows_per_second * _BUNDLE_S))

    @property
    def fill_bundles(self) -> int:
        """The bundles that hold every key once."""
        return -(-self.keys // self.bundle_rows)

    def come_s(self, bundle: int) -> float:
        """Return when a bundle comes, in seconds from when the first after the fill does."""
        return max(0, bundle - self.fill_bundles) * self.bundle_rows / self.rows_per_second

    def due(self, passed_s: float) -> int:
        """Return the number of the first bundle that has not come after these seconds."""
        return self.fill_bundles + int(passed_s * self.rows_per_second / self.bundle_rows) + 1

    def rows(self, bundles: DataFrame) -> DataFrame:
        """Make the rows of bundles, in columns `key` and `amount`: after the fill, keys from all over the state."""
        first = F.col("value").cast("long") * self.bundle_rows
        values = bundles.select(F.explode(F.sequence(first, first + self.bundle_rows - 1)).alias("value"))
        return loaded_keys(values, self.keys, rows_per_key=_ROWS_PER_KEY)


class Feed:
    """The bundles of a load on their way into a stream: fill it, let it flow, and close it."""

    def __init__(self, lab: Lab, load: Load, *, partitions: int) -> None:
        self._load = load
        self._jvm: Any = lab.spark.sparkContext._jvm
        self._memory = _memory_stream(lab.spark, self._jvm, partitions)
        #: How many bundles there were after each time that some were fed: Spark's offsets count those times.
        self._ends: list[int] = []
        self._began_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._flow, name="bench-feed", daemon=True)
        self.rows = load.rows(DataFrame(self._memory.toDF(), lab.spark))

    @property
    def bundles(self) -> int:
        """How many bundles have been fed."""
        return self.end_of(len(self._ends) - 1)

    @property
    def row_count(self) -> int:
        """How many rows have been fed."""
        return self.bundles * self._load.bundle_rows

    def end_of(self, offset: int) -> int:
        """Return the number of the first bundle beyond one of Spark's offsets."""
        return self._ends[offset] if offset >= 0 else 0

    def fill(self, wait_until_done: Callable[[], None]) -> None:
        """Feed every key once, in pieces; the function waits until all that was fed has been processed."""
        step = max(1, _FILL_ROWS_MAX // self._load.bundle_rows)
        while self.bundles < self._load.fill_bundles:
            self._feed(min(self.bundles + step, self._load.fill_bundles))
            wait_until_done()

    def start(self) -> None:
        """Let the rows come that come at a rate."""
        self._began_s = time.time()
        self._thread.start()

    def came_s(self, bundle: int) -> float:
        """Return when a bundle came, by the clock on the wall; one that came late counts from when it was due."""
        return self._began_s + self._load.come_s(bundle)

    def close(self) -> None:
        """Let no more rows come."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _flow(self) -> None:
        while not self._closed.wait(max(0.0, self.came_s(self.bundles) - time.time())):
            self._feed(self._load.due(time.time() - self._began_s))

    def _feed(self, end: int) -> None:
        fed = self.bundles
        if end > fed:
            # An epoch that takes these bundles may be reported before the call returns.
            self._ends.append(end)
            self._memory.addData(self._jvm.PythonUtils.toSeq(list(range(fed, end))))


def _memory_stream(spark: SparkSession, jvm: Any, partitions: int) -> Any:
    streams = jvm.org.apache.spark.sql.execution.streaming.runtime
    numbers = jvm.org.apache.spark.sql.Encoders.INT()
    return streams.MemoryStream(next(_numbers), spark._jsparkSession, jvm.scala.Some(partitions), numbers)
