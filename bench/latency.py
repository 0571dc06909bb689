"""Small epochs: how long one takes, back to back and with pauses, against Spark's own aggregation."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.figures import Budget, Ratio, percentile
from bench.harness import Runs, Side, measure
from bench.machine import describe_machine
from bench.options import Epochs, KeyCount, Parallelism, Repeats, RowCount, Store, Warmup, Workers
from bench.report import Line, Report, parts_note
from bench.session import open_lab
from bench.sides import ANABRANCH, BACK_TO_BACK, SPARK, Setup, anabranch_side, counts, spark_side
from bench.sources import all_keys, numbers

_ROWS = 1_000
#: Its latency, or less; the aim is half of it.
_BUDGET = Budget(bound=1.0, aim=2.0)
_BACK_TO_BACK = "back to back"

Interval = Annotated[
    float, typer.Option(min=0, max=60, help="Seconds from epoch to epoch in the runs with pauses; 0: leave them out.")
]


def latency(
    rows: RowCount = _ROWS,
    keys: KeyCount = 1_000,
    epochs: Epochs = 40,
    warmup: Warmup = 10,
    repeats: Repeats = 3,
    interval_s: Interval = 1.0,
    workers: Workers = 2,
    parallelism: Parallelism = 2,
    store: Store = "memory",
) -> None:
    """Small epochs of a keyed count: the time of an epoch, median and 95th percentile."""
    options = dict(locals())
    setup = Setup(workers=workers, parallelism=parallelism, store=store)
    keys = min(keys, rows)
    triggers = {_BACK_TO_BACK: BACK_TO_BACK}
    if interval_s:
        triggers[f"every {interval_s:g} s"] = f"{interval_s * 1000:.0f} milliseconds"
    with open_lab(parallelism=parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        source = all_keys(numbers(lab.spark, rows=rows, partitions=parallelism), keys)
        sides: list[Side] = []
        for work, trigger in triggers.items():
            sides += [
                spark_side(
                    source, counts, warmup=warmup, measured=epochs, keys=keys, trigger=trigger, name=f"{SPARK} {work}"
                ),
                anabranch_side(
                    source, counts, setup, warmup=warmup, measured=epochs, keys=keys, trigger=trigger,
                    name=f"{ANABRANCH} {work}",
                ),
            ]  # fmt: skip
        runs = measure(lab, sides, repeats=repeats)
    Report(
        name="latency",
        title=f"{rows:,} rows and {keys:,} keys an epoch, {workers} workers, {store} store, durable",
        ratio_title="Spark's time / this",
        lines=[line for work in triggers for line in _lines(runs, work, with_budget=rows == _ROWS)],
        options=options,
        machine=machine,
        runs=[run.to_json() for run in runs.runs],
        notes=[
            parts_note(f"{side} {work}", runs.of(f"{side} {work}")[-1].parts_ms)
            for work in triggers
            for side in (SPARK, ANABRANCH)
        ],
    ).publish()


def _lines(runs: Runs, work: str, *, with_budget: bool) -> list[Line]:
    native = runs.epoch_ms(f"{SPARK} {work}")
    lines = []
    for side in (SPARK, ANABRANCH):
        name = f"{side} {work}"
        figures = {
            "epoch, median ms": runs.epoch_ms(name),
            "epoch, p95 ms": runs.figure(name, lambda run: percentile(run.epochs_ms, 95)),
        }
        ours = side == ANABRANCH
        lines.append(
            Line(
                work=work,
                side=side,
                figures=figures,
                ratio=Ratio.of(native, runs.epoch_ms(name)) if ours else None,
                budget=_BUDGET if ours and with_budget else None,
            )
        )
    return lines
