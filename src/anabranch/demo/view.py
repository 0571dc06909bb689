"""What the demonstration shows while it runs: a live view on a terminal, lines of text elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anabranch.demo.meter import Snapshot, WorkerFigures
from anabranch.demo.options import DemoOptions
from anabranch.demo.panels import (
    command_text,
    latency_lines,
    latency_text,
    moved_text,
    plain_table,
    rescale_text,
    size_text,
    workers_table,
)

#: Without a live view, there is a line about every so many seconds, and whenever something new is to be told.
_LINE_INTERVAL_S = 2.0


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
    """Writes a line every two seconds or so, and one whenever a rescale has come a step further."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0
        self._note = ""
        self._url: str | None = None
        self._states: dict[int, str] = {}

    def show(self, snapshot: Snapshot, note: str = "") -> None:
        if snapshot.url is not None and self._url is None:
            self._url = snapshot.url
            self.say(f"HTTP API at {snapshot.url}; another worker: {command_text(snapshot.url)}")
        states = {rescale.number: rescale.state for rescale in snapshot.rescales}
        if note != self._note or states != self._states or snapshot.elapsed_s >= self._next_s:
            self.say(plain_line(snapshot, note))
            self._next_s = snapshot.elapsed_s + _LINE_INTERVAL_S
        self._note, self._states = note, states

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


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
        Text(f"anabranch demo, {options.setup}", style="bold"),
        ProgressBar(total=options.seconds, completed=shown_s, width=32),
        Text(f"{shown_s:.0f} of {options.seconds:g} s"),
        Text(note, style="yellow"),
    )
    figures = Table.grid(padding=(0, 2))
    figures.add_row(Text("epoch", style="dim"), _epoch_text(snapshot))
    figures.add_row(Text("latency", style="dim"), latency_text(snapshot.latency_ms))
    for line in latency_lines(snapshot, options.seconds):
        figures.add_row("", line)
    return Group(
        heading,
        Text(),
        _stages_table(snapshot),
        figures,
        Text(),
        workers_table(snapshot.workers),
        Text(),
        _rescale_grid(snapshot, options),
    )


def _rescale_grid(snapshot: Snapshot, options: DemoOptions) -> Table:
    grid = Table.grid(padding=(0, 2))
    if snapshot.rescales:
        last = snapshot.rescales[-1]
        grid.add_row(Text("rescale", style="dim"), rescale_text(last, snapshot.now_ms))
        grid.add_row(Text("moved", style="dim"), moved_text(last))
    elif options.workers_after:
        planned = f"to {options.workers_after} workers"
        grid.add_row(Text("rescale", style="dim"), f"{planned}, {options.rescale_at_s:g} s after the start")
    if snapshot.url is not None:
        grid.add_row(Text("control", style="dim"), f"{snapshot.url}; for another worker, in another terminal:")
        grid.add_row("", command_text(snapshot.url))
    return grid


def plain_line(snapshot: Snapshot, note: str = "") -> str:
    """The same in one line."""
    keys, held_bytes = _totals(snapshot.workers)
    parts = [
        f"{snapshot.elapsed_s:5.1f} s",
        f"epoch {_epoch_text(snapshot)}",
        f"source {snapshot.source_rows_per_s:,.0f} rows/s",
        f"sink {snapshot.sink_rows_per_s:,.0f} rows/s",
        f"latency {latency_text(snapshot.latency_ms)}",
        f"workers {len(snapshot.workers)}",
        f"keys {keys:,}",
        f"state {size_text(held_bytes)}",
    ]
    if snapshot.rescales:
        parts.append(f"rescale {rescale_text(snapshot.rescales[-1], snapshot.now_ms)}")
    return "  ".join([*parts, note] if note else parts)


def _stages_table(snapshot: Snapshot) -> Table:
    table = plain_table("stage", "rows in/s", "rows in")
    for number, (name, rows_per_s, rows) in enumerate(snapshot.rates()):
        table.add_row(f"{number} {name}", f"{rows_per_s:,.0f}", f"{rows:,}")
    return table


def _epoch_text(snapshot: Snapshot) -> str:
    last = snapshot.last
    return "none yet" if last is None else f"{last.epoch} ({last.duration_ms:,} ms)"


def _totals(workers: Sequence[WorkerFigures]) -> tuple[int, int]:
    return sum(worker.keys for worker in workers), sum(worker.bytes for worker in workers)
