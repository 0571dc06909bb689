"""What lazy migration costs a query that is not rescaled: big epochs with it enabled, against the same without it."""

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

_ENABLED, _DISABLED = "lazy", "restart"
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
    """The work of the benchmark `steady`, in turn with lazy migration and with none while the query runs."""
    keys = rows // _ROWS_PER_KEY
    with open_lab(parallelism=setup.parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        source = all_keys(numbers(lab.spark, rows=rows, partitions=setup.parallelism), keys)
        sides = [
            anabranch_side(
                source, totals, _MigrationSetup(**setup.__dict__, migration=name),
                warmup=_WARMUP, measured=_MEASURED, name=name, keys=keys,
            )
            for name in (_DISABLED, _ENABLED)
        ]  # fmt: skip
        runs = measure(lab, sides, repeats=repeats)
    disabled = runs.rate(_DISABLED, rows)
    Report(
        name="rescale-idle",
        title=f"{rows:,} rows and {keys:,} keys an epoch, {setup.workers} workers, {setup.store} store, durable; "
        "nothing is rescaled",
        ratio_title="rows/s against disabled",
        lines=[
            Line(
                work="count and sum",
                side=f"{name} ({'enabled' if name == _ENABLED else 'disabled'})",
                figures={"rows/s": runs.rate(name, rows), "epoch, ms": runs.epoch_ms(name)},
                ratio=Ratio.of(runs.rate(name, rows), disabled) if name == _ENABLED else None,
                budget=_BUDGET if name == _ENABLED and rows == _ROWS else None,
            )
            for name in (_DISABLED, _ENABLED)
        ],
        options=options,
        machine=machine,
        runs=[run.to_json() for run in runs.runs],
        notes=[parts_note(name, runs.of(name)[-1].parts_ms) for name in (_DISABLED, _ENABLED)],
    ).publish()
