"""The epochs of a query that is rescaled, and what they say: pauses in the output, slow epochs, late rows. All pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.figures import percentile
from bench.harness import BenchmarkError


@dataclass(frozen=True)
class Epoch:
    """One epoch, by the clock on the wall. Its output is there when it ends."""

    number: int
    start_s: float
    end_s: float
    rows: int
    #: When its rows came, oldest first: as many rows at each of these times.
    came_s: tuple[float, ...]

    @property
    def ms(self) -> float:
        return (self.end_s - self.start_s) * 1000

    @property
    def latencies_ms(self) -> list[float]:
        """The times from when a row came to when the output with it was there."""
        return [(self.end_s - came_s) * 1000 for came_s in self.came_s]

    @property
    def latency_max_ms(self) -> float:
        return (self.end_s - self.came_s[0]) * 1000

    def to_json(self, origin_s: float) -> dict[str, Any]:
        """Write it with times in seconds since `origin_s`."""
        return {
            "number": self.number,
            "start_s": round(self.start_s - origin_s, 3),
            "end_s": round(self.end_s - origin_s, 3),
            "rows": self.rows,
            "first_row_s": round(self.came_s[0] - origin_s, 3),
            "last_row_s": round(self.came_s[-1] - origin_s, 3),
        }


@dataclass(frozen=True)
class Move:
    """A rescale: from the call until all was done."""

    title: str
    call_s: float
    done_s: float
    #: What the side has to say about it.
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Phases:
    """Epochs before a rescale, during it and after it."""

    before: Sequence[Epoch]
    during: Sequence[Epoch]
    after: Sequence[Epoch]


def divide(epochs: Sequence[Epoch], move: Move, *, from_s: float, until_s: float) -> Phases:
    """Divide epochs: during a rescale are those that had a row under way between the call and the end of it."""
    before = [epoch for epoch in epochs if from_s <= epoch.end_s <= move.call_s]
    during = [epoch for epoch in epochs if epoch.end_s > move.call_s and epoch.came_s[0] <= move.done_s]
    after = [epoch for epoch in epochs if epoch.came_s[0] > move.done_s and epoch.end_s <= until_s]
    if len(before) < 2 or not during or not after:
        raise BenchmarkError(
            f"There were {len(before)} epochs before the rescale, {len(during)} during it and {len(after)} after it: "
            "too few to compare. Give more --seconds, or a shorter --interval-s."
        )
    return Phases(before, during, after)


def output_gap_ms(epochs: Sequence[Epoch], phases: Phases, move: Move) -> float:
    """Return the longest time without output that touches the rescale, less the usual one from output to output."""
    usual_s = statistics.median(_pauses_s(phases.before))
    ends_s = sorted(epoch.end_s for epoch in epochs)
    touching = [b - a for a, b in itertools.pairwise(ends_s) if b > move.call_s and a < move.done_s]
    if not touching:
        raise BenchmarkError("No output came after the rescale was called: nothing was measured.")
    return max(0.0, max(touching) - usual_s) * 1000


def caught_up_ms(phases: Phases, move: Move) -> float | None:
    """Return the time from the call until no row is later than the latest was before; None: it did not come to that."""
    usual_ms = max(epoch.latency_max_ms for epoch in phases.before)
    for epoch in [*phases.during, *phases.after]:
        if epoch.end_s >= move.done_s and epoch.latency_max_ms <= usual_ms:
            return (epoch.end_s - move.call_s) * 1000
    return None


def latency_ms(epochs: Sequence[Epoch]) -> dict[str, float]:
    """Return the median, the 95th percentile and the maximum over all rows of these epochs."""
    # Bundles hold equally many rows, so each counts once.
    latencies = [latency for epoch in epochs for latency in epoch.latencies_ms]
    return {"p50": percentile(latencies, 50), "p95": percentile(latencies, 95), "max": max(latencies)}


def describe(epochs: Sequence[Epoch], move: Move, phases: Phases) -> dict[str, Any]:
    """Describe what a rescale did to the query."""
    named = {"before": phases.before, "during": phases.during, "after": phases.after}
    before_ms = statistics.median(epoch.ms for epoch in phases.before)
    slowest_ms = max(epoch.ms for epoch in phases.during)
    return {
        "work": move.title,
        "epoch_before_ms": before_ms,
        "epoch_slowest_ms": slowest_ms,
        "epoch_after_ms": statistics.median(epoch.ms for epoch in phases.after),
        "slowest_over_before": slowest_ms / before_ms,
        "output_gap_ms": output_gap_ms(epochs, phases, move),
        "done_ms": (move.done_s - move.call_s) * 1000,
        "caught_up_ms": caught_up_ms(phases, move),
        "latency_ms": {name: latency_ms(part) for name, part in named.items()},
        "epochs_ms": {name: [round(epoch.ms, 1) for epoch in part] for name, part in named.items()},
        "facts": dict(move.facts),
    }


def _pauses_s(epochs: Sequence[Epoch]) -> list[float]:
    return [b.end_s - a.end_s for a, b in itertools.pairwise(epochs)]
