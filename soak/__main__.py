"""``python -m soak --minutes N [--seed S]``: random scenarios one after the other, and what they showed."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from pyspark.sql import SparkSession

from soak.driver import make_session
from soak.jobs import JOBS, MODELS
from soak.places import Places
from soak.reference import rows_by_spark
from soak.run import Outcome, clear, modelled, play
from soak.scenarios import Kind, Scenario, draw

_SEEDS = 1 << 31


def soak(
    minutes: Annotated[float, typer.Option(help="Start no further scenario after so many minutes.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="The first scenario; the next ones follow it.")] = None,
    job: Annotated[str | None, typer.Option(help=f"Play this query only: {', '.join(JOBS)}.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to work; what failed stays there.")] = None,
) -> None:
    """Disturb real queries at random, and compare rows and state with those of Spark and of undisturbed runs.

    Queries: aggregations, windows, sessions, dropped duplicates, an outer join, processors with value, list and map
    state and timers, applyInPandasWithState, processInArrow; with memory, RocksDB or Redis.

    Faults: workers, drivers, tasks, the process that workers are forked from and Spark's source processes are killed;
    workers and whole drivers stand still; workers join and leave; the query is rescaled; drivers end at each step of
    an epoch.
    """
    if job is not None and job not in JOBS:
        raise typer.BadParameter(f"There is no query {job!r}. There are: {', '.join(JOBS)}.")
    first = time.time_ns() % _SEEDS if seed is None else seed
    place = Path(tempfile.mkdtemp(prefix="anabranch-soak-")) if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    say(f"seed {first}; working in {place}")
    spark = make_session(place)
    outcomes: list[Outcome] = []
    wrong: list[str] = []
    checked: set[str] = set()
    end_s = time.monotonic() + 60 * minutes
    while not outcomes or time.monotonic() < end_s:
        scenario = draw(first + len(outcomes), job=job)
        if scenario.job in MODELS and scenario.job not in checked:
            wrong += check_model(spark, first, scenario.job, place)
            checked.add(scenario.job)
            if wrong:
                break
        say(str(scenario))
        places = Places(place / f"seed-{scenario.seed}")
        outcome = play(spark, scenario, places)
        outcomes.append(outcome)
        for line in report(outcome):
            say(f"  {line}")
        if outcome.is_right and not outcome.errors:
            clear(places)
    for line in [*wrong, *summary(outcomes)]:
        say(line)
    spark.stop()
    raise typer.Exit(1 if wrong or not all(outcome.is_right for outcome in outcomes) else 0)


def check_model(spark: SparkSession, seed: int, job: str, place: Path) -> list[str]:
    """Before the job is disturbed: its model, Spark itself and an undisturbed query all say the same."""
    scenario = Scenario(seed, job, 8, 60, 200, 2, 2, "memory", apart=False, faults=(), crashes=())
    places = Places(place / f"undisturbed-{job}")
    outcome = play(spark, scenario, places)
    wrong = [f"{job}, undisturbed: {finding}" for finding in (*outcome.verdict.findings, *outcome.errors)]
    if rows_by_spark(spark, job, places, scenario.files_per_epoch) != Counter(modelled(scenario).rows):
        wrong.append(f"{job}: the model does not say what Spark says")
    same = "others" if wrong else "the same"
    say(f"{job}: {outcome.verdict.rows} rows by an undisturbed query; Spark's own are {same}")
    clear(places)
    return wrong


def report(outcome: Outcome) -> list[str]:
    """One scenario, in a few lines."""
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.faults.items())) or "no faults"
    counts = f"{outcome.drivers} drivers, {outcome.epochs} epochs, {outcome.verdict.rows} rows"
    lines = [f"{outcome.duration_s:.0f} s, {counts}; {faults}"]
    if outcome.fenced:
        lines.append(f"drivers that were replaced ended with {', '.join(outcome.fenced)}")
    lines += [f"a query ended by itself: {error}" for error in outcome.errors]
    lines += [f"WRONG: {finding}" for finding in outcome.verdict.findings]
    return lines


def summary(outcomes: list[Outcome]) -> list[str]:
    """All scenarios together."""
    faults: Counter[Kind] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
    failed = [outcome.scenario for outcome in outcomes if not outcome.is_right]
    ended = [outcome.scenario.seed for outcome in outcomes if outcome.errors]
    jobs = Counter(outcome.scenario.job for outcome in outcomes)
    lines = [
        f"scenarios  {len(outcomes)}: " + ", ".join(f"{count} {job}" for job, count in sorted(jobs.items())),
        f"faults     {faults.total()}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items())),
        f"epochs     {sum(outcome.epochs for outcome in outcomes)}",
        f"rows       {sum(outcome.verdict.rows for outcome in outcomes)}",
        f"lost       {sum(outcome.verdict.lost for outcome in outcomes)}",
        f"doubled    {sum(outcome.verdict.doubled for outcome in outcomes)}",
        f"wrong      {sum(outcome.verdict.wrong for outcome in outcomes)}",
        f"queries that ended by themselves and went on after a restart  {len(ended)}{_seeds(ended)}",
    ]
    lines += [f"WRONG; to see it again: ./run soak --minutes 0 --seed {each.seed} --job {each.job}" for each in failed]
    return lines


def _seeds(seeds: list[int]) -> str:
    return f" (seeds {', '.join(map(str, seeds))})" if seeds else ""


def say(line: str) -> None:
    typer.echo(line)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Whoever ends the soak wants none of its processes to stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before its time"))
    typer.run(soak)
