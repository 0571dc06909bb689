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

from anabranch.worker.stores import STORES
from soak.driver import make_session
from soak.jobs import JOBS, MODELS
from soak.places import Places
from soak.reference import rows_by_spark
from soak.report import report, summary
from soak.run import Outcome, clear, modelled, play
from soak.scenarios import Scenario, Wanted, draw

_SEEDS = 1 << 31


def soak(
    minutes: Annotated[float, typer.Option(help="Start no further scenario after so many minutes.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="The first scenario; the next ones follow it.")] = None,
    job: Annotated[str | None, typer.Option(help=f"Play this query only: {', '.join(JOBS)}.")] = None,
    store: Annotated[str | None, typer.Option(help="Use this store only: memory, rocksdb or redis.")] = None,
    checkpoint_interval_s: Annotated[
        float | None, typer.Option(help="Make an epoch durable so often only; 0: every epoch.")
    ] = None,
    failing_storage: Annotated[
        bool | None, typer.Option("--failing-storage/--no-failing-storage", help="Let the storage fail, or never.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to work; what failed stays there.")] = None,
) -> None:
    """Disturb real queries at random, and compare rows and state with those of Spark and of undisturbed runs.

    Queries: aggregations, windows, sessions, dropped duplicates, an outer join, processors with value, list and map
    state and timers, applyInPandasWithState, processInArrow, timers, expiry and time-outs of processing time; with
    memory, RocksDB or Redis; every epoch durable, or one every few seconds.

    Faults: workers, drivers, tasks, the process that workers are forked from and Spark's source processes are killed;
    workers and whole drivers stand still; workers join and leave; the query is rescaled; drivers end at each step of
    an epoch; the storage of the checkpoint fails for a while.
    """
    if job is not None and job not in JOBS:
        raise typer.BadParameter(f"There is no query {job!r}. There are: {', '.join(JOBS)}.")
    if store is not None and store not in STORES:
        raise typer.BadParameter(f"There is no store {store!r}. There are: {', '.join(STORES)}.")
    wanted = Wanted(job, store, checkpoint_interval_s, failing_storage)
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
        scenario = draw(first + len(outcomes), wanted=wanted)
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
    for line in [*wrong, *summary(outcomes, wanted)]:
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


def say(line: str) -> None:
    typer.echo(line)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Whoever ends the soak wants none of its processes to stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before its time"))
    typer.run(soak)
