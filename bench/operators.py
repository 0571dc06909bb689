"""Windows, sessions, joins, duplicates, timers and vectorised processing: rows/s against Spark's own operators."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from anabranch.engine.spark import python_worker
from bench.figures import Ratio
from bench.harness import WARM_S, Runs, Side, measure
from bench.machine import describe_machine
from bench.options import Epochs, NativeEpochs, Parallelism, Repeats, Store, Workers
from bench.report import Line, Report, parts_note, say
from bench.session import Lab, open_lab
from bench.sides import ANABRANCH, Build, Setup, anabranch_side, check_keys, spark_side
from bench.sources import Size, numbers
from bench.workloads import FAMILIES, SETTLED_EPOCHS, Workload, chosen

_ALL = ",".join(FAMILIES)
_QUICK_EPOCHS = 2
#: How often the code of users is measured by itself.
_ALONE_REPEATS = 3

Only = Annotated[str, typer.Option(help=f"Which of {', '.join(FAMILIES)}, with commas between.")]
Keys = Annotated[int | None, typer.Option(min=2, help="Keys in an epoch, an even number; else each work has its own.")]
RowsPerKey = Annotated[int | None, typer.Option(min=1, help="Rows of a key in an epoch; else each work has its own.")]
Quick = Annotated[bool, typer.Option("--quick", help="As small and short as can be: does it work? No measurement.")]
Settling = Annotated[
    int,
    typer.Option(
        min=SETTLED_EPOCHS, max=5000, help="Epochs of a side before the measured ones; state grows in the first."
    ),
]


@dataclass(frozen=True)
class Plan:
    """How long each side runs: how many epochs before the measured ones, and how many measured ones."""

    ours: tuple[int, int]
    #: Of Spark, where it takes many seconds for an epoch.
    slow: tuple[int, int]
    repeats: int
    #: For how long each side runs before it is measured, at least.
    warmup_s: float = WARM_S


def operators(
    only: Only = _ALL,
    keys: Keys = None,
    rows_per_key: RowsPerKey = None,
    epochs: Epochs = 8,
    warmup: Settling = 4,
    native_epochs: NativeEpochs = 2,
    native_warmup: Settling = SETTLED_EPOCHS,
    repeats: Repeats = 3,
    quick: Quick = False,
    workers: Workers = 2,
    parallelism: Parallelism = 2,
    store: Store = "memory",
) -> None:
    """Each stateful operator on both sides, with state that comes and goes: rows/s."""
    options = dict(locals())
    try:
        workloads = chosen(only)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    if keys is not None and keys % 2:
        raise typer.BadParameter(f"{keys} is odd, and half of the keys come and go.", param_hint="--keys")
    setup = Setup(workers=workers, parallelism=parallelism, store=store)
    plan = Plan((warmup, epochs), (native_warmup, native_epochs), repeats)
    if quick:
        plan = Plan((SETTLED_EPOCHS, _QUICK_EPOCHS), (native_warmup, _QUICK_EPOCHS), 1, warmup_s=0.0)
    results: list[tuple[Workload, Size, Runs]] = []
    alone: list[str] = []
    with open_lab(parallelism=parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        for workload, size in sized(workloads, keys, rows_per_key, quick=quick):
            say(f"{workload.text}: {size.rows:,} rows and {size.keys:,} keys an epoch")
            runs = _measured(lab, workload, size, setup, plan)
            results.append((workload, size, runs))
            if workload.pandas is not None:
                own_ms = _alone_ms(lab, workload.pandas, size, parallelism=parallelism)
                alone.append(_alone_note(workload, own_ms, runs))
    Report(
        name="operators",
        title=f"stateful operators, {workers} workers, {store} store, durable",
        ratio_title="rows/s against the first",
        lines=[line for workload, size, runs in results for line in _lines(workload, size, runs)],
        options=options,
        machine=machine,
        runs=[{"work": work.text, "rows": size.rows, **run.to_json()} for work, size, of in results for run in of.runs],
        notes=[
            parts_note(f"{workload.text}, {side}", runs.of(side)[-1].parts_ms)
            for workload, _, runs in results
            for side in (workload.rival, ANABRANCH)
        ]
        + alone,
    ).publish()


def sized(
    workloads: Sequence[Workload], keys: int | None, rows_per_key: int | None, *, quick: bool
) -> list[tuple[Workload, Size]]:
    """Return the work with its size. Work that differs only in its usual size is the same at a size that is given."""
    found: dict[tuple[str, Size], Workload] = {}
    for workload in workloads:
        usual = workload.quick if quick else workload.size
        size = Size(keys or usual.keys, rows_per_key or usual.rows_per_key)
        found.setdefault((workload.text, size), workload)
    return [(workload, size) for (_, size), workload in found.items()]


def _measured(lab: Lab, workload: Workload, size: Size, setup: Setup, plan: Plan) -> Runs:
    if not workload.is_slow:
        return measure(lab, _sides(lab, workload, size, setup, plan), repeats=plan.repeats)
    # A rehearsal of the usual size would take minutes, and one with few keys warms up all there is.
    measure(lab, _sides(lab, workload, workload.quick, setup, plan), repeats=0)
    return measure(lab, _sides(lab, workload, size, setup, plan), repeats=plan.repeats, rehearse=False)


def _sides(lab: Lab, workload: Workload, size: Size, setup: Setup, plan: Plan) -> list[Side]:
    flow = workload.flow(lambda: numbers(lab.spark, rows=size.rows, partitions=setup.parallelism), size)
    expected, mode = workload.state_rows(size), workload.mode

    def on_anabranch(name: str, build: Build) -> Side:
        warmup, measured = plan.ours
        side = anabranch_side(flow.rows, build, setup, warmup=warmup, measured=measured, name=name, mode=mode)
        return _counted(side, expected)

    if flow.rival is not None:
        rival = on_anabranch(workload.rival, flow.rival)
    else:
        warmup, measured = plan.slow if workload.is_slow else plan.ours
        rival = spark_side(flow.rows, flow.build, warmup=warmup, measured=measured, keys=expected, mode=mode)
    return [replace(side, warmup_s=plan.warmup_s) for side in (rival, on_anabranch(ANABRANCH, flow.build))]


def _counted(side: Side, expected: int) -> Side:
    """Return the same side of Anabranch with its rows of state counted: what the workers report is an estimate."""

    def inspect(query: Any) -> Mapping[str, Any]:
        found = 0
        for stage in query.pipeline.stateful_stages:
            # Timers are not the user's variables, and Spark does not count them either.
            names = [variable.name for variable in stage.spec.variables if not variable.name.startswith("_")]
            found += sum(len(query.coordinator.scan(stage.spec, name)[1]) for name in names)
        check_keys(side.name, found, expected)
        return {**side.inspect(query), "state_rows": found}

    return replace(side, inspect=inspect)


def _alone_note(workload: Workload, own_ms: float, runs: Runs) -> str:
    rival_ms = runs.epoch_ms(workload.rival).median
    return (
        f"{workload.text}: the processor's own code takes {own_ms:,.0f} ms of an epoch without any engine; "
        f"no engine can be more than {rival_ms / own_ms:.1f}x as fast as {workload.rival}"
    )


def _lines(workload: Workload, size: Size, runs: Runs) -> list[Line]:
    rates = {name: runs.rate(name, size.rows) for name in (workload.rival, ANABRANCH)}
    has_budget = size == workload.size
    return [
        Line(
            work=f"{workload.text}, {size.rows:,} rows, {size.keys:,} keys",
            side=name,
            figures={"rows/s": rate, "epoch, ms": runs.epoch_ms(name)},
            ratio=Ratio.of(rate, rates[workload.rival]) if name == ANABRANCH else None,
            budget=workload.budget if name == ANABRANCH and has_budget else None,
        )
        for name, rate in rates.items()
    ]


class _FreeValue:
    """State that costs nothing: it is always there, and never kept."""

    def __init__(self, fields: int) -> None:
        self._held = (1,) * fields

    def get(self) -> tuple[int, ...]:
        return self._held

    def update(self, _: Any) -> None:
        pass

    def clear(self) -> None:
        pass


class _FreeHandle:
    def getValueState(self, _name: str, schema: str, *_: Any) -> _FreeValue:
        return _FreeValue(fields=schema.count(",") + 1)

    def registerTimer(self, _: int) -> None:
        pass

    def deleteTimer(self, _: int) -> None:
        pass


def _alone_ms(lab: Lab, processor: type[StatefulProcessor], size: Size, *, parallelism: int) -> float:
    """Measure how long a processor's own code takes for one epoch: no engine can be faster than that.

    It gets the rows of every key, and, where it has timers, those of half of the keys."""

    def body(keys: Iterable[int]) -> Iterable[float]:
        python_worker.tune()  # as in our tasks: fewer looks for garbage
        count = sum(1 for _ in keys)
        columns = {name: np.arange(count * size.rows_per_key) for name in ("key", "amount", "time_ms")}
        rows = pd.DataFrame(columns)
        frames = [part.reset_index(drop=True) for _, part in rows.groupby(rows.index // size.rows_per_key)]
        user: Any = processor()
        user.init(_FreeHandle())
        has_timers = processor.handleExpiredTimer is not StatefulProcessor.handleExpiredTimer
        started_s = time.perf_counter()
        for number, frame in enumerate(frames):
            for _ in user.handleInputRows((number,), iter((frame,)), None):
                pass
        for number in range(count // 2 if has_timers else 0):
            for _ in user.handleExpiredTimer((number,), None, None):
                pass
        yield 1000 * (time.perf_counter() - started_s)

    keys = lab.spark.sparkContext.parallelize(range(size.keys), parallelism)
    return statistics.median(max(keys.mapPartitions(body).collect()) for _ in range(_ALONE_REPEATS))
