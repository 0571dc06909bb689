"""How a run ended, and what each rescale did to it: latency around it, its slowest epoch, the gap in the output.

Latency is that of each row, from its arrival to the sink. A row belongs to the time before a rescale if it came to the
sink before the rescale was asked for, to the time after it if it arrived after its end, and to the rescale otherwise:
all rows that were on their way at any moment of it. A rescale ends with the first output after it was complete.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from anabranch.demo.meter import EpochFigures, RescaleFigures, RunFigures
from anabranch.demo.options import DemoOptions
from anabranch.workload.latency import Latencies, Millis, summary

#: What is slow because the job has just started is not taken for what is usual before a rescale.
_SETTLING_MS = 5000


class Ending(StrEnum):
    """Why a run ended."""

    COMPLETE = "complete"  #: every row has come through
    TIME = "time"  #: the time was up, and rows were still waiting
    INTERRUPTED = "interrupted"  #: its end was asked for
    FAILED = "failed"  #: the query failed


@dataclass(frozen=True)
class Phases:
    """The times before, during and after one rescale."""

    #: Percentiles over rows, as of `summary`.
    before: dict[str, int]
    during: dict[str, int]
    after: dict[str, int]
    #: The first output after the rescale was complete, in milliseconds since 1970; None if it was not, or none came.
    ended_ms: int | None = None
    #: Of epochs; None if there was none.
    median_epoch_before_ms: int | None = None
    slowest_epoch_during_ms: int | None = None
    #: From one output to the next, or to the end of the run if none comes after the rescale.
    median_gap_before_ms: int | None = None
    longest_gap_during_ms: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and with what."""

    ending: Ending
    last: RunFigures
    #: The sum of all counts in the state, when every row had come through; None if some had not.
    counted: int | None
    latency_ms: dict[str, int]
    #: What each rescale did to the run, in the order of `last.rescales`.
    phases: Sequence[Phases]
    error: Exception | None

    def to_json(self, options: DemoOptions) -> dict[str, Any]:
        last = self.last
        return {
            "options": dataclasses.asdict(options) | {"input": None if options.input is None else str(options.input)},
            "ending": str(self.ending),
            "error": None if self.error is None else str(self.error),
            "elapsed_s": round(last.elapsed_s, 3),
            "epochs": last.epochs,
            "rows": {"source": last.source_rows, "sink": last.sink_rows},
            "latency_ms": self.latency_ms,
            "state": {
                "keys": sum(worker.keys for worker in last.workers),
                "bytes": sum(worker.bytes for worker in last.workers),
                "counted": self.counted,
            },
            "workers": [msgspec.structs.asdict(worker) for worker in last.workers],
            "rescales": [
                self._rescale_to_json(rescale, phases, options.migration)
                for rescale, phases in zip(last.rescales, self.phases, strict=True)
            ],
        }

    def _rescale_to_json(self, rescale: RescaleFigures, phases: Phases, strategy: str) -> dict[str, Any]:
        figures = dataclasses.asdict(phases)
        latency_ms = {phase: figures.pop(phase) for phase in ("before", "during", "after")}
        output_ms = figures.pop("ended_ms")
        return {
            **msgspec.structs.asdict(rescale),
            "strategy": strategy,
            "asked_s": round(self.last.elapsed_at_s(rescale.asked_ms), 3),
            "seconds": None if rescale.ended_ms is None else rescale.seconds(rescale.ended_ms),
            "first_output_ms": output_ms,
            "latency_ms": latency_ms,
            **figures,
        }


def phases(
    latencies: Latencies, epochs: Sequence[EpochFigures], rescales: Sequence[RescaleFigures], *, end_ms: int
) -> tuple[Phases, ...]:
    """Divide the run around each rescale: from the end of the one before it until the next, or the end of the run."""
    outputs_ms = output_times(latencies)
    if not len(outputs_ms):
        return tuple(Phases({"count": 0}, {"count": 0}, {"count": 0}) for _ in rescales)
    found: list[Phases] = []
    since_ms = _settled_ms(latencies, rescales)
    for place, rescale in enumerate(rescales):
        until_ms = rescales[place + 1].asked_ms if place + 1 < len(rescales) else max(end_ms, int(outputs_ms[-1]) + 1)
        found.append(_phases(latencies, outputs_ms, epochs, rescale, since_ms=since_ms, until_ms=until_ms))
        since_ms = found[-1].ended_ms or until_ms
    return tuple(found)


def _settled_ms(latencies: Latencies, rescales: Sequence[RescaleFigures]) -> int:
    """Return from when on the run is as usual; if a rescale comes before that, the whole run has to do."""
    first_ms = int(latencies.ingestion_ms.min())
    since_ms = first_ms + _SETTLING_MS
    settled = latencies.processed_ms[latencies.ingestion_ms >= since_ms]
    return since_ms if len(settled) and rescales and settled.min() < rescales[0].asked_ms else first_ms


def output_times(latencies: Latencies) -> Millis:
    """Return when rows came to the sink, each epoch once: by rounding, its rows may differ by a millisecond."""
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
    starts_ms, ends_ms = moments_ms[:-1], moments_ms[1:]
    gaps_ms = ends_ms - starts_ms
    gaps_before = gaps_ms[(starts_ms >= since_ms) & (ends_ms < asked_ms)].tolist()
    # The gap before an output at the very end is part of the rescale, the one after it is not.
    gaps_during = gaps_ms[(ends_ms >= asked_ms) & (starts_ms < end_ms)].tolist()
    return Phases(
        before=_summary_of(latencies, before),
        during=_summary_of(latencies, during),
        after=_summary_of(latencies, after),
        ended_ms=ended_ms,
        median_epoch_before_ms=_median(durations_before),
        slowest_epoch_during_ms=max(durations_during, default=None),
        median_gap_before_ms=_median(gaps_before),
        longest_gap_during_ms=max(gaps_during, default=None),
    )


def _summary_of(latencies: Latencies, chosen: np.ndarray) -> dict[str, int]:
    return summary(Latencies(latencies.ingestion_ms[chosen], latencies.latency_ms[chosen]))


def _median(values: Sequence[int]) -> int | None:
    return round(statistics.median(values)) if values else None
