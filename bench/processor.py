"""One and the same StatefulProcessor, on rows and on pandas: keys/s against Spark's own transformWithState."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from bench.figures import Budget, Ratio
from bench.harness import WARM_S, Runs, Side, measure
from bench.machine import describe_machine
from bench.options import Epochs, NativeEpochs, NativeWarmup, Parallelism, Repeats, Store, Warmup, Workers
from bench.report import Line, Report, parts_note
from bench.session import Lab, open_lab
from bench.sides import ANABRANCH, SPARK, Rows, Setup, anabranch_side, spark_side
from bench.sources import all_keys, numbers
from bench.user_code import OUTPUT, PandasTotals, RowTotals

_KEYS = (2_000, 20_000)
_BUDGETS = {
    ("rows", 20_000): Budget(bound=20, aim=50),
    ("pandas", 20_000): Budget(bound=10, aim=30),
    ("rows", 2_000): Budget(bound=5, aim=10),
    ("pandas", 2_000): Budget(bound=5, aim=10),
}

Keys = Annotated[list[int], typer.Option("--keys", min=1, help="Keys, and rows, in an epoch; may be given repeatedly.")]
Kinds = Annotated[list[str], typer.Option("--kind", help="rows or pandas; may be given repeatedly.")]


def processor(
    keys: Keys = list(_KEYS),  # noqa: B006
    kind: Kinds = ["rows", "pandas"],  # noqa: B006
    epochs: Epochs = 8,
    warmup: Warmup = 3,
    native_epochs: NativeEpochs = 3,
    native_warmup: NativeWarmup = 2,
    repeats: Repeats = 3,
    workers: Workers = 2,
    parallelism: Parallelism = 2,
    store: Store = "memory",
) -> None:
    """The same StatefulProcessor on both sides, one row per key: keys/s."""
    options = dict(locals())
    for wanted in kind:
        if wanted not in _APPLY:
            raise typer.BadParameter(f"{wanted!r} is neither rows nor pandas.", param_hint="--kind")
    setup = Setup(workers=workers, parallelism=parallelism, store=store)
    runs: dict[tuple[str, int], Runs] = {}
    with open_lab(parallelism=parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        for count in sorted(set(keys)):
            for wanted in dict.fromkeys(kind):
                sides = _sides(lab, wanted, count, setup, ours=(warmup, epochs), native=(native_warmup, native_epochs))
                # Spark's rehearsal with many keys would take minutes, and the one with few has warmed up all there is.
                runs[wanted, count] = measure(lab, sides, repeats=repeats, rehearse=count == min(keys))
    Report(
        name="processor",
        title=f"a counter and a sum in a ValueState, one row per key, {workers} workers, {store} store, durable",
        ratio_title="keys/s against Spark",
        lines=[line for (wanted, count), found in runs.items() for line in _lines(wanted, count, found)],
        options=options,
        machine=machine,
        runs=[{"kind": w, "keys": n, **run.to_json()} for (w, n), found in runs.items() for run in found.runs],
        notes=[
            parts_note(f"{ANABRANCH}, {wanted}, {count:,} keys", found.of(ANABRANCH)[-1].parts_ms)
            for (wanted, count), found in runs.items()
        ],
    ).publish()


def _on_rows(rows: Rows) -> Rows:
    return rows.groupBy("key").transformWithState(RowTotals(), OUTPUT, "Update", "None")


def _on_pandas(rows: Rows) -> Rows:
    return rows.groupBy("key").transformWithStateInPandas(PandasTotals(), OUTPUT, "Update", "None")


_APPLY = {"rows": _on_rows, "pandas": _on_pandas}


def _sides(
    lab: Lab, kind: str, keys: int, setup: Setup, *, ours: tuple[int, int], native: tuple[int, int]
) -> Sequence[Side]:
    source = all_keys(numbers(lab.spark, rows=keys, partitions=setup.parallelism), keys)
    build = _APPLY[kind]
    sides = [
        spark_side(source, build, warmup=native[0], measured=native[1], keys=keys),
        anabranch_side(source, build, setup, warmup=ours[0], measured=ours[1], keys=keys),
    ]
    return [replace(side, warmup_s=WARM_S) for side in sides]


def _lines(kind: str, keys: int, runs: Runs) -> list[Line]:
    native = runs.rate(SPARK, keys)
    return [
        Line(
            work=f"{kind}, {keys:,} keys",
            side=side,
            figures={"keys/s": runs.rate(side, keys), "epoch, ms": runs.epoch_ms(side)},
            ratio=None if side == SPARK else Ratio.of(runs.rate(side, keys), native),
            budget=_BUDGETS.get((kind, keys)) if side == ANABRANCH else None,
        )
        for side in (SPARK, ANABRANCH)
    ]
