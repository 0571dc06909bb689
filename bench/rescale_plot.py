"""The picture of a rescale, from a result: ``python -m bench.rescale_plot RESULT.json [PICTURE]``.

Latency above, throughput below; on the left the way to more workers, on the right the way back. Time 0 is the call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = npt.NDArray[np.float64]

_COLOURS = {
    "lazy": "#1f6fb4",
    "eager": "#2e8b57",
    "restart": "#e09f3e",
    "remote": "#6a4c93",
    "spark": "#c1440e",
}
_OTHER_COLOUR = "#777777"
_LABELS = {"spark": "Spark: stop, repartition offline, start"}
#: How long before the call and after the end of the slowest strategy is shown, at most.
_BEFORE_S, _AFTER_S = 12.0, 12.0
_STEP_S = 0.5
_SAMPLES = 20
_SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class Track:
    """One rescale of one strategy. Times are in seconds from the call."""

    side: str
    title: str
    done_s: float
    #: When each epoch began and ended, and its rows, and when its first and its last row came.
    start_s: Values
    end_s: Values
    rows: Values
    first_row_s: Values
    last_row_s: Values

    @staticmethod
    def of(run: Mapping[str, Any], place: int) -> Track:
        """Take the rescale at this place of a run, with the epochs up to the next."""
        move, following = run["moves"][place], run["moves"][place + 1 :]
        end_s = float(following[0]["call_s"]) if following else np.inf
        epochs = [epoch for epoch in run["epochs"] if epoch["end_s"] <= end_s]
        columns = ("start_s", "end_s", "rows", "first_row_s", "last_row_s")
        values = {name: np.array([float(epoch[name]) for epoch in epochs]) for name in columns}
        shifted = {name: values[name] - float(move["call_s"]) for name in columns if name != "rows"}
        return Track(run["side"], move["work"], move["done_ms"] / 1000, rows=values["rows"], **shifted)

    def latency_s(self, times_s: Values) -> Values:
        """Return how long a row took that came at each of these times; not a number where none came."""
        place = np.searchsorted(self.first_row_s, times_s, side="right") - 1
        inside = (place >= 0) & (times_s <= np.append(self.first_row_s[1:], self.last_row_s[-1])[place])
        return np.where(inside, self.end_s[np.maximum(place, 0)] - times_s, np.nan)

    def latency_max_s(self, edges_s: Values) -> Values:
        """Return the longest that a row took that came between each two of these times."""
        fine_s = np.linspace(edges_s[:-1], edges_s[1:], _SAMPLES, endpoint=False)
        # fmax passes over what is not a number, unless there is nothing else.
        return np.asarray(np.fmax.reduce(self.latency_s(fine_s)))

    def throughput(self, edges_s: Values, usual_s: float) -> Values:
        """Return rows a second between these times. An epoch's rows spread over its time, or the usual if longer."""
        spans_s = np.maximum(self.end_s - self.start_s, usual_s)
        # So that no epoch reaches into the one before, which would show rows that were not yet read.
        spans_s[1:] = np.minimum(spans_s[1:], np.diff(self.end_s))
        done = np.concatenate([[0.0], np.repeat(np.cumsum(self.rows), 2)[:-1]])
        knots_s = np.column_stack([self.end_s - spans_s, self.end_s]).ravel()
        rates = np.diff(np.interp(edges_s, knots_s, done)) / np.diff(edges_s)
        is_known = (edges_s[:-1] >= knots_s[0]) & (edges_s[1:] <= knots_s[-1])
        return np.asarray(np.where(is_known, rates, np.nan))


def draw(result: Mapping[str, Any], picture: Path, *, repetition: int = 0) -> list[Path]:
    """Draw one repetition of a result as SVG and PNG; return where the two are."""
    runs = [run for run in result["runs"] if run["repetition"] == repetition]
    tracks = [Track.of(run, place) for run in runs for place in range(len(run["moves"]))]
    if not tracks:
        raise SystemExit(f"The result has no repetition {repetition}. Give --repetition a smaller number.")
    titles = list(dict.fromkeys(track.title for track in tracks))
    figure = Figure(figsize=(12, 6.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(titles), sharex="col", sharey="row", height_ratios=(3, 2), squeeze=False)
    for place, title in enumerate(titles):
        chosen = [track for track in tracks if track.title == title]
        _draw_column(axes[0][place], axes[1][place], chosen, usual_s=float(result["options"]["interval_s"]))
        axes[0][place].set_title(f"{title} workers", loc="left", fontsize=11)
    # The panels of a row share their scale, which is known when all of them are drawn.
    axes[1][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel("greatest latency of rows (s), by arrival")
    axes[1][0].set_ylabel("rows per second in the output")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(_headline(result["options"]), x=0.01, ha="left", fontsize=13, fontweight="bold")
    paths = [picture.with_suffix(suffix) for suffix in _SUFFIXES]
    for path in paths:
        figure.savefig(path)
    return paths


def _draw_column(upper: Axes, lower: Axes, tracks: Sequence[Track], *, usual_s: float) -> None:
    end_s = max(track.done_s for track in tracks) + _AFTER_S
    latency_edges_s = np.arange(-_BEFORE_S, end_s, max(_STEP_S, usual_s))
    # Averages over two epochs: with one, every bit of delay would look like a row of peaks.
    rate_edges_s = np.arange(-_BEFORE_S, end_s, max(_STEP_S, 2 * usual_s))
    for track in tracks:
        colour, label = _COLOURS.get(track.side, _OTHER_COLOUR), _LABELS.get(track.side, track.side)
        latency_s, rates = track.latency_max_s(latency_edges_s), track.throughput(rate_edges_s, usual_s)
        upper.plot(_middles(latency_edges_s), latency_s, color=colour, linewidth=1.6, label=label)
        lower.plot(_middles(rate_edges_s), rates, color=colour, linewidth=1.6)
        place = np.searchsorted(latency_edges_s, track.done_s) - 1
        upper.plot([track.done_s], [latency_s[place]], marker="o", markersize=5, color=colour)
    upper.set_yscale("log", subs=[])
    upper.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    upper.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lower.set_xlim(-_BEFORE_S, end_s)
    lower.set_xlabel("seconds since the rescale was called (a dot: it was complete)")
    for axes in (upper, lower):
        axes.axvline(0, color="#333333", linewidth=1.0, linestyle=(0, (4, 2)))
        axes.grid(visible=True, color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def _middles(edges: Values) -> Values:
    return np.asarray((edges[1:] + edges[:-1]) / 2)


def _headline(options: Mapping[str, Any]) -> str:
    return f"Rescaling under {options['rate']:,} rows/s with {options['keys']:,} keys of state"


def main(
    result: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What the benchmark wrote.")],
    picture: Annotated[Path | None, typer.Argument(help="The picture's path, without suffix.")] = None,
    repetition: Annotated[int, typer.Option(min=0, help="Which repetition, from 0.")] = 0,
) -> None:
    """Draw latency and throughput over time, as SVG and PNG."""
    for path in draw(json.loads(result.read_text()), picture or result.with_suffix(""), repetition=repetition):
        typer.echo(f"written to {os.path.relpath(path)}")


if __name__ == "__main__":
    typer.run(main)
