"""What a soak says in the end: what was done to each query, and what became of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from soak.run import Outcome
from soak.scenarios import Wanted

_COLUMNS = (
    *("seed", "query", "store", "durable", "storage", "seconds", "drivers", "epochs", "rows", "faults", "errors"),
    *("ends", "lost", "doubled", "wrong"),
)


def report(outcome: Outcome) -> list[str]:
    """One scenario, in a few lines."""
    counts = f"{outcome.drivers} drivers, {outcome.epochs} epochs, {outcome.verdict.rows} rows"
    lines = [f"{outcome.duration_s:.0f} s, {counts}; {_counted(outcome.faults) or 'no faults'}"]
    if outcome.storage_errors:
        ends = f"; the query ended {outcome.storage_ends} times because of it"
        lines.append(f"the storage failed: {_counted(outcome.storage_errors)}{ends}")
    if outcome.fenced:
        lines.append(f"drivers that were replaced ended with {', '.join(outcome.fenced)}")
    lines += [f"a query ended by itself: {error}" for error in outcome.errors]
    lines += [f"WRONG: {finding}" for finding in outcome.verdict.findings]
    return lines


def summary(outcomes: list[Outcome], wanted: Wanted) -> list[str]:
    """A line for each scenario, and all of them together."""
    faults = _sum(outcome.faults for outcome in outcomes)
    storage_errors = _sum(outcome.storage_errors for outcome in outcomes)
    failed = [outcome.scenario for outcome in outcomes if not outcome.is_right]
    ended = [outcome.scenario.seed for outcome in outcomes if outcome.errors]
    jobs = Counter(outcome.scenario.job for outcome in outcomes)
    stores = Counter(outcome.scenario.store for outcome in outcomes)
    volatile = sum(outcome.scenario.checkpoint_interval_s > 0 for outcome in outcomes)
    restarts = sum(outcome.drivers - 1 for outcome in outcomes)
    lines = [
        *_table(outcomes),
        f"scenarios  {len(outcomes)}: {_counted(jobs)}; {_counted(stores)}; {volatile} not durable every epoch",
        f"faults     {faults.total()}: {_counted(faults)}",
        f"storage    {storage_errors.total()} errors: {_counted(storage_errors) or 'none'}",
        f"restarts   {restarts}, of which {sum(outcome.storage_ends for outcome in outcomes)} after storage errors",
        f"epochs     {sum(outcome.epochs for outcome in outcomes)}",
        f"rows       {sum(outcome.verdict.rows for outcome in outcomes)}",
        f"lost       {sum(outcome.verdict.lost for outcome in outcomes)}",
        f"doubled    {sum(outcome.verdict.doubled for outcome in outcomes)}",
        f"wrong      {sum(outcome.verdict.wrong for outcome in outcomes)}",
        f"queries that ended by themselves and went on after a restart  {len(ended)}{_seeds(ended)}",
    ]
    again = " ".join(filter(None, ["./run soak --minutes 0", wanted.options()]))
    lines += [f"WRONG; to see it again: {again} --seed {each.seed}" for each in failed]
    return lines


def _table(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each scenario, its columns below each other."""
    rows = [_COLUMNS, *(tuple(map(str, _row(outcome))) for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(outcome: Outcome) -> tuple[object, ...]:
    scenario, verdict = outcome.scenario, outcome.verdict
    interval_s = scenario.checkpoint_interval_s
    return (
        *(scenario.seed, scenario.job, scenario.store, f"every {interval_s:g} s" if interval_s else "every epoch"),
        *("fails" if scenario.storage_fails else "works", f"{outcome.duration_s:.0f}", outcome.drivers, outcome.epochs),
        *(verdict.rows, outcome.faults.total(), outcome.storage_errors.total(), outcome.storage_ends),
        *(verdict.lost, verdict.doubled, verdict.wrong),
    )


def _counted(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _sum(counters: Iterable[Mapping[Any, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counters:
        total.update({str(name): count for name, count in each.items()})
    return total


def _seeds(seeds: list[int]) -> str:
    return f" (seeds {', '.join(map(str, seeds))})" if seeds else ""
