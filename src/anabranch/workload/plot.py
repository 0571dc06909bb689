"""Pictures of runs: latency above, throughput below, with marks for what happened. One run, or several side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.errors import AnabranchError
from anabranch.workload.latency import Latencies, Millis, per_second, read_latencies, throughput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A moment to mark in a plot, in milliseconds since 1970, and what happened then.
Event: TypeAlias = tuple[int, str]

#: A plot of more seconds than this would show nothing; times that far apart are a mistake.
_SECONDS_MAX = 10_000_000
_MARK = "#6a4c93"
_LINES = (
    ("max_ms", "#b9b9b9", 0.9),
    ("p99_ms", "#c1440e", 1.3),
    ("p95_ms", "#e09f3e", 1.3),
    ("p50_ms", "#2a6f97", 1.9),
)
_LABEL_SIZE = 9
#: How wide a letter of that size is, about.
_LETTER_INCHES = 0.074


@dataclass(frozen=True)
class DrawnRun:
    """A run as it is drawn in one column: a name, the rows, moments to mark, and times to shade."""

    name: str
    latencies: Latencies
    events: Sequence[Event] = ()
    #: From and to, in milliseconds since 1970.
    spans: Sequence[tuple[int, int]] = ()


def missing_library() -> str:
    """Return what to install before a picture can be drawn; an empty text if nothing is missing."""
    if find_spec("matplotlib") is not None:
        return ""
    return "Pictures need matplotlib, which is not installed. Install it with: pip install 'anabranch[plots]'."


def plot_latency(
    lines_path: str | os.PathLike[str],
    picture_path: str | os.PathLike[str],
    events: Sequence[Event] = (),
    *,
    title: str = "",
) -> None:
    """Draw latency and throughput over time, one above the other, with a mark at each event; as PNG or SVG."""
    plot_runs([DrawnRun("", read_latencies(lines_path), events)], [picture_path], title=title)


def plot_runs(runs: Sequence[DrawnRun], picture_paths: Sequence[str | os.PathLike[str]], *, title: str = "") -> None:
    """Draw runs side by side, on the same scales. The suffix of each path says whether it becomes a PNG or an SVG."""
    if missing := missing_library():
        raise AnabranchError(missing)
    # Matplotlib takes a second to import, and tasks that import this package never draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bounds = [_bounds(run.latencies) for run in runs]
    width = 11.0 if len(runs) == 1 else 1.6 + 4.4 * len(runs)
    figure = Figure(figsize=(width, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(runs), sharex="col", sharey="row", height_ratios=(3, 2), squeeze=False)
    inches = (width - 1.6) / len(runs)
    for place, (run, (first_s, last_s)) in enumerate(zip(runs, bounds, strict=True)):
        _draw_run(axes[0][place], axes[1][place], run, first_s, last_s, inches)
    _scale_latency(axes[0][0], [per_second(run.latencies) for run in runs])
    axes[1][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel("latency (ms), by arrival")
    axes[1][0].set_ylabel("rows per second")
    for row in axes:
        row[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    for path in picture_paths:
        figure.savefig(path)


def _draw_run(upper: Axes, lower: Axes, run: DrawnRun, first_s: int, last_s: int, inches: float) -> None:
    from matplotlib.ticker import MaxNLocator

    _draw_latency(upper, per_second(run.latencies), first_s)
    _draw_throughput(lower, run.latencies, first_s, last_s)
    for axes in (upper, lower):
        axes.grid(visible=True, color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        for from_ms, to_ms in run.spans:
            axes.axvspan(from_ms / 1000 - first_s, to_ms / 1000 - first_s, color=_MARK, alpha=0.1, linewidth=0)
    marked_s = [time_ms / 1000 - first_s for time_ms in (*(event[0] for event in run.events), *chain(*run.spans))]
    # What happened before the first row or after the last is shown too; a label outside would squeeze the panels.
    lower.set_xlim(min([0, *marked_s]), max([last_s - first_s + 1, *marked_s]))
    lower.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10], integer=True))
    lower.set_xlabel("time since the first row (s)")
    levels = _mark_events(upper, lower, run.events, first_s, inches)
    if run.name:
        upper.set_title(run.name, loc="left", fontsize=12, fontweight="bold", pad=8 + 12 * levels)


def _draw_latency(axes: Axes, seconds: pa.Table, first_s: int) -> None:
    drawn = {name: seconds.column(name).to_numpy() for name in seconds.column_names}
    middles_s = drawn["time_ms"] // 1000 - first_s + 0.5
    x, lows, highs = _with_gaps(middles_s, drawn["p50_ms"], drawn["p99_ms"])
    axes.fill_between(x, lows, highs, color="#2a6f97", alpha=0.12, linewidth=0)
    for name, colour, width in _LINES:
        x, y = _with_gaps(middles_s, drawn[name])
        axes.plot(x, y, color=colour, linewidth=width, label=name.removesuffix("_ms"))


def _scale_latency(axes: Axes, runs: Sequence[pa.Table]) -> None:
    """Give all runs one scale; a linear one would flatten all but a standstill."""
    from matplotlib.ticker import LogLocator

    medians, highs = (np.concatenate([run.column(name).to_numpy() for run in runs]) for name in ("p50_ms", "max_ms"))
    lowest = int(medians.min())
    if lowest > 0 and highs.max() > 20 * float(np.median(medians)):
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.set_ylim(bottom=lowest / 2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    else:
        axes.set_ylim(bottom=min(0, lowest))


def _draw_throughput(axes: Axes, latencies: Latencies, first_s: int, last_s: int) -> None:
    edges = np.arange(last_s - first_s + 2)
    done = throughput(latencies.processed_ms, first_s=first_s, last_s=last_s)
    came = throughput(latencies.ingestion_ms, first_s=first_s, last_s=last_s)
    axes.stairs(done, edges, fill=True, color="#61a5c2", alpha=0.6, label="processed")
    axes.stairs(came, edges, color="#333333", linewidth=1.1, linestyle="--", label="arrived")


def _mark_events(upper: Axes, lower: Axes, events: Sequence[Event], first_s: int, inches: float) -> int:
    """Draw a line and a label for each event, a step higher where it would hit its neighbour; return the steps."""
    low, high = lower.get_xlim()
    ends = [-np.inf] * 3
    highest = 0
    for time_ms, label in sorted(events):
        x = time_ms / 1000 - first_s
        for axes in (upper, lower):
            axes.axvline(x, color=_MARK, linewidth=1.1, linestyle=(0, (4, 2)))
        width = (len(label) + 1) * _LETTER_INCHES * (high - low) / inches
        level = next((step for step, end in enumerate(ends) if x > end), len(ends) - 1)
        ends[level] = x + width
        highest = max(highest, level + 1)
        # A label near the right edge would run out of the panel, so it ends at its line.
        is_late = x + width > high and level == 0 and x - width > low
        upper.annotate(
            label,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if is_late else 3, 3 + 12 * level),
            textcoords="offset points",
            ha="right" if is_late else "left",
            color=_MARK,
            fontsize=_LABEL_SIZE,
        )
    return highest


def _with_gaps(seconds: npt.NDArray[np.float64], *values: Millis) -> list[npt.NDArray[np.float64]]:
    """Break lines where seconds without rows lie between, so that no line is drawn across."""
    breaks = np.flatnonzero(np.diff(seconds) > 1) + 1
    return [np.insert(column.astype(np.float64), breaks, np.nan) for column in (seconds, *values)]


def _bounds(latencies: Latencies) -> tuple[int, int]:
    """Return the first and the last second of a run."""
    if not len(latencies.ingestion_ms):
        raise AnabranchError("There is a header but no latency lines. Let the query process some rows first.")
    first_s = int(min(latencies.ingestion_ms.min(), latencies.processed_ms.min())) // 1000
    last_s = int(latencies.processed_ms.max()) // 1000
    if last_s - first_s > _SECONDS_MAX:
        raise AnabranchError(f"The lines span {last_s - first_s} seconds. Plot lines of one run only.")
    return first_s, max(last_s, int(latencies.ingestion_ms.max()) // 1000)
