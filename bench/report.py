"""What a benchmark says: a table for people, a JSON file for everything else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import Budget, Figure, Ratio

RESULTS = Path(__file__).resolve().parent / "results"
_NARROWEST = 150

_notes = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print a line about what is going on, apart from the result."""
    _notes.print(text, style="dim", markup=False)


@dataclass(frozen=True)
class Line:
    """A line of the table: what one side did at one piece of work."""

    work: str
    side: str
    #: By what they are figures of, with the unit.
    figures: Mapping[str, Figure]
    #: Against what the ratio is, is said by the table's title.
    ratio: Ratio | None = None
    budget: Budget | None = None
    #: What the budget is for, where it is not the ratio.
    budgeted: float | None = None

    @property
    def judged(self) -> float | None:
        return self.budgeted if self.budgeted is not None else self.ratio.value if self.ratio else None

    def to_json(self) -> dict[str, Any]:
        judged = self.judged
        return {
            "work": self.work,
            "side": self.side,
            "figures": {name: figure.to_json() for name, figure in self.figures.items()},
            "ratio": self.ratio.to_json() if self.ratio else None,
            "budget": self.budget.to_json(judged) if self.budget and judged is not None else None,
        }


@dataclass(frozen=True)
class Report:
    """The result of a benchmark."""

    name: str
    title: str
    #: What the ratios mean, for the head of their column.
    ratio_title: str
    lines: Sequence[Line]
    options: Mapping[str, Any]
    machine: Mapping[str, Any]
    runs: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = field(default_factory=tuple)

    def publish(self) -> Path:
        """Print the table and write the file; return its path."""
        wide = Console().width if Console().is_terminal else _NARROWEST
        console = Console(width=max(wide, _NARROWEST), highlight=False)
        console.print(self._table())
        for note in self.notes:
            console.print(note, markup=False)
        path = self._write()
        console.print(f"written to {os.path.relpath(path)}", markup=False)
        return path

    def _table(self) -> Table:
        names = list(dict.fromkeys(name for line in self.lines for name in line.figures))
        has_ratios = any(line.ratio for line in self.lines)
        has_budgets = any(line.budget for line in self.lines)
        table = Table(title=self.title, title_justify="left")
        for name in ("work", "side"):
            table.add_column(name)
        for name in [*names, *([self.ratio_title] if has_ratios else [])]:
            table.add_column(name, justify="right")
        if has_budgets:
            table.add_column("budget")
        for line in self.lines:
            judged = line.judged
            cells = [line.work, line.side, *[_cell(line.figures.get(name)) for name in names]]
            if has_ratios:
                cells.append(line.ratio.text() if line.ratio else "")
            if has_budgets:
                cells.append(line.budget.text(judged) if line.budget and judged is not None else "")
            table.add_row(*cells)
        return table

    def _write(self) -> Path:
        RESULTS.mkdir(exist_ok=True)
        now = datetime.now(UTC)
        path = RESULTS / f"{self.name}-{now:%Y%m%dT%H%M%SZ}.json"
        document = {
            "name": self.name,
            "title": self.title,
            "options": dict(self.options),
            "machine": {**self.machine, "load_average_after": list(os.getloadavg())},
            "ratio": self.ratio_title,
            "lines": [line.to_json() for line in self.lines],
            "notes": list(self.notes),
            "runs": list(self.runs),
        }
        path.write_text(json.dumps(document, indent=2, default=str) + "\n")
        return path


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    return figure.text(digits=0 if figure.median >= 100 else 2)


def parts_note(side: str, parts_ms: Mapping[str, float]) -> str:
    """Say where an epoch's time went, largest part first."""
    ordered = sorted(parts_ms.items(), key=lambda part: -part[1])
    return f"{side}, median ms: " + ", ".join(f"{name} {value:,.0f}" for name, value in ordered if value >= 0.5)
