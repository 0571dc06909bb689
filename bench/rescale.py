"""Rescaling under load: what going from 2 workers to 4 and back does to a query, for every strategy and for Spark."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.core.errors import AnabranchError
from bench.figures import Budget, Figure, Ratio
from bench.harness import BenchmarkError
from bench.machine import describe_machine
from bench.options import KeyCount, Repeats, Store
from bench.report import Line, Report, say
from bench.rescale_idle import measure_idle
from bench.rescale_load import Feed, Load
from bench.rescale_ours import AnabranchJob, has_redis, redis_server
from bench.rescale_run import Job, MakeJob, Plan, run_strategy
from bench.rescale_spark import SparkJob
from bench.rescale_watch import Watch
from bench.session import Lab, check_interrupted, open_lab
from bench.sides import BACK_TO_BACK, SPARK, Setup


class Strategy(StrEnum):
    """A way to rescale. All but the last are Anabranch's."""

    LAZY = "lazy"
    EAGER = "eager"
    RESTART = "restart"
    REMOTE = "remote"
    SPARK = SPARK


_ALL = ",".join(Strategy)
_KEYS, _RATE, _SIZES = 1_000_000, 20_000, (2, 4)
_EPOCH_BUDGET = Budget(2.0, aim=1.2, is_cost=True)
#: No pause at all is the aim; against the seconds that Spark takes, that is a ratio as great as this.
_GAP_BUDGET = Budget(20.0, aim=1000.0)
#: What cannot be told from no gap: Spark reports times in milliseconds, and epochs are never equally long.
_GAP_MS_MIN = 10.0
_WITHOUT_DRAIN = (
    "lazy without a drain has no end: it counts as done when the new route is in force, and keys that are asked for go "
    "on moving until the end of the run"
)
_REHEARSED_KEYS, _REHEARSED_S = 20_000, 4.0

Strategies = Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(Strategy)}.")]
Rate = Annotated[int, typer.Option("--rate", min=1, help="Rows a second.")]
Seconds = Annotated[
    float, typer.Option("--seconds", min=1, help="Seconds of load before, between and after the rescales.")
]
WarmupSeconds = Annotated[float, typer.Option("--warmup-s", min=0, help="Seconds of load before all of that.")]
Interval = Annotated[float, typer.Option(min=0, max=60, help="Seconds from epoch to epoch; 0: back to back.")]
Rehearse = Annotated[bool, typer.Option(help="Run every strategy once before, with little state: code gets warm.")]
Idle = Annotated[
    bool,
    typer.Option(
        "--idle",
        help="Instead: throughput of a query that is not rescaled, lazy against restart. Both run the same code then: "
        "there is no mode without lazy migration's machinery.",
    ),
]
RoutingCache = Annotated[
    bool,
    typer.Option("--routing-cache/--no-routing-cache", help="Whether tasks keep the route, or ask a worker for it."),
]
Drained = Annotated[
    bool,
    typer.Option(
        "--drain/--no-drain",
        help="Whether lazy also moves state in the background. Without, no worker can leave: nothing goes back to 2.",
    ),
]
IdleRows = Annotated[int, typer.Option(min=10, help="Rows in an epoch of --idle; a tenth as many keys.")]


def rescale(
    keys: KeyCount = _KEYS,
    rate: Rate = _RATE,
    seconds: Seconds = 20.0,
    warmup_s: WarmupSeconds = 10.0,
    interval_s: Interval = 1.0,
    strategies: Strategies = _ALL,
    repeats: Repeats = 3,
    store: Store = "memory",
    routing_cache: RoutingCache = True,
    drain: Drained = True,
    rehearse: Rehearse = True,
    idle: Idle = False,
    idle_rows: IdleRows = 2_000_000,
) -> None:
    """2 workers to 4 and back, under a steady load: slow epochs, late rows, and pauses in the output."""
    options = dict(locals())
    if idle:
        measure_idle(rows=idle_rows, repeats=repeats, setup=Setup(_SIZES[0], _SIZES[0], store), options=options)
        return
    chosen = _parse(strategies)
    if not drain and Strategy.LAZY not in chosen:
        raise BenchmarkError("--no-drain is about lazy migration. Leave it out, or have lazy among the --strategies.")
    plan = Plan(Load(keys, rate), _SIZES, seconds, warmup_s, returns=drain)
    anabranch = {"anabranch.store": store, "anabranch.routingCache": routing_cache, "anabranch.drain": drain}
    with open_lab(parallelism=_SIZES[0]) as lab:
        machine = describe_machine(lab.folder, lab.java)
        if rehearse:
            _rehearse(lab, plan, chosen, settings=anabranch, interval_s=interval_s)
        runs, failures = _run_all(lab, plan, chosen, repeats=repeats, settings=anabranch, interval_s=interval_s)
    chosen = [name for name in chosen if name not in failures]
    if not chosen:
        raise BenchmarkError("; ".join(failures.values()))
    titles = [f"{old} to {new}" for old, new in plan.steps]
    as_budgeted = (keys, rate) == (_KEYS, _RATE)
    Report(
        name="rescale",
        title=f"{keys:,} keys of state, {rate:,} rows/s, an epoch every {interval_s:g} s, "
        f"from {_SIZES[0]} workers and partitions to {_SIZES[1]}{' and back' if plan.returns else ''}, {store} store, "
        f"durable{'' if routing_cache else ', no routing cache'}{'' if drain else ', lazy without a drain'}",
        ratio_title="ratio",
        lines=[line for title in titles for line in _lines(runs, chosen, title, with_budget=as_budgeted)],
        options=options,
        machine=machine,
        runs=runs,
        notes=[
            "epochs: the slowest while rescaling, over the median before",
            "output: Spark's gap over this one; a gap is the longest time without output around the rescale, less the "
            f"usual time from output to output; gaps below {_GAP_MS_MIN:g} ms count as {_GAP_MS_MIN:g} ms",
            *([] if drain else [_WITHOUT_DRAIN]),
            *[_note(name, title, _moves(runs, name, title)) for title in titles for name in chosen],
            *failures.values(),
        ],
    ).publish()
    if failures:
        raise BenchmarkError("; ".join(failures.values()))


def _rehearse(
    lab: Lab, plan: Plan, names: Sequence[Strategy], *, settings: Mapping[str, Any], interval_s: float
) -> None:
    """Run each strategy once, unmeasured: the first time is slow, above all when Spark rewrites its state."""
    load = dataclasses.replace(plan.load, keys=min(plan.load.keys, _REHEARSED_KEYS))
    short = dataclasses.replace(plan, load=load, seconds=min(plan.seconds, _REHEARSED_S), warmup_s=0.0)
    for name in names:
        check_interrupted()
        say(f"rehearsal: {name}")
        try:
            with _maker(lab, name, settings, interval_s=interval_s) as make:
                run_strategy(lab, name.value, short, make)
        except (AnabranchError, BenchmarkError) as error:
            # Should it be more than too short a time for code that is still cold, it comes again.
            say(f"rehearsal: {name}: {error}")


def _run_all(
    lab: Lab,
    plan: Plan,
    names: Sequence[Strategy],
    *,
    repeats: int,
    settings: Mapping[str, Any],
    interval_s: float,
) -> tuple[list[dict[str, Any]], dict[Strategy, str]]:
    """Run all strategies, every other time in the opposite order; return the runs, and why strategies are left out."""
    runs: list[dict[str, Any]] = []
    failures: dict[Strategy, str] = {}
    for repetition in range(repeats):
        for name in names[:: (-1) ** repetition]:
            check_interrupted()
            if name in failures:
                continue
            try:
                with _maker(lab, name, settings, interval_s=interval_s) as make:
                    run = {"repetition": repetition, **run_strategy(lab, name.value, plan, make)}
                _check_starts(name, run["starts"], expected=len(plan.steps) + 1)
            except (AnabranchError, BenchmarkError) as error:
                failures[name] = f"{name} failed in repetition {repetition + 1} and is left out: {error}"
                say(failures[name])
                continue
            runs.append(run)
            for move in run["moves"]:
                say(f"repetition {repetition + 1} of {repeats}: {name}: {_summary(move)}")
    return [run for run in runs if run["side"] not in failures], failures


def _check_starts(name: Strategy, starts: int, *, expected: int) -> None:
    """Refuse a run whose strategy has not restarted the query as it must, or has restarted it though it must not."""
    expected = expected if name in (Strategy.RESTART, Strategy.SPARK) else 1
    if starts != expected:
        raise BenchmarkError(f"The query of '{name}' was started {starts} times, not {expected}: its times are void.")


def _parse(text: str) -> list[Strategy]:
    """Return the strategies to run, in their usual order; those that cannot be run here are left out."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in list(Strategy)]
    if unknown:
        raise BenchmarkError(f"There is no strategy {unknown[0]!r}; give --strategies some of {', '.join(Strategy)}.")
    chosen = [name for name in Strategy if name in names]
    if Strategy.REMOTE in chosen and not has_redis():
        say("There is no redis-server on the PATH: the strategy remote is left out. Install Redis to have it.")
        chosen.remove(Strategy.REMOTE)
    if not chosen:
        raise BenchmarkError(f"No strategy is left to run; give --strategies some of {', '.join(Strategy)}.")
    return chosen


@contextmanager
def _maker(lab: Lab, name: Strategy, common: Mapping[str, Any], *, interval_s: float) -> Iterator[MakeJob]:
    """Prepare what the query of a strategy needs, and give the function that makes the query."""
    trigger = f"{interval_s * 1000:.0f} milliseconds" if interval_s else BACK_TO_BACK
    settings: dict[str, Any] = {**common, "anabranch.workers": _SIZES[0], "anabranch.parallelism": _SIZES[0]}
    if name != Strategy.LAZY:
        settings["anabranch.drain"] = True
    with ExitStack() as stack:
        if name == Strategy.REMOTE:
            url = stack.enter_context(redis_server(Path(lab.new_folder("redis"))))
            settings |= {"anabranch.store": "redis", "anabranch.redisUrl": url}
        else:
            settings["anabranch.migration"] = name

        def make(lab: Lab, feed: Feed, watch: Watch) -> Job:
            if name == Strategy.SPARK:
                return SparkJob(lab, feed, watch, trigger=trigger)
            moves_state = name != Strategy.REMOTE
            return AnabranchJob(lab, feed, name=name.value, trigger=trigger, settings=settings, moves_state=moves_state)

        yield make


def _moves(runs: Sequence[Mapping[str, Any]], name: str, title: str) -> list[Mapping[str, Any]]:
    """Return one kind of rescale of one strategy, in all repetitions."""
    own = sorted((run for run in runs if run["side"] == name), key=lambda run: int(run["repetition"]))
    return [move for run in own for move in run["moves"] if move["work"] == title]


def _lines(
    runs: Sequence[Mapping[str, Any]], names: Sequence[Strategy], title: str, *, with_budget: bool
) -> list[Line]:
    lines = []
    for name in names:
        moves = _moves(runs, name, title)
        before, slowest = _figure(moves, "epoch_before_ms"), _figure(moves, "epoch_slowest_ms")
        figures = {
            "epoch before, ms": before,
            "slowest epoch, ms": slowest,
            "epoch after, ms": _figure(moves, "epoch_after_ms"),
        }
        budget = _EPOCH_BUDGET if with_budget and name == Strategy.LAZY else None
        lines.append(Line(f"{title}, epochs", name, figures, Ratio.of(slowest, before), budget))
    for name in names:
        moves = _moves(runs, name, title)
        figures = {"output gap, ms": _figure(moves, "output_gap_ms"), "done after, ms": _figure(moves, "done_ms")}
        if all(move["caught_up_ms"] is not None for move in moves):
            figures["caught up after, ms"] = _figure(moves, "caught_up_ms")
        ratio = None
        if Strategy.SPARK in names and name != Strategy.SPARK:
            ratio = Ratio.of(_gap(_moves(runs, Strategy.SPARK, title)), _gap(moves))
        budget = _GAP_BUDGET if with_budget and ratio and name == Strategy.LAZY else None
        lines.append(Line(f"{title}, output", name, figures, ratio, budget))
    return lines


def _figure(moves: Sequence[Mapping[str, Any]], name: str) -> Figure:
    return Figure(tuple(float(move[name]) for move in moves))


def _gap(moves: Sequence[Mapping[str, Any]]) -> Figure:
    return Figure(tuple(max(_GAP_MS_MIN, float(move["output_gap_ms"])) for move in moves))


def _summary(move: Mapping[str, Any]) -> str:
    return (
        f"{move['work']}: output gap {move['output_gap_ms']:,.0f} ms, slowest epoch {move['epoch_slowest_ms']:,.0f} ms "
        f"({move['slowest_over_before']:.2f}x the median before), done after {move['done_ms']:,.0f} ms"
    )


def _note(name: Strategy, title: str, moves: Sequence[Mapping[str, Any]]) -> str:
    """Say how late rows were, and what was moved or done, in the last repetition."""
    move = moves[-1]
    late = "; ".join(
        f"{phase} {times['p50']:,.0f} / {times['p95']:,.0f} / {times['max']:,.0f}"
        for phase, times in move["latency_ms"].items()
    )
    text = f"{name}, {title}: latency of rows, ms (median / 95 % / greatest): {late}"
    facts = move["facts"]
    if name == Strategy.REMOTE:
        return f"{text}. Nothing is moved"
    if name == Strategy.SPARK:
        return text + ". " + ", ".join(f"{fact.removesuffix(', ms')} {ms:,.0f} ms" for fact, ms in facts.items())
    return (
        f"{text}. Moved on demand: {facts.get('rowsFetched', 0):,} rows, {facts.get('bytesFetched', 0):,} bytes; "
        f"in the background: {facts.get('rowsDrained', 0):,} rows, {facts.get('bytesDrained', 0):,} bytes"
    )
