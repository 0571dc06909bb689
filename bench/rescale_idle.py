"""A query that is not rescaled, with `anabranch.migration` set to lazy and to restart.

There is no mode without the machinery of lazy migration: key groups, routes and holdings are part of every epoch, and
both settings run the same code until a rescale is asked for. So the two should be equal, and what is measured is that
they are: that being ready to move state lazily costs no more than being ready to restart, not what the machinery itself
costs. The benchmark `steady`, which compares with Spark and with no state at all, has that in its figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.figures import Budget, Ratio
from bench.harness import measure
from bench.machine import describe_machine
from bench.report import Line, Report, parts_note
from bench.session import open_lab
from bench.sides import Setup, anabranch_side, totals
from bench.sources import all_keys, numbers

_LAZY, _RESTART = "lazy", "restart"
_SAME_CODE = (
    "there is no mode without lazy migration's machinery: both settings run the same code until a rescale is asked "
    "for, so this shows that they are equal, and how much two runs of the same code differ here"
)
_ROWS, _ROWS_PER_KEY = 2_000_000, 10
_WARMUP, _MEASURED = 3, 8
_BUDGET = Budget(bound=0.97, aim=1.0)


@dataclass(frozen=True)
class _MigrationSetup(Setup):
    """A set-up with one of the migrations."""

    migration: str

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "anabranch.migration": self.migration}


def measure_idle(*, rows: int, repeats: int, setup: Setup, options: Mapping[str, Any]) -> None:
    """Run the work of the benchmark `steady`, in turn with the two settings."""
    keys = rows // _ROWS_PER_KEY
    with open_lab(parallelism=setup.parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        source = all_keys(numbers(lab.spark, rows=rows, partitions=setup.parallelism), keys)
        sides = [
            anabranch_side(
                source, totals, _MigrationSetup(**setup.__dict__, migration=name),
                warmup=_WARMUP, measured=_MEASURED, name=name, keys=keys,
            )
            for name in (_RESTART, _LAZY)
        ]  # fmt: skip
        runs = measure(lab, sides, repeats=repeats)
    restart = runs.rate(_RESTART, rows)
    Report(
        name="rescale-idle",
        title=f"{rows:,} rows and {keys:,} keys an epoch, {setup.workers} workers, {setup.store} store, durable; "
        "nothing is rescaled",
        ratio_title="rows/s against restart",
        lines=[
            Line(
                work="count and sum",
                side=name,
                figures={"rows/s": runs.rate(name, rows), "epoch, ms": runs.epoch_ms(name)},
                ratio=Ratio.of(runs.rate(name, rows), restart) if name == _LAZY else None,
                budget=_BUDGET if name == _LAZY and rows == _ROWS else None,
            )
            for name in (_RESTART, _LAZY)
        ],
        options=options,
        machine=machine,
        runs=[run.to_json() for run in runs.runs],
        notes=[_SAME_CODE, *(parts_note(name, runs.of(name)[-1].parts_ms) for name in (_RESTART, _LAZY))],
    ).publish()
