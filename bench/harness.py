"""Running the sides of a benchmark in turn, repetition by repetition, and reading the time of every epoch."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from bench.figures import Figure
from bench.report import say
from bench.session import Lab, check_interrupted

_POLL_INTERVAL_S = 0.2
#: An epoch that takes longer than this never ends.
_EPOCH_LIMIT_S = 900.0
_REHEARSED_EPOCHS = 3
#: A JVM goes on compiling what it runs for a long time: a side with short epochs is not warm after a few of them.
WARM_S = 12.0


class BenchmarkError(Exception):
    """A side did not do what it is measured for, so its times mean nothing."""


class Query(Protocol):
    """A running query, Spark's or Anabranch's."""

    @property
    def lastProgress(self) -> Any: ...

    @property
    def recentProgress(self) -> Sequence[Any]: ...

    def awaitTermination(self, timeout: Any = None) -> bool | None: ...

    def stop(self) -> None: ...


def _nothing(_query: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Side:
    """One of the things that are compared."""

    name: str
    #: Starts the query on a checkpoint.
    start: Callable[[str], Query]
    #: Epochs that are run first and not measured: they load the state and warm things up.
    warmup: int
    measured: int
    #: Facts about the query after its last epoch, while it still runs; may raise BenchmarkError.
    inspect: Callable[[Any], Mapping[str, Any]] = _nothing
    #: For how long it is warmed up at least, with more epochs if these are short.
    warmup_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """One side in one repetition."""

    side: str
    repetition: int
    epochs_ms: tuple[float, ...]
    #: From the start of the first measured epoch to the end of the last, gaps between epochs included.
    wall_ms: float
    #: The median time of each part of an epoch.
    parts_ms: Mapping[str, float]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.epochs_ms)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "epochs_ms": list(self.epochs_ms), "median_ms": self.median_ms}


@dataclass(frozen=True)
class Runs:
    """All runs of a benchmark."""

    runs: tuple[Run, ...]

    def of(self, side: str) -> tuple[Run, ...]:
        """Return the runs of a side, ordered by repetition."""
        return tuple(sorted((run for run in self.runs if run.side == side), key=lambda run: run.repetition))

    def figure(self, side: str, quantity: Callable[[Run], float]) -> Figure:
        return Figure(tuple(quantity(run) for run in self.of(side)))

    def epoch_ms(self, side: str) -> Figure:
        return self.figure(side, lambda run: run.median_ms)

    def rate(self, side: str, amount: int) -> Figure:
        """Return how many rows, keys or whatever an epoch holds `amount` of are done in a second."""
        return self.figure(side, lambda run: amount / run.median_ms * 1000)


def measure(lab: Lab, sides: Sequence[Side], *, repeats: int, rehearse: bool = True) -> Runs:
    """Run all sides once for nothing, then `repeats` times, in turn; every other time in the opposite order."""
    if rehearse:
        for side in sides:
            check_interrupted()
            say(f"rehearsal: {side.name}")
            _run(lab, side, -1, warmup=1, measured=min(side.warmup, _REHEARSED_EPOCHS))
    runs: list[Run] = []
    for repetition in range(repeats):
        for side in sides if repetition % 2 == 0 else reversed(sides):
            run = _run(lab, side, repetition, warmup=side.warmup, measured=side.measured)
            say(
                f"repetition {repetition + 1} of {repeats}: {side.name}: {len(run.epochs_ms)} epochs, "
                f"median {run.median_ms:,.0f} ms ({min(run.epochs_ms):,.0f} to {max(run.epochs_ms):,.0f})"
            )
            runs.append(run)
    return Runs(tuple(runs))


def _run(lab: Lab, side: Side, repetition: int, *, warmup: int, measured: int) -> Run:
    query = side.start(lab.new_folder(side.name))
    warm_s = time.monotonic() + (side.warmup_s if repetition >= 0 else 0.0)
    try:
        wait_for_epochs(query, warmup)
        while time.monotonic() < warm_s:
            warmup += 1
            wait_for_epochs(query, warmup)
        wait_for_epochs(query, warmup + measured)
        reports = data_epochs(query)[warmup : warmup + measured]
        facts = side.inspect(query) if repetition >= 0 else {}
    finally:
        with lab.silence():
            query.stop()
    return Run(
        side=side.name,
        repetition=repetition,
        epochs_ms=tuple(float(report["durationMs"]["triggerExecution"]) for report in reports),
        wall_ms=_wall_ms(reports),
        parts_ms=_parts_ms(reports),
        facts=facts,
    )


def wait_for_epochs(query: Query, count: int) -> None:
    """Wait until the query has completed this many epochs; raises what ended the query, if it ends before."""
    seen, patience_s = -1, _EPOCH_LIMIT_S
    while seen < count - 1:
        check_interrupted()
        if query.awaitTermination(_POLL_INTERVAL_S):
            raise BenchmarkError(f"The query ended by itself after epoch {seen}; {count} epochs were expected.")
        progress = query.lastProgress
        latest = -1 if progress is None else int(progress["batchId"])
        patience_s = _EPOCH_LIMIT_S if latest > seen else patience_s - _POLL_INTERVAL_S
        if patience_s <= 0:
            raise BenchmarkError(f"Epoch {seen + 1} has not ended after {_EPOCH_LIMIT_S:.0f} s. Try fewer rows.")
        seen = latest


def data_epochs(query: Query) -> list[dict[str, Any]]:
    """Return the progress reports of the epochs that had rows, oldest first."""
    return [report for report in map(_document, query.recentProgress) if report["numInputRows"] > 0]


def _document(progress: Any) -> dict[str, Any]:
    if isinstance(progress, dict) and "anabranch" in progress:
        return progress
    document: dict[str, Any] = json.loads(progress.json)
    return document


def _wall_ms(reports: Sequence[Mapping[str, Any]]) -> float:
    first, last = (datetime.fromisoformat(reports[place]["timestamp"]) for place in (0, -1))
    return (last - first).total_seconds() * 1000 + float(reports[-1]["durationMs"]["triggerExecution"])


def _parts_ms(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median time of Spark's parts of an epoch and, of Anabranch's epochs, of the parts of addBatch."""
    times: dict[str, list[float]] = {}
    for report in reports:
        inner = report.get("anabranch", {}).get("durationMs", {})
        parts = {**report["durationMs"], **{f"anabranch.{name}": value for name, value in inner.items()}}
        for name, value in parts.items():
            times.setdefault(name, []).append(float(value))
    return {name: statistics.median(values) for name, values in times.items() if name != "triggerExecution"}
