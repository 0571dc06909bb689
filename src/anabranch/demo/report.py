"""What the demonstration says at its end: the figures of a run, what its rescales did, and several runs compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from anabranch.demo.panels import plain_table, size_text

_PERCENTILES = {"p50_ms": "median", "p95_ms": "p95", "p99_ms": "p99", "max_ms": "max"}
_PHASES = ("before", "during", "after")


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The figures of a run that has ended."""
    rows, latency, state = summary["rows"], summary["latency_ms"], summary["state"]
    lines = [
        ("rows", f"{rows['source']:,} from the source, {rows['sink']:,} at the sink"),
        ("epochs", f"{summary['epochs']:,} in {summary['elapsed_s']:.1f} s"),
    ]
    if latency:
        shown = ", ".join(f"{label} {latency[name]:,} ms" for name, label in _PERCENTILES.items())
        lines.append(("latency", shown))
    lines.append(("state", f"{state['keys']:,} keys, {size_text(state['bytes'])}"))
    if state["counted"] is not None:
        lines.append(("counted", f"{state['counted']:,} rows, by the counts in the state"))
    return _grid(lines)


def rescale_report(rescale: Mapping[str, Any]) -> RenderableType:
    """What a rescale did: latency around it, its slowest epoch, the gap in the output, and what moved how."""
    head = f"{rescale['what']} ({rescale['strategy']}), asked for at {rescale['asked_s']:.1f} s: {rescale['state']}"
    if rescale["message"]:
        head += f" ({rescale['message']})"
    elif rescale["seconds"] is not None:
        head += f" after {rescale['seconds']:.1f} s"
    lines = [
        (
            "epochs",
            _against(rescale["slowest_epoch_during_ms"], rescale["median_epoch_before_ms"], "slowest during it"),
        ),
        (
            "output",
            _against(rescale["longest_gap_during_ms"], rescale["median_gap_before_ms"], "longest gap during it"),
        ),
        ("moved", moved(rescale)),
    ]
    return Group(
        _grid([("rescale", head)]),
        Padding(Group(_phases_table(rescale), _grid([line for line in lines if line[1]])), (0, 0, 0, 2)),
    )


def compare_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """The first rescale of each run, by its strategy."""
    table = plain_table(
        *("migration\n(in ms)", "took", "p99\nbefore", "p99\nduring", "max\nduring", "slowest\nepoch"),
        *("longest\ngap", "usual\ngap"),
    )
    for name, summary in summaries.items():
        if not summary["rescales"]:
            table.add_row(name, "none")
            continue
        rescale = summary["rescales"][0]
        before, during = (rescale["latency_ms"][phase] for phase in ("before", "during"))
        figures_ms = (
            *(before.get("p99_ms"), during.get("p99_ms"), during.get("max_ms"), rescale["slowest_epoch_during_ms"]),
            *(rescale["longest_gap_during_ms"], rescale["median_gap_before_ms"]),
        )
        took = "not done" if rescale["seconds"] is None else f"{rescale['seconds'] * 1000:,.0f}"
        table.add_row(name, took, *("" if value is None else f"{value:,}" for value in figures_ms))
    return table


def moved(rescale: Mapping[str, Any]) -> str:
    """What moved, and how."""
    if rescale["strategy"] == "restart":
        return "everything was stopped, and read from the checkpoint by the new workers"
    if not rescale["groups_moving"]:
        return "nothing had to move"
    return (
        f"{rescale['groups_moving']:,} key groups: "
        f"{rescale['rows_fetched']:,} rows ({size_text(rescale['bytes_fetched'])}) fetched on demand, "
        f"{rescale['rows_drained']:,} rows ({size_text(rescale['bytes_drained'])}) drained"
    )


def _phases_table(rescale: Mapping[str, Any]) -> Table:
    table = plain_table("latency", "rows", *_PERCENTILES.values())
    for phase in _PHASES:
        figures = rescale["latency_ms"][phase]
        table.add_row(phase, f"{figures['count']:,}", *(_ms(figures.get(name)) for name in _PERCENTILES))
    return table


def _against(worst_ms: int | None, usual_ms: int | None, what: str) -> str:
    if worst_ms is None:
        return ""
    if not usual_ms:
        return f"{what} {worst_ms:,} ms"
    return f"{what} {worst_ms:,} ms, median before {usual_ms:,} ms: {worst_ms / usual_ms:.1f} times as long"


def _ms(value_ms: int | None) -> str:
    return "" if value_ms is None else f"{value_ms:,} ms"


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=7)
    for name, text in lines:
        grid.add_row(Text(name, style="dim"), text)
    return grid
