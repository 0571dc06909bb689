"""What the demonstration shows while it runs: a live view on a terminal, lines of text elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anabranch.demo.job import COUNT_STAGE
from anabranch.demo.meter import RescaleFigures, RunFigures, WorkerFigures
from anabranch.demo.options import DemoOptions

#: Without a live view, there is a line about every two seconds, and whenever something new is to be told.
_LINE_INTERVAL_S = 2.0
_UNITS = ("B", "kB", "MB", "GB", "TB")
_BAR_WIDTH = 18
_HERE, _PENDING = "█", "░"
_LINE_WIDTH = 60
_HEIGHTS = "▁▂▃▄▅▆▇█"
#: What is slow because the job has just started would flatten all the rest.
_SETTLING_S = 5.0
_RESCALE_STYLES = {"done": "green", "failed": "red", "replaced": "dim"}


class PlainView:
    """Writes a line every two seconds or so, and one whenever a rescale has come a step further."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0
        self._note = ""
        self._url: str | None = None
        self._states: dict[int, str] = {}

    def show(self, figures: RunFigures, note: str = "") -> None:
        if figures.url is not None and self._url is None:
            self._url = figures.url
            self.say(f"HTTP API at {figures.url}; another worker: {command_text(figures.url)}")
        states = {rescale.number: rescale.state for rescale in figures.rescales}
        if note != self._note or states != self._states or figures.elapsed_s >= self._next_s:
            self.say(plain_line(figures, note))
            self._next_s = figures.elapsed_s + _LINE_INTERVAL_S
        self._note, self._states = note, states

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


class LiveView:
    """Redraws the same lines of a terminal."""

    def __init__(self, live: Live, options: DemoOptions) -> None:
        self._live = live
        self._options = options

    def show(self, figures: RunFigures, note: str = "") -> None:
        self._live.update(render(figures, self._options, note), refresh=True)

    def say(self, text: str) -> None:
        self._live.update(Text(text), refresh=True)


View = PlainView | LiveView


@contextmanager
def open_view(console: Console, options: DemoOptions, *, live: bool) -> Iterator[View]:
    """Open a live view if it is wanted and there is a terminal to redraw, and a plain one otherwise."""
    if not (live and console.is_terminal):
        yield PlainView(console)
        return
    # The summary says it all again, so the last view makes room for it.
    with Live(console=console, auto_refresh=False, transient=True) as display:
        yield LiveView(display, options)


def render(figures: RunFigures, options: DemoOptions, note: str = "") -> RenderableType:
    """Draw the live view."""
    shown_s = min(figures.elapsed_s, options.seconds)
    heading = Table.grid(padding=(0, 2))
    heading.add_row(
        Text(f"anabranch demo, {options.setup}", style="bold"),
        ProgressBar(total=options.seconds, completed=shown_s, width=32),
        Text(f"{shown_s:.0f} of {options.seconds:g} s"),
        Text(note, style="yellow"),
    )
    stages = plain_table("stage", "rows in/s", "rows in")
    for number, (name, rows_per_s, rows) in enumerate(figures.rates()):
        stages.add_row(f"{number} {name}", f"{rows_per_s:,.0f}", f"{rows:,}")
    epochs = grid({"epoch": _epoch_text(figures), "latency": _latency_text(figures.latency_ms)})
    for line in latency_lines(figures, options.seconds):
        epochs.add_row("", line)
    return Group(
        heading, Text(), stages, epochs, Text(), workers_table(figures.workers), Text(), _rescale_grid(figures, options)
    )


def plain_line(figures: RunFigures, note: str = "") -> str:
    """Write in one line what the live view shows."""
    parts = [
        f"{figures.elapsed_s:5.1f} s",
        f"epoch {_epoch_text(figures)}",
        f"source {figures.source_rows_per_s:,.0f} rows/s",
        f"sink {figures.sink_rows_per_s:,.0f} rows/s",
        f"latency {_latency_text(figures.latency_ms)}",
        f"workers {len(figures.workers)}",
        f"keys {sum(worker.keys for worker in figures.workers):,}",
        f"state {size_text(sum(worker.bytes for worker in figures.workers))}",
    ]
    if figures.rescales:
        parts.append(f"rescale {_rescale_text(figures.rescales[-1], figures.now_ms)}")
    return "  ".join([*parts, note] if note else parts)


def workers_table(workers: Sequence[WorkerFigures]) -> Table:
    """Show which worker owns how much; key groups that have not arrived in full are in another colour.

    Frozen are former key groups of which others may still fetch keys; those keys are counted where they come from, too.
    """
    table = plain_table("worker", "key groups", "pending", "frozen", "keys", "state")
    table.add_column(justify="left")
    # The scale is that of the greatest owner, so that two workers are no shorter than a hundred.
    most = max([1, *(worker.key_groups for worker in workers)])
    for worker in workers:
        width = round(_BAR_WIDTH * worker.key_groups / most)
        pending = min(width, math.ceil(_BAR_WIDTH * worker.pending_groups / most))
        table.add_row(
            worker.worker,
            f"{worker.key_groups:,}",
            f"{worker.pending_groups:,}" if worker.pending_groups else "",
            f"{worker.frozen_groups:,}" if worker.frozen_groups else "",
            f"{worker.keys:,}",
            size_text(worker.bytes),
            Text.assemble((_HERE * (width - pending), "cyan"), (_PENDING * pending, "yellow")),
        )
    return table


def latency_lines(figures: RunFigures, seconds: float) -> list[Text]:
    """Draw latency over the whole run: the median, the 99th percentile, and below them where a rescale was."""
    step_s = max(1.0, max(seconds, figures.elapsed_s) / _LINE_WIDTH)
    columns = int(figures.elapsed_s / step_s) + 1

    def column_of(elapsed_s: float) -> int:
        return min(columns - 1, max(0, int(elapsed_s / step_s)))

    medians, highs = [0] * columns, [0] * columns
    for point in figures.history:
        place = column_of(point.reached_s)
        medians[place], highs[place] = max(medians[place], point.p50_ms), max(highs[place], point.p99_ms)
    settled = highs[int(_SETTLING_S / step_s) :]
    # Half of the height is left free above what is usual, so that a jump is seen as one.
    usual = sorted(value for value in medians if value)
    top = max([*settled, 2 * usual[len(usual) // 2]]) if usual else 0
    marks = [" "] * columns
    for rescale in figures.rescales:
        first = column_of(figures.elapsed_at_s(rescale.asked_ms))
        last = columns - 1 if rescale.ended_ms is None else column_of(figures.elapsed_at_s(rescale.ended_ms))
        marks[first : last + 1] = "▔" * (last + 1 - first)
        marks[first] = "▲"
    lines = [_bars(values, top, marks) for values in (medians, highs)]
    lines[0].append(f"  p50, from 0 to {top:,} ms", style="dim")
    lines[1].append("  p99", style="dim")
    if figures.rescales:
        lines.append(Text("".join(marks).rstrip() + " rescale", style="magenta"))
    return lines


def _bars(values: Sequence[int], top: int, marks: Sequence[str]) -> Text:
    """Draw a bar for each value, and a blank where nothing came out."""
    text = Text()
    for value, mark in zip(values, marks, strict=True):
        height = min(len(_HEIGHTS) - 1, value * len(_HEIGHTS) // max(top, 1))
        text.append(_HEIGHTS[height] if value else " ", style="cyan" if mark == " " else "magenta")
    return text


def _rescale_grid(figures: RunFigures, options: DemoOptions) -> Table:
    lines: dict[str, str | Text] = {}
    if figures.rescales:
        last = figures.rescales[-1]
        lines["rescale"] = _rescale_text(last, figures.now_ms)
        lines["moved"] = moved_text(last.rows_fetched, last.bytes_fetched, last.rows_drained, last.bytes_drained)
    elif options.workers_after:
        lines["rescale"] = f"to {options.workers_after} workers, {options.rescale_at_s:g} s after the start"
    if figures.url is not None:
        lines["control"] = f"{figures.url}; for another worker, in another terminal:"
        lines[""] = command_text(figures.url)
    return grid(lines)


def _rescale_text(rescale: RescaleFigures, now_ms: int) -> Text:
    """Write a rescale in a line: what was asked for, how far it is, what has moved how."""
    state = f"{rescale.state} ({rescale.message})" if rescale.message else rescale.state
    text = Text.assemble(
        f"{rescale.what}: ",
        (state, _RESCALE_STYLES.get(rescale.state, "yellow")),
        f", {rescale.seconds(now_ms):.1f} s",
    )
    if rescale.groups_moving:
        arrived = rescale.groups_moving - rescale.groups_pending
        text.append(f", {arrived:,} of {rescale.groups_moving:,} key groups have arrived")
    return text


def moved_text(rows_fetched: int, bytes_fetched: int, rows_drained: int, bytes_drained: int) -> str:
    return (
        f"{rows_fetched:,} rows ({size_text(bytes_fetched)}) fetched on demand, "
        f"{rows_drained:,} rows ({size_text(bytes_drained)}) drained"
    )


def command_text(url: str) -> str:
    """Write what can be typed in another terminal, to give the job another worker."""
    return f"curl http://localhost:{urlsplit(url).port}/scale?stage={COUNT_STAGE}"


def size_text(size_bytes: float) -> str:
    """Write a number of bytes in about three digits."""
    unit = 0
    while size_bytes >= 1000 and unit < len(_UNITS) - 1:
        size_bytes /= 1000
        unit += 1
    return f"{size_bytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size_bytes:,.1f} {_UNITS[unit]}"


def plain_table(first: str, *others: str) -> Table:
    """Make a table without lines; numbers are on the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, min_width=11)
    for name in others:
        table.add_column(name, justify="right")
    return table


def grid(lines: Mapping[str, str | Text]) -> Table:
    """Make lines of a dim name and what it stands for."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=7)
    for name, text in lines.items():
        table.add_row(Text(name, style="dim"), text)
    return table


def _epoch_text(figures: RunFigures) -> str:
    last = figures.last
    return "none yet" if last is None else f"{last.epoch} ({last.duration_ms:,} ms)"


def _latency_text(latency_ms: Mapping[str, int]) -> str:
    if not latency_ms:
        return "none yet"
    return "  ".join(f"{name} {latency_ms[f'{name}_ms']:,} ms" for name in ("p50", "p95", "p99"))
