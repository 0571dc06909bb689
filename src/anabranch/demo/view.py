"""What the demonstration shows: a live view on a terminal, lines of text elsewhere, and a summary at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anabranch.demo.meter import Snapshot, WorkerFigures
from anabranch.demo.options import DemoOptions

#: Without a live view, there is a line about every so many looks.
_LOOKS_PER_LINE = 2
_UNITS = ("B", "kB", "MB", "GB", "TB")


class View(Protocol):
    """Where snapshots go."""

    def show(self, snapshot: Snapshot, note: str = "") -> None: ...

    def say(self, text: str) -> None: ...


class LiveView:
    """Redraws the same lines of a terminal."""

    def __init__(self, live: Live, options: DemoOptions) -> None:
        self._live = live
        self._options = options

    def show(self, snapshot: Snapshot, note: str = "") -> None:
        self._live.update(render(snapshot, self._options, note), refresh=True)

    def say(self, text: str) -> None:
        self._live.update(Text(text), refresh=True)


class PlainView:
    """Writes a line about every second look."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._looks = 0
        self._note = ""

    def show(self, snapshot: Snapshot, note: str = "") -> None:
        if note != self._note or self._looks % _LOOKS_PER_LINE == 0:
            self._console.print(plain_line(snapshot, note), soft_wrap=True, highlight=False, markup=False)
        self._looks += 1
        self._note = note

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)


@contextmanager
def open_view(console: Console, options: DemoOptions, *, live: bool) -> Iterator[View]:
    """A live view if it is wanted and there is a terminal to redraw."""
    if not (live and console.is_terminal):
        yield PlainView(console)
        return
    # The summary says it all again, so the last view makes room for it.
    with Live(console=console, auto_refresh=False, transient=True) as display:
        yield LiveView(display, options)


def render(snapshot: Snapshot, options: DemoOptions, note: str = "") -> RenderableType:
    """The live view."""
    shown_s = min(snapshot.elapsed_s, options.seconds)
    heading = Table.grid(padding=(0, 2))
    heading.add_row(
        Text("anabranch demo", style="bold"),
        ProgressBar(total=options.seconds, completed=shown_s, width=32),
        Text(f"{shown_s:.0f} of {options.seconds:g} s"),
        Text(note, style="yellow"),
    )
    figures = Table.grid(padding=(0, 2))
    figures.add_row(Text("epoch", style="dim"), _epoch_text(snapshot))
    figures.add_row(Text("latency", style="dim"), _latency_text(snapshot.latency_ms))
    return Group(heading, Text(), _stages_table(snapshot), figures, Text(), workers_table(snapshot.workers))


def plain_line(snapshot: Snapshot, note: str = "") -> str:
    """The same in one line."""
    keys, held_bytes = _totals(snapshot.workers)
    parts = [
        f"{snapshot.elapsed_s:5.1f} s",
        f"epoch {_epoch_text(snapshot)}",
        f"source {snapshot.source_rows_per_s:,.0f} rows/s",
        f"sink {snapshot.sink_rows_per_s:,.0f} rows/s",
        f"latency {_latency_text(snapshot.latency_ms)}",
        f"keys {keys:,}",
        f"state {size_text(held_bytes)}",
    ]
    return "  ".join([*parts, note] if note else parts)


def workers_table(workers: Sequence[WorkerFigures]) -> Table:
    table = _table("worker", "key groups", "keys", "state")
    for worker in workers:
        table.add_row(worker.worker, f"{worker.key_groups:,}", f"{worker.keys:,}", size_text(worker.bytes))
    return table


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The figures of a run that has ended."""
    rows, latency, state = summary["rows"], summary["latency_ms"], summary["state"]
    table = Table.grid(padding=(0, 2))
    lines = [
        ("rows", f"{rows['source']:,} from the source, {rows['sink']:,} at the sink"),
        ("epochs", f"{summary['epochs']:,} in {summary['elapsed_s']:.1f} s"),
    ]
    if latency:
        names = {"p50_ms": "median", "p95_ms": "p95", "p99_ms": "p99", "max_ms": "max"}
        shown = ", ".join(f"{label} {latency[name]:,} ms" for name, label in names.items())
        lines.append(("latency", shown))
    lines.append(("state", f"{state['keys']:,} keys, {size_text(state['bytes'])}"))
    if state["counted"] is not None:
        lines.append(("counted", f"{state['counted']:,} rows, by the counts in the state"))
    for name, text in lines:
        table.add_row(Text(name, style="dim"), text)
    return table


def size_text(size_bytes: float) -> str:
    """A number of bytes in three digits or so."""
    unit = 0
    while size_bytes >= 1000 and unit < len(_UNITS) - 1:
        size_bytes /= 1000
        unit += 1
    return f"{size_bytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size_bytes:,.1f} {_UNITS[unit]}"


def _stages_table(snapshot: Snapshot) -> Table:
    table = _table("stage", "rows in/s", "rows in")
    for number, (name, rows_per_s, rows) in enumerate(snapshot.rates()):
        table.add_row(f"{number} {name}", f"{rows_per_s:,.0f}", f"{rows:,}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, min_width=12)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _epoch_text(snapshot: Snapshot) -> str:
    last = snapshot.last
    return "none yet" if last is None else f"{last.epoch} ({last.duration_ms:,} ms)"


def _latency_text(latency_ms: Mapping[str, int]) -> str:
    if not latency_ms:
        return "none yet"
    return "  ".join(f"{name} {latency_ms[f'{name}_ms']:,} ms" for name in ("p50", "p95", "p99"))


def _totals(workers: Sequence[WorkerFigures]) -> tuple[int, int]:
    return sum(worker.keys for worker in workers), sum(worker.bytes for worker in workers)
