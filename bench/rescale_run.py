"""One run of the benchmark `rescale`: fill the state, keep up the load, rescale there and back, check the state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.harness import BenchmarkError
from bench.report import say
from bench.rescale_epochs import Move, describe, divide
from bench.rescale_load import Feed, Load
from bench.rescale_watch import Watch, watching
from bench.session import Lab

#: Nothing that a run waits for takes longer, unless it never ends.
LIMIT_S = 900.0
_CATCH_UP_LIMIT_S = 120.0
#: A query is behind while its rows are this many times as late as before the rescale.
_BEHIND = 2.0


class Job(Protocol):
    """A query that can be rescaled, one way or another."""

    def start(self) -> None: ...

    def check(self) -> None:
        """Raise if the query has ended."""

    def rescale(self, size: int) -> Mapping[str, Any]:
        """Go to so many workers and partitions, wait until all is done, and say what was done."""

    def finish(self) -> tuple[int, int]:
        """Stop the query once it is idle; return the keys in its state, and the rows that they count."""

    def stop(self) -> None: ...


#: Makes the query of a strategy.
MakeJob = Callable[[Lab, Feed, Watch], Job]


@dataclass(frozen=True)
class Plan:
    """The same course of events for every strategy."""

    load: Load
    #: From how many workers and partitions to how many; and back.
    sizes: tuple[int, int]
    #: How long the load is kept up before, between and after the two rescales.
    seconds: float
    warmup_s: float
    #: Whether it goes back as well.
    returns: bool = True

    @property
    def steps(self) -> Sequence[tuple[int, int]]:
        return [self.sizes, self.sizes[::-1]] if self.returns else [self.sizes]


def run_strategy(lab: Lab, name: str, plan: Plan, make: MakeJob) -> dict[str, Any]:
    """Run a strategy from an empty state to an empty backlog; return what happened, for the report and the plot."""
    feed = Feed(lab, plan.load, partitions=plan.sizes[0])
    with watching(lab.spark, plan.load, feed) as watch:
        job = make(lab, feed, watch)
        try:
            job.start()
            feed.fill(lambda: _wait(watch, job, watch.has_processed_all, "Filling the state"))
            say(f"{name}: {plan.load.keys:,} keys are there after {watch.epoch_count} epochs")
            feed.start()
            _keep_up(watch, job, plan.warmup_s)
            moves, until_s = _rescale_all(name, plan, job, watch)
            feed.close()
            _wait(watch, job, watch.has_processed_all, "The last epoch")
            _check_state(name, plan.load, feed, job.finish())
        finally:
            feed.close()
            with lab.silence():
                job.stop()
        epochs, starts = watch.epochs(), watch.start_count
    origin_s = moves[0].call_s
    described = [
        describe(epochs, move, divide(epochs, move, from_s=move.call_s - plan.seconds, until_s=end_s))
        | {"call_s": move.call_s - origin_s}
        for move, end_s in zip(moves, until_s, strict=True)
    ]
    told = [epoch.to_json(origin_s) for epoch in epochs]
    return {"side": name, "starts": starts, "moves": described, "epochs": told}


def _rescale_all(name: str, plan: Plan, job: Job, watch: Watch) -> tuple[list[Move], list[float]]:
    """Rescale there and back, under a load that the query keeps up with; return the moves, and their ends of watch."""
    moves: list[Move] = []
    until_s: list[float] = []
    for old, new in plan.steps:
        _keep_up(watch, job, plan.seconds)
        if moves:
            until_s.append(time.time())
        began_s = time.time()
        recent = [epoch.latency_max_ms for epoch in watch.epochs() if epoch.end_s > began_s - plan.seconds]
        # Without an epoch to compare with, there is nothing to wait for either.
        usual_ms = max(recent, default=math.inf)
        facts = job.rescale(new)
        moves.append(Move(f"{old} to {new}", began_s, time.time(), facts))
        say(f"{name}: {old} to {new} done after {moves[-1].done_s - began_s:,.2f} s")
        _catch_up(name, watch, job, usual_ms)
    _keep_up(watch, job, plan.seconds)
    return moves, [*until_s, time.time()]


def _keep_up(watch: Watch, job: Job, seconds: float) -> None:
    """Let the load go on for some seconds."""
    end_s = time.monotonic() + seconds
    _wait(watch, job, lambda: time.monotonic() >= end_s, "The load", limit_s=seconds + LIMIT_S)


def _catch_up(name: str, watch: Watch, job: Job, usual_ms: float) -> None:
    """Wait until a new epoch has rows no later than usual; a query that never gets there is measured as it is."""
    called = watch.epoch_count

    def is_back() -> bool:
        return watch.epoch_count > called and watch.epochs()[-1].latency_max_ms <= _BEHIND * usual_ms

    try:
        _wait(watch, job, is_back, "Catching up", limit_s=_CATCH_UP_LIMIT_S)
    except BenchmarkError as error:
        say(f"{name}: {error}")


def _wait(watch: Watch, job: Job, is_met: Callable[[], bool], what: str, *, limit_s: float = LIMIT_S) -> None:
    watch.wait(is_met, what, limit_s=limit_s, check=job.check)


def _check_state(name: str, load: Load, feed: Feed, found: tuple[int, int]) -> None:
    """Make sure that every key is there, and that every row has been counted once."""
    expected = (load.keys, feed.row_count)
    if found != expected:
        raise BenchmarkError(
            f"The state of {name!r} holds {found[0]:,} keys and has counted {found[1]:,} rows; it should be "
            f"{expected[0]:,} and {expected[1]:,}: its times are void."
        )
