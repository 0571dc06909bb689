"""Growing state: the cost of a row when the state holds ten or a hundred times as many keys."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from bench.figures import Budget, Figure, Ratio
from bench.harness import Run, Runs, Side, measure
from bench.machine import describe_machine
from bench.options import Epochs, Parallelism, Repeats, RowCount, Store, Warmup, Workers
from bench.report import Line, Report, parts_note
from bench.session import Lab, open_lab
from bench.sides import ANABRANCH, SPARK, Setup, anabranch_side, spark_side, totals
from bench.sources import loaded_keys, numbers

_SIZES = (100_000, 1_000_000, 10_000_000)
_QUICK_SIZES = _SIZES[:2]
_ROWS = 200_000
#: "Flat" is what cannot be told from no growth at all.
_BUDGET = Budget(bound=2.0, aim=1.1, is_cost=True)

Sizes = Annotated[
    list[int] | None,
    typer.Option("--keys", min=1, help="Keys of state; may be given repeatedly."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Stop at 10^6 keys.")]
Native = Annotated[bool, typer.Option("--native", help="Measure Spark's own state as well.")]


def growth(
    keys: Sizes = None,
    rows: RowCount = _ROWS,
    epochs: Epochs = 10,
    warmup: Warmup = 5,
    repeats: Repeats = 3,
    quick: Quick = False,
    native: Native = False,
    workers: Workers = 2,
    parallelism: Parallelism = 2,
    store: Store = "memory",
) -> None:
    """Cost per row of the same epochs on more and more state, loaded before."""
    options = dict(locals())
    setup = Setup(workers=workers, parallelism=parallelism, store=store)
    sizes = sorted(set(keys or (_QUICK_SIZES if quick else _SIZES)))
    rows_per_key = _rows_per_key(rows, sizes[0])
    names = [ANABRANCH, SPARK] if native else [ANABRANCH]
    with open_lab(parallelism=parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        sides = [
            _side(lab, name, size, setup, rows=rows, rows_per_key=rows_per_key, warmup=warmup, measured=epochs)
            for size in sizes
            for name in names
        ]
        runs = measure(lab, sides, repeats=repeats)
    as_budgeted = (sizes[0], sizes[-1]) == (_SIZES[0], _SIZES[-1])
    Report(
        name="growth",
        title=f"epochs of {rows:,} rows that touch {rows // rows_per_key:,} keys from all over the state, "
        f"{workers} workers, {store} store, durable",
        ratio_title=f"cost per row against {sizes[0]:,} keys",
        lines=[line for name in names for line in _lines(runs, name, sizes, rows, with_budget=as_budgeted)],
        options=options,
        machine=machine,
        runs=[run.to_json() for run in runs.runs],
        notes=[
            parts_note(_name(name, size), runs.of(_name(name, size))[-1].parts_ms) for name in names for size in sizes
        ],
    ).publish()


def _side(
    lab: Lab, name: str, size: int, setup: Setup, *, rows: int, rows_per_key: int, warmup: int, measured: int
) -> Side:
    """Make a side whose first epochs, which are not measured, load every key once."""
    values = numbers(lab.spark, rows=rows, partitions=setup.parallelism)
    source = loaded_keys(values, size, rows_per_key=rows_per_key)
    skipped = -(-size // rows) + warmup
    if name == SPARK:
        return spark_side(source, totals, warmup=skipped, measured=measured, name=_name(name, size), keys=size)
    return anabranch_side(source, totals, setup, warmup=skipped, measured=measured, name=_name(name, size), keys=size)


def _rows_per_key(rows: int, smallest: int) -> int:
    """Return at least two, and enough for the smallest state: epochs touch equally many keys at every size."""
    return max(2, math.ceil(rows / smallest))


def _name(side: str, size: int) -> str:
    return f"{side}, {size:,} keys"


def _lines(runs: Runs, side: str, sizes: list[int], rows: int, *, with_budget: bool) -> list[Line]:
    smallest = _cost_us(runs, _name(side, sizes[0]), rows)
    lines = []
    for size in sizes:
        name = _name(side, size)
        cost = _cost_us(runs, name, rows)
        lines.append(
            Line(
                work=f"{size:,} keys",
                side=side,
                figures={
                    "cost per row, µs": cost,
                    "epoch, ms": runs.epoch_ms(name),
                    "state, bytes per key": runs.figure(name, _bytes_per_key),
                },
                ratio=None if size == sizes[0] else Ratio.of(cost, smallest),
                budget=_BUDGET if with_budget and side == ANABRANCH and size == sizes[-1] else None,
            )
        )
    return lines


def _bytes_per_key(run: Run) -> float:
    return float(run.facts["state_bytes"]) / float(run.facts["state_rows"])


def _cost_us(runs: Runs, name: str, rows: int) -> Figure:
    return runs.figure(name, lambda run: run.median_ms * 1000 / rows)
