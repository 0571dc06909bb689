"""What a running demonstration has done so far, read off its query and its sink."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from anabranch.core.errors import AnabranchError
from anabranch.demo.rescales import Handle, RescaleFigures, RescaleWatch
from anabranch.demo.sink import RECENT_S, LatencyPoint, LatencySink
from anabranch.workload.latency import summary

logger = logging.getLogger(__name__)


class Query(Protocol):
    """As much of a query as is looked at."""

    @property
    def recentProgress(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def last_rescale(self) -> Handle | None: ...

    @property
    def url(self) -> str | None: ...

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

    @property
    def began_s(self) -> float:
        return self.ended_s - self.duration_ms / 1000


@dataclass(frozen=True)
class WorkerFigures:
    """What a state worker holds."""

    worker: str
    #: Those that it owns, and how many of them have not arrived in full.
    key_groups: int
    pending_groups: int
    #: Former ones that others may still fetch from.
    frozen_groups: int
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
    #: The latency of each epoch so far; times are from the start of the run.
    history: Sequence[LatencyPoint] = ()
    #: The rescales so far, the oldest first.
    rescales: Sequence[RescaleFigures] = ()
    #: Where the query's HTTP API is; None if it has none.
    url: str | None = None
    #: When the look was taken, in milliseconds since 1970.
    now_ms: int = 0

    @property
    def is_rescaling(self) -> bool:
        return any(rescale.ended_ms is None for rescale in self.rescales)

    def elapsed_at_s(self, time_ms: int) -> float:
        """How long the run had taken at a time in milliseconds since 1970."""
        return self.elapsed_s - (self.now_ms - time_ms) / 1000

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
        self._rows_read: int | None = None
        self._workers: tuple[WorkerFigures, ...] = ()
        self._url: str | None = None
        self._watch = RescaleWatch(clock_s)

    @property
    def elapsed_s(self) -> float:
        return self._monotonic_s() - self._began_s

    @property
    def epochs(self) -> list[EpochFigures]:
        """The epochs that were reported so far, in their order."""
        return [self._epochs[epoch] for epoch in sorted(self._epochs)]

    def read_rescales(self) -> tuple[RescaleFigures, ...]:
        """Quick, so that it can be done often: how often decides how well the time of a rescale is known."""
        return self._watch.look(self._query.last_rescale)

    def read(self) -> Snapshot:
        self._read_progress()
        self._read_workers()
        self._url = self._query.url or self._url
        epochs = self.epochs
        last = epochs[-1] if epochs else None
        source_rate, sink_rate = self._rates(epochs)
        latency_ms = summary(self._sink.recent_latencies())
        latency_ms.pop("count")
        return Snapshot(
            elapsed_s=self.elapsed_s,
            epochs=len(epochs),
            last=last,
            source_rows=sum(epoch.source_rows for epoch in epochs) if self._rows_read is None else self._rows_read,
            sink_rows=0 if last is None else self._sink.rows_until(last.epoch),
            source_rows_per_s=source_rate,
            sink_rows_per_s=sink_rate,
            latency_ms=latency_ms,
            workers=self._workers,
            history=self._history(),
            rescales=self.read_rescales(),
            url=self._url,
            now_ms=round(self._clock_s() * 1000),
        )

    def _history(self) -> tuple[LatencyPoint, ...]:
        points = self._sink.history()
        return tuple(dataclasses.replace(point, reached_s=point.reached_s - self._began_s) for point in points)

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
            # A query that is restarted may not get round to its last report, but positions count all rows.
            self._rows_read = _position(progress) or self._rows_read

    def _read_workers(self) -> None:
        try:
            answers = self._query.workers()
        except (AnabranchError, RuntimeError) as error:
            # The query may have ended between two looks, and how it ended is for others to say; or it is being
            # restarted, and has nobody who could be asked.
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
        pending_groups=answer["pendingGroups"],
        frozen_groups=answer["frozenGroups"],
        keys=sum(held["rows"] for held in answer["variables"] if held["variable"] == "count"),
        rows=answer["rows"],
        bytes=answer["bytes"],
    )


def _position(progress: Mapping[str, Any]) -> int | None:
    """How many events had been read at the end of an epoch; None if the source does not count them."""
    (source,) = progress.get("sources") or [{}]
    end = source.get("endOffset")
    return int(end["row"]) if isinstance(end, Mapping) and "row" in end else None
