"""Parts of the live view: who owns what, how far a rescale is, and the latency over time as a line of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from rich.table import Table
from rich.text import Text

from anabranch.demo.meter import Snapshot, WorkerFigures
from anabranch.demo.rescales import RescaleFigures

_UNITS = ("B", "kB", "MB", "GB", "TB")
_BAR_WIDTH = 18
_HERE, _PENDING = "█", "░"
_LINE_WIDTH = 60
_HEIGHTS = "▁▂▃▄▅▆▇█"
#: What is slow because the job has just started would flatten all the rest.
_SETTLING_S = 5.0
#: The stage that counts, in the request that gives it more capacity.
_STAGE = 3


def size_text(size_bytes: float) -> str:
    """A number of bytes in three digits or so."""
    unit = 0
    while size_bytes >= 1000 and unit < len(_UNITS) - 1:
        size_bytes /= 1000
        unit += 1
    return f"{size_bytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size_bytes:,.1f} {_UNITS[unit]}"


def latency_text(latency_ms: Mapping[str, int]) -> str:
    if not latency_ms:
        return "none yet"
    return "  ".join(f"{name} {latency_ms[f'{name}_ms']:,} ms" for name in ("p50", "p95", "p99"))


def plain_table(first: str, *others: str) -> Table:
    """A table without lines; numbers are on the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, min_width=11)
    for name in others:
        table.add_column(name, justify="right")
    return table


def workers_table(workers: Sequence[WorkerFigures]) -> Table:
    """Which worker owns how much; key groups that have not arrived in full are in another colour.

    Frozen are former key groups of which others may still fetch keys; those keys are counted where they come from, too.
    """
    table = plain_table("worker", "key groups", "pending", "frozen", "keys", "state")
    table.add_column(justify="left")
    # The scale is that of the greatest owner, so that two workers are no shorter than a hundred.
    most = max([worker.key_groups for worker in workers], default=0)
    for worker in workers:
        table.add_row(
            worker.worker,
            f"{worker.key_groups:,}",
            f"{worker.pending_groups:,}" if worker.pending_groups else "",
            f"{worker.frozen_groups:,}" if worker.frozen_groups else "",
            f"{worker.keys:,}",
            size_text(worker.bytes),
            _groups_bar(worker, most),
        )
    return table


def _groups_bar(worker: WorkerFigures, most: int) -> Text:
    width = round(_BAR_WIDTH * worker.key_groups / max(most, 1))
    pending = min(width, math.ceil(_BAR_WIDTH * worker.pending_groups / max(most, 1)))
    return Text.assemble((_HERE * (width - pending), "cyan"), (_PENDING * pending, "yellow"))


def rescale_text(rescale: RescaleFigures, now_ms: int) -> Text:
    """A rescale in a line: what was asked for, how far it is, what has moved how."""
    styles = {"done": "green", "failed": "red", "replaced": "dim"}
    text = Text.assemble(
        f"{rescale.what}: ",
        (state_text(rescale), styles.get(rescale.state, "yellow")),
        f", {rescale.seconds(now_ms):.1f} s",
    )
    if rescale.groups_moving:
        arrived = rescale.groups_moving - rescale.groups_pending
        text.append(f", {arrived:,} of {rescale.groups_moving:,} key groups have arrived")
    return text


def moved_text(rescale: RescaleFigures) -> str:
    return (
        f"{rescale.rows_fetched:,} rows ({size_text(rescale.bytes_fetched)}) fetched on demand, "
        f"{rescale.rows_drained:,} rows ({size_text(rescale.bytes_drained)}) drained"
    )


def state_text(rescale: RescaleFigures) -> str:
    """Its state, and why it is so if there is anything to say about that."""
    return f"{rescale.state} ({rescale.message})" if rescale.message else rescale.state


def command_text(url: str) -> str:
    """What can be typed in another terminal, to give the job a worker more."""
    return f"curl http://localhost:{urlsplit(url).port}/scale?stage={_STAGE}"


def latency_lines(snapshot: Snapshot, seconds: float) -> list[Text]:
    """Latency over the whole run: the median, the 99th percentile, and below them where a rescale was."""
    step_s = max(1.0, max(seconds, snapshot.elapsed_s) / _LINE_WIDTH)
    columns = int(snapshot.elapsed_s / step_s) + 1
    medians, highs = [0] * columns, [0] * columns
    for point in snapshot.history:
        place = min(columns - 1, max(0, int(point.reached_s / step_s)))
        medians[place], highs[place] = max(medians[place], point.p50_ms), max(highs[place], point.p99_ms)
    settled = highs[int(_SETTLING_S / step_s) :]
    # Half of the height is left free above what is usual, so that a jump is seen as one.
    usual = sorted(value for value in medians if value)
    top = max([*settled, 2 * usual[len(usual) // 2]]) if usual else 0
    windows = [
        (int(snapshot.elapsed_at_s(rescale.asked_ms) / step_s), int(snapshot.elapsed_at_s(rescale.ended_ms) / step_s))
        if rescale.ended_ms is not None
        else (int(snapshot.elapsed_at_s(rescale.asked_ms) / step_s), columns - 1)
        for rescale in snapshot.rescales
    ]
    lines = [_line(values, top, windows) for values in (medians, highs)]
    lines[0].append(f"  p50, from 0 to {top:,} ms", style="dim")
    lines[1].append("  p99", style="dim")
    if windows:
        lines.append(_marks(columns, windows))
    return lines


def _line(values: Sequence[int], top: int, windows: Sequence[tuple[int, int]]) -> Text:
    """A bar for each value, and a blank where nothing came out."""
    text = Text()
    for place, value in enumerate(values):
        height = min(len(_HEIGHTS) - 1, value * len(_HEIGHTS) // max(top, 1))
        is_marked = any(first <= place <= last for first, last in windows)
        text.append(_HEIGHTS[height] if value else " ", style="magenta" if is_marked else "cyan")
    return text


def _marks(columns: int, windows: Sequence[tuple[int, int]]) -> Text:
    marks = [" "] * columns
    for first, last in windows:
        for place in range(max(0, first), min(columns - 1, last) + 1):
            marks[place] = "▔"
        marks[min(columns - 1, max(0, first))] = "▲"
    return Text("".join(marks).rstrip() + " rescale", style="magenta")
