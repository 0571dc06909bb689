"""What a rescale did to a run: latency before, during and after it, its slowest epoch, and the gap in the output.

Latency is that of each row, from its arrival to the sink. A row belongs to the time before a rescale if it came to the
sink before the rescale was asked for, to the time after it if it arrived after its end, and to the rescale otherwise:
all rows that were on their way at any moment of it. A rescale ends with the first output after it was complete.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anabranch.demo.meter import EpochFigures
from anabranch.demo.rescales import RescaleFigures
from anabranch.workload.latency import Latencies, Millis, summary

#: What is slow because the job has just started is not taken for what is usual before a rescale.
SETTLING_MS = 5000


@dataclass(frozen=True)
class Phases:
    """One rescale, and what was around it."""

    #: Percentiles over rows, as of `summary`.
    before: dict[str, int]
    during: dict[str, int]
    after: dict[str, int]
    #: The first output after the rescale was complete, in milliseconds since 1970; None if it was not, or none came.
    ended_ms: int | None
    #: Of epochs; None if there was none.
    median_epoch_before_ms: int | None
    slowest_epoch_during_ms: int | None
    #: From one output to the next, or to the end of the run if none comes after the rescale.
    median_gap_before_ms: int | None
    longest_gap_during_ms: int | None


def phases(
    latencies: Latencies, epochs: Sequence[EpochFigures], rescales: Sequence[RescaleFigures], *, end_ms: int
) -> tuple[Phases, ...]:
    """For each rescale, from the end of the one before it until the next is asked for, or the run ended."""
    outputs_ms = output_times(latencies)
    if not len(outputs_ms):
        return tuple(Phases({"count": 0}, {"count": 0}, {"count": 0}, *[None] * 5) for _ in rescales)
    found: list[Phases] = []
    since_ms = _settled_ms(latencies, rescales)
    for place, rescale in enumerate(rescales):
        until_ms = rescales[place + 1].asked_ms if place + 1 < len(rescales) else max(end_ms, int(outputs_ms[-1]) + 1)
        found.append(_phases(latencies, outputs_ms, epochs, rescale, since_ms=since_ms, until_ms=until_ms))
        since_ms = found[-1].ended_ms or until_ms
    return tuple(found)


def _settled_ms(latencies: Latencies, rescales: Sequence[RescaleFigures]) -> int:
    """From when on the run is as usual; if a rescale comes before that, there is nothing else to compare with."""
    first_ms = int(latencies.ingestion_ms.min())
    since_ms = first_ms + SETTLING_MS
    settled = latencies.processed_ms[latencies.ingestion_ms >= since_ms]
    return since_ms if len(settled) and rescales and settled.min() < rescales[0].asked_ms else first_ms


def output_times(latencies: Latencies) -> Millis:
    """When rows came to the sink, each epoch once: rounding lets the rows of an epoch differ by a millisecond."""
    times_ms = np.unique(latencies.processed_ms)
    return times_ms[np.diff(times_ms, prepend=-2) > 1]


def _phases(
    latencies: Latencies,
    outputs_ms: Millis,
    epochs: Sequence[EpochFigures],
    rescale: RescaleFigures,
    *,
    since_ms: int,
    until_ms: int,
) -> Phases:
    asked_ms = rescale.asked_ms
    later_ms = outputs_ms[outputs_ms >= rescale.ended_ms] if rescale.ended_ms is not None else outputs_ms[:0]
    ended_ms = int(later_ms[0]) if len(later_ms) else None
    # One that another follows before its end lasts until then; so does one that never ends.
    end_ms = min(until_ms, until_ms if ended_ms is None else ended_ms)
    came_ms, done_ms = latencies.ingestion_ms, latencies.processed_ms
    before = (came_ms >= since_ms) & (done_ms < asked_ms)
    after = (came_ms > end_ms) & (done_ms <= until_ms)
    during = (done_ms >= asked_ms) & (came_ms <= end_ms)
    durations_before = [e.duration_ms for e in epochs if e.began_s * 1000 >= since_ms and e.ended_s * 1000 < asked_ms]
    durations_during = [e.duration_ms for e in epochs if e.ended_s * 1000 >= asked_ms and e.began_s * 1000 <= end_ms]
    # Before the first output, time has passed since the first row came; and a rescale without any output after it has a
    # gap that is open.
    moments_ms = np.concatenate([[came_ms.min()], outputs_ms, [until_ms] if ended_ms is None else []]).astype(np.int64)
    gaps_before, gaps_during = _gaps(moments_ms, since_ms=since_ms, asked_ms=asked_ms, end_ms=end_ms)
    return Phases(
        before=summary(_chosen(latencies, before)),
        during=summary(_chosen(latencies, during)),
        after=summary(_chosen(latencies, after)),
        ended_ms=ended_ms,
        median_epoch_before_ms=round(statistics.median(durations_before)) if durations_before else None,
        slowest_epoch_during_ms=max(durations_during, default=None),
        median_gap_before_ms=round(statistics.median(gaps_before)) if gaps_before else None,
        longest_gap_during_ms=max(gaps_during, default=None),
    )


def _gaps(moments_ms: Millis, *, since_ms: int, asked_ms: int, end_ms: int) -> tuple[list[int], list[int]]:
    """The times between outputs that lie before a rescale, and those that any part of it falls into."""
    starts, ends = moments_ms[:-1], moments_ms[1:]
    before = (starts >= since_ms) & (ends < asked_ms)
    # The gap before an output at the very end is part of the rescale, the one after it is not.
    during = (ends >= asked_ms) & (starts < end_ms)
    lengths = ends - starts
    return lengths[before].tolist(), lengths[during].tolist()


def _chosen(latencies: Latencies, which: np.ndarray) -> Latencies:
    return Latencies(latencies.ingestion_ms[which], latencies.latency_ms[which])
