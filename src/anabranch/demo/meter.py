"""What a running demonstration has done so far, read off its query and its sink."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from anabranch.core.errors import AnabranchError
from anabranch.demo.sink import RECENT_S, LatencySink
from anabranch.workload.latency import summary

logger = logging.getLogger(__name__)


class Query(Protocol):
    """As much of a query as is looked at."""

    @property
    def recentProgress(self) -> list[dict[str, Any]]: ...

    def workers(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class EpochFigures:
    """A committed epoch."""

    epoch: int
    #: Seconds since 1970 at its end.
    ended_s: float
    duration_ms: int
    source_rows: int
    sink_rows: int


@dataclass(frozen=True)
class WorkerFigures:
    """What a state worker holds."""

    worker: str
    key_groups: int
    keys: int
    #: Rows of state: one for each key, and those of the junk.
    rows: int
    bytes: int


@dataclass(frozen=True)
class Snapshot:
    """The job at one moment."""

    elapsed_s: float
    epochs: int
    #: The last epoch that was committed; None before the first.
    last: EpochFigures | None
    source_rows: int
    sink_rows: int
    source_rows_per_s: float
    sink_rows_per_s: float
    #: Percentiles over the rows of the last seconds; empty if there are none.
    latency_ms: Mapping[str, int]
    workers: Sequence[WorkerFigures]

    def rates(self) -> list[tuple[str, float, int]]:
        """For each stage its name, and the rows that went in: a second, and in all.

        The source makes what the filter takes. Work and count give a row for each row, so they take what the sink does.
        """
        before = (self.source_rows_per_s, self.source_rows)
        after = (self.sink_rows_per_s, self.sink_rows)
        return [
            (name, *(before if number < 2 else after))
            for number, name in enumerate(("source", "filter", "work", "count", "sink"))
        ]


class Meter:
    """Follows a query from its start on."""

    def __init__(
        self,
        query: Query,
        sink: LatencySink,
        monotonic_s: Callable[[], float] = time.monotonic,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._query = query
        self._sink = sink
        self._monotonic_s = monotonic_s
        self._clock_s = clock_s
        self._began_s = monotonic_s()
        self._started_s = clock_s()
        self._epochs: dict[int, EpochFigures] = {}
        self._workers: tuple[WorkerFigures, ...] = ()

    def read(self) -> Snapshot:
        self._read_progress()
        self._read_workers()
        epochs = [self._epochs[epoch] for epoch in sorted(self._epochs)]
        source_rate, sink_rate = self._rates(epochs)
        latency_ms = summary(self._sink.recent_latencies())
        latency_ms.pop("count")
        return Snapshot(
            elapsed_s=self._monotonic_s() - self._began_s,
            epochs=len(epochs),
            last=epochs[-1] if epochs else None,
            source_rows=sum(epoch.source_rows for epoch in epochs),
            sink_rows=sum(epoch.sink_rows for epoch in epochs),
            source_rows_per_s=source_rate,
            sink_rows_per_s=sink_rate,
            latency_ms=latency_ms,
            workers=self._workers,
        )

    def _read_progress(self) -> None:
        for progress in self._query.recentProgress:
            epoch = progress["batchId"]
            # Spark reports now and then that nothing has come; such a report has the number of the epoch to come.
            if epoch in self._epochs or not progress["numInputRows"]:
                continue
            duration_ms = progress["durationMs"]["triggerExecution"]
            began = datetime.fromisoformat(progress["timestamp"])
            self._epochs[epoch] = EpochFigures(
                epoch=epoch,
                ended_s=began.timestamp() + duration_ms / 1000,
                duration_ms=duration_ms,
                source_rows=progress["numInputRows"],
                sink_rows=self._sink.rows_of(epoch),
            )

    def _read_workers(self) -> None:
        try:
            answers = self._query.workers()
        except AnabranchError as error:
            # The query may have ended between two looks; how it ended is for others to say.
            logger.debug("the workers cannot be asked: %s", error)
            return
        self._workers = tuple(_figures(answer) for answer in answers)

    def _rates(self, epochs: Sequence[EpochFigures]) -> tuple[float, float]:
        """Rows a second over the last epochs, from the end of the one before them to the end of the last."""
        since_s = self._clock_s() - RECENT_S
        recent = [epoch for epoch in epochs if epoch.ended_s >= since_s]
        if not recent:
            return 0.0, 0.0
        earlier = epochs[: len(epochs) - len(recent)]
        from_s = earlier[-1].ended_s if earlier else self._started_s
        # An epoch that ends within the clock's grain of the one before must not make the rate infinite.
        taken_s = max(recent[-1].ended_s - from_s, 0.001)
        return sum(e.source_rows for e in recent) / taken_s, sum(e.sink_rows for e in recent) / taken_s


def _figures(answer: Mapping[str, Any]) -> WorkerFigures:
    return WorkerFigures(
        worker=answer["id"],
        key_groups=answer["keyGroups"],
        keys=sum(held["rows"] for held in answer["variables"] if held["variable"] == "count"),
        rows=answer["rows"],
        bytes=answer["bytes"],
    )
