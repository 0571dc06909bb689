"""Steady state: a keyed count and sum over big epochs, against Spark's own aggregation and the stateless ceiling."""

from __future__ import annotations

from bench.figures import Budget, Ratio
from bench.harness import measure
from bench.machine import describe_machine
from bench.options import Epochs, KeyCount, Parallelism, Repeats, RowCount, Store, Warmup, Workers
from bench.report import Line, Report, parts_note
from bench.session import open_lab
from bench.sides import ANABRANCH, NO_STATE, SPARK, Setup, anabranch_side, spark_side, stateless_side, totals
from bench.sources import all_keys, numbers

_ROWS, _KEYS, _WORKERS = 2_000_000, 200_000, 2
_BUDGET = Budget(bound=1.5, aim=2.5)


def steady(
    rows: RowCount = _ROWS,
    keys: KeyCount = _KEYS,
    epochs: Epochs = 8,
    warmup: Warmup = 3,
    repeats: Repeats = 3,
    workers: Workers = _WORKERS,
    parallelism: Parallelism = 2,
    store: Store = "memory",
) -> None:
    """Keyed count and sum, every key touched in every epoch: rows/s against Spark's RocksDB state."""
    options = dict(locals())
    setup = Setup(workers=workers, parallelism=parallelism, store=store)
    keys = min(keys, rows)
    with open_lab(parallelism=parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        source = all_keys(numbers(lab.spark, rows=rows, partitions=parallelism), keys)
        sides = [
            spark_side(source, totals, warmup=warmup, measured=epochs, keys=keys),
            anabranch_side(source, totals, setup, warmup=warmup, measured=epochs, keys=keys),
            stateless_side(source, totals, warmup=warmup, measured=epochs),
        ]
        runs = measure(lab, sides, repeats=repeats)
    native = runs.rate(SPARK, rows)
    as_budgeted = (rows, keys, workers) == (_ROWS, _KEYS, _WORKERS)
    lines = [
        Line(
            work="count and sum",
            side=side,
            figures={"rows/s": runs.rate(side, rows), "epoch, ms": runs.epoch_ms(side)},
            ratio=None if side == SPARK else Ratio.of(runs.rate(side, rows), native),
            budget=_BUDGET if side == ANABRANCH and as_budgeted else None,
        )
        for side in (SPARK, ANABRANCH, NO_STATE)
    ]
    ceiling = Ratio.of(runs.epoch_ms(ANABRANCH), runs.epoch_ms(NO_STATE))
    Report(
        name="steady",
        title=f"{rows:,} rows and {keys:,} keys an epoch, {workers} workers, {store} store, durable",
        ratio_title="rows/s against Spark",
        lines=lines,
        options=options,
        machine=machine,
        runs=[run.to_json() for run in runs.runs],
        notes=[
            f"an epoch of Anabranch takes {ceiling.text()} as long as the same epoch with no state",
            *[parts_note(side, runs.of(side)[-1].parts_ms) for side in (SPARK, ANABRANCH, NO_STATE)],
        ],
    ).publish()
