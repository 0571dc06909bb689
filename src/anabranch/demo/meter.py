"""What a running demonstration has done so far, read off its query and its sink: epochs, workers, rescales."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from anabranch.api.query import StreamQuery
from anabranch.core.errors import AnabranchError
from anabranch.demo.job import RECENT_S, STAGES, LatencyPoint, LatencySink
from anabranch.workload.latency import summary

logger = logging.getLogger(__name__)

_UNDER_WAY = ("waiting", "migrating")


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


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a state worker holds, out of what the query says about it."""

    worker: str = msgspec.field(name="id")
    #: Those that it owns, and how many of them have not arrived in full.
    key_groups: int
    pending_groups: int
    #: Former ones that others may still fetch from.
    frozen_groups: int
    keys: int
    #: Rows of state: one for each key, and those of the junk.
    rows: int
    bytes: int


class RescaleFigures(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A rescale at one moment, out of what its handle says about it."""

    number: int
    what: str
    state: str
    #: Why it failed, or what came in its place.
    message: str = ""
    #: In milliseconds since 1970.
    asked_ms: int
    #: None while it goes on.
    ended_ms: int | None
    #: The first epoch with the new route; None before it, and where everything was started again.
    first_epoch: int | None = msgspec.field(name="startedEpoch")
    groups_moving: int = 0
    groups_pending: int = 0
    rows_fetched: int = 0
    rows_drained: int = 0
    bytes_fetched: int = 0
    bytes_drained: int = 0
    #: How long the change of the route held up its first epoch.
    change_ms: int = 0

    def seconds(self, now_ms: int) -> float:
        """Return how long it took, or has taken so far."""
        return ((now_ms if self.ended_ms is None else self.ended_ms) - self.asked_ms) / 1000


@dataclass(frozen=True)
class RunFigures:
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
        """Return how long the run had taken at a time in milliseconds since 1970."""
        return self.elapsed_s - (self.now_ms - time_ms) / 1000

    def rates(self) -> list[tuple[str, float, int]]:
        """Return for each stage its name, and the rows that went in: a second, and in all.

        The source makes what the filter takes. Work and count give a row for each row, so they take what the sink does.
        """
        before = (self.source_rows_per_s, self.source_rows)
        after = (self.sink_rows_per_s, self.sink_rows)
        return [(name, *(before if number < 2 else after)) for number, name in enumerate(STAGES)]


class Meter:
    """Follows a query, and each of its rescales, whoever asked for them, from the start on."""

    def __init__(
        self,
        query: StreamQuery,
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
        #: How each rescale says how far it is, and what was made of it last, by its number.
        self._progress: dict[int, Callable[[], Mapping[str, Any]]] = {}
        self._rescales: dict[int, RescaleFigures] = {}

    @property
    def elapsed_s(self) -> float:
        return self._monotonic_s() - self._began_s

    @property
    def epochs(self) -> list[EpochFigures]:
        """The epochs that were reported so far, in their order."""
        return [self._epochs[epoch] for epoch in sorted(self._epochs)]

    def read_rescales(self) -> tuple[RescaleFigures, ...]:
        """Look at the rescales so far, the oldest first.

        It is quick, so that it can be done often: how often decides how well the time of a rescale is known.
        """
        last = self._query.last_rescale
        if last is not None:
            self._progress.setdefault(last.number, last.progress)
        for number, progress in self._progress.items():
            known = self._rescales.get(number)
            if known is None or known.ended_ms is None:
                self._rescales[number] = _rescale_figures(progress(), self._clock_s(), known)
        return tuple(self._rescales[number] for number in sorted(self._rescales))

    def read(self) -> RunFigures:
        self._read_progress()
        self._read_workers()
        self._url = self._query.url or self._url
        epochs = self.epochs
        last = epochs[-1] if epochs else None
        source_rate, sink_rate = self._rates(epochs)
        latency_ms = summary(self._sink.recent_latencies())
        latency_ms.pop("count")
        return RunFigures(
            elapsed_s=self.elapsed_s,
            epochs=len(epochs),
            last=last,
            source_rows=sum(epoch.source_rows for epoch in epochs) if self._rows_read is None else self._rows_read,
            sink_rows=0 if last is None else self._sink.rows_until(last.epoch),
            source_rows_per_s=source_rate,
            sink_rows_per_s=sink_rate,
            latency_ms=latency_ms,
            workers=self._workers,
            history=[
                dataclasses.replace(point, reached_s=point.reached_s - self._began_s) for point in self._sink.history()
            ],
            rescales=self.read_rescales(),
            url=self._url,
            now_ms=round(self._clock_s() * 1000),
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
            # A query that is restarted may not get round to its last report, but positions count all rows. Recorded
            # events have no such position.
            (source,) = progress.get("sources") or [{}]
            end = source.get("endOffset")
            if isinstance(end, Mapping) and "row" in end:
                self._rows_read = int(end["row"])

    def _read_workers(self) -> None:
        try:
            answers = self._query.workers()
        except (AnabranchError, RuntimeError) as error:
            # The query may have ended between two looks, and how it ended is for others to say; or it is being
            # restarted, and has no workers that could be asked.
            logger.debug("the workers cannot be asked: %s", error)
            return
        self._workers = tuple(_worker_figures(answer) for answer in answers)

    def _rates(self, epochs: Sequence[EpochFigures]) -> tuple[float, float]:
        """Return rows a second over the last epochs, from the end of the one before them to the end of the last."""
        since_s = self._clock_s() - RECENT_S
        recent = [epoch for epoch in epochs if epoch.ended_s >= since_s]
        if not recent:
            return 0.0, 0.0
        earlier = epochs[: len(epochs) - len(recent)]
        from_s = earlier[-1].ended_s if earlier else self._started_s
        # An epoch that ends within the clock's grain of the one before must not make the rate infinite.
        taken_s = max(recent[-1].ended_s - from_s, 0.001)
        return sum(e.source_rows for e in recent) / taken_s, sum(e.sink_rows for e in recent) / taken_s


def _worker_figures(answer: Mapping[str, Any]) -> WorkerFigures:
    keys = sum(held["rows"] for held in answer["variables"] if held["variable"] == "count")
    return msgspec.convert({**answer, "keys": keys}, WorkerFigures)


def _rescale_figures(progress: Mapping[str, Any], now_s: float, known: RescaleFigures | None) -> RescaleFigures:
    taken_ms = round(progress["seconds"] * 1000)
    # The seconds of a rescale that has ended stand still, so they tell when it began only while it goes on; of one that
    # begins and ends between two looks, this is the latest that it can have been.
    asked_ms = round(now_s * 1000) - taken_ms if known is None else known.asked_ms
    ended_ms = None if progress["state"] in _UNDER_WAY else asked_ms + taken_ms
    return msgspec.convert({**progress, "askedMs": asked_ms, "endedMs": ended_ms}, RescaleFigures)
