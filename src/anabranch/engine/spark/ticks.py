"""Epochs without rows: a source of no rows at all, whose offset moves when the driver wishes for an epoch.

Spark runs nothing while a stream is idle, but windows end, timers are due and state expires all the same. A wish is a
number in a file of the driver's machine, another one each time. As Spark itself logs the offset, an epoch without rows
is repeated after a crash like any other.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

NAME = "anabranch.ticks"
#: The one field of an offset: how many wishes have come true.
TICK = "tick"
_FILE = "file"
#: How often a stage that goes by the time of day runs while no rows come.
IDLE_INTERVAL_S = 1.0


class Ticks:
    """Wishes for epochs without rows, in the driver."""

    def __init__(self, *, after_rows: bool = True) -> None:
        #: Whether each epoch with rows is followed by one more.
        self._after_rows = after_rows
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-ticks-"))
        #: What readers look at: it holds the number of the newest wish, and is there from the first one on.
        self.file = self._folder / "wish"
        self._wishes = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._last_epoch_s = time.monotonic()

    def added_to(self, rows: DataFrame) -> DataFrame:
        """Returns the same rows, from a stream that also runs when an epoch is wished for."""
        spark = rows.sparkSession
        spark.dataSource.register(TickSource)
        ticks = spark.readStream.format(NAME).option(_FILE, str(self.file)).load()
        return rows.union(ticks.select(*[F.lit(None).cast(field.dataType).alias(field.name) for field in rows.schema]))

    def wish(self) -> None:
        """Lets an epoch run, if only without rows."""
        with self._lock:
            if self._ended.is_set():
                return
            self._wishes += 1
            new = self.file.with_suffix(".new")
            new.write_text(str(self._wishes))
            new.replace(self.file)

    def note_epoch(self, *, had_rows: bool) -> None:
        """Notes the end of an epoch. One that had rows may have moved the watermark, so another one is wished for."""
        self._last_epoch_s = time.monotonic()
        if had_rows and self._after_rows:
            self.wish()

    def note_restart(self) -> None:
        """Notes that the query goes on after another driver, which may have ended before an epoch that was due."""
        if self._after_rows:
            self.wish()

    def keep_wishing(self) -> None:
        """Lets an epoch run every now and then while no rows come."""
        threading.Thread(target=self._keep_wishing, name="anabranch-ticks", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep_wishing(self) -> None:
        while not self._ended.wait(IDLE_INTERVAL_S):
            if time.monotonic() - self._last_epoch_s >= IDLE_INTERVAL_S:
                self.wish()


class TickSource(DataSource):
    """Gives Spark the schema and the reader."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return f"{TICK} bigint"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        del schema
        return TickReader(self.options[_FILE])


class TickReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Gives Spark offsets without rows. Runs in a process of its own, beside the driver."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        #: The newest wish that was seen, and the offset at that time.
        self._wish, self._seen_at = 0, 0

    def initialOffset(self) -> dict[str, Any]:
        return {TICK: 0}

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        del limit
        try:
            wish = int(self._file.read_text())
        except FileNotFoundError:
            wish = 0  # there has been no wish yet, or the query is ending
        if wish > self._wish:
            self._wish, self._seen_at = wish, start[TICK]
        # The same answer however often Spark asks, until an epoch with this offset has run.
        is_new = bool(self._wish) and self._seen_at == start[TICK]
        return {TICK: start[TICK] + is_new}

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes nothing in advance: an epoch that the last rows have made due has to run too."""

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        del start, end
        return []

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        del partition
        return iter(())

    def commit(self, end: Mapping[str, Any]) -> None:
        """Does nothing: there are no rows to forget."""
