"""Stage 4: how long rows took from their arrival to the sink, one file of lines for each epoch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from pyspark.sql import DataFrame

from anabranch.workload.latency import Latencies, Millis, append_latencies, summary

#: How much of the past percentiles and rates are taken from.
RECENT_S = 5.0
_REMEMBERED_EPOCHS = 10_000


@dataclass(frozen=True)
class EpochAtSink:
    """The rows of an epoch, when they had come to the sink."""

    epoch: int
    #: On the clock that never goes back.
    reached_s: float
    latency_ms: Millis


@dataclass(frozen=True)
class LatencyPoint:
    """The latency of an epoch's rows, and when they had come to the sink."""

    reached_s: float
    p50_ms: int
    p99_ms: int


class LatencySink:
    """The function of foreachBatch. An epoch that is run again replaces its lines."""

    def __init__(self, directory: Path, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._epochs: deque[EpochAtSink] = deque()
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
            self._epochs.append(EpochAtSink(epoch, now_s, latencies.latency_ms))
            while self._epochs[0].reached_s < now_s - RECENT_S:
                self._epochs.popleft()
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
        """How many rows of an epoch have come."""
        with self._lock:
            return self._rows.get(epoch, 0)

    def rows_until(self, epoch: int) -> int:
        """How many rows of the epochs up to this one have come."""
        with self._lock:
            return sum(rows for number, rows in self._rows.items() if number <= epoch)

    def history(self) -> tuple[LatencyPoint, ...]:
        """The latency of the epochs so far."""
        with self._lock:
            return tuple(self._history)

    def recent(self) -> list[EpochAtSink]:
        """The epochs that came within the last seconds."""
        since_s = self._monotonic_s() - RECENT_S
        with self._lock:
            return [epoch for epoch in self._epochs if epoch.reached_s >= since_s]

    def recent_latencies(self) -> Latencies:
        """How long the rows of these epochs took; when they arrived is not kept."""
        latency_ms = np.concatenate([np.empty(0, np.int64), *(epoch.latency_ms for epoch in self.recent())])
        return Latencies(np.zeros_like(latency_ms), latency_ms)

    def _path(self, epoch: int) -> Path:
        return self.directory / f"epoch-{epoch:08d}.csv"
