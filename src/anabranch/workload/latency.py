"""How long rows took from their arrival to the sink: lines in a file, summaries per second, and a plot.

A line is ``<ingestion ms>,<latency ms>``: when the row arrived, in milliseconds since 1970, and how long it took.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
from pyarrow.lib import ArrowInvalid

from anabranch.core.errors import AnabranchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Millis: TypeAlias = npt.NDArray[np.int64]

#: A moment to mark in a plot, in milliseconds since 1970, and what happened then.
Event: TypeAlias = tuple[int, str]

_COLUMNS = ("ingestion_time_ms", "latency_ms")
_SCHEMA = pa.schema([(name, pa.int64()) for name in _COLUMNS])
_QUANTILES = {"p50_ms": 0.50, "p95_ms": 0.95, "p99_ms": 0.99, "max_ms": 1.0}
#: A plot of more seconds than this would show nothing; times that far apart are a mistake.
_SECONDS_MAX = 10_000_000


@dataclass(frozen=True)
class Latencies:
    """The rows of a run; the two arrays belong together."""

    ingestion_ms: Millis
    latency_ms: Millis

    @property
    def processed_ms(self) -> Millis:
        return self.ingestion_ms + self.latency_ms

    @staticmethod
    def between(ingestion_time: pa.Array, processed_time: pa.Array | datetime) -> Latencies:
        """From two columns of timestamps, or from one column and the moment at which all of it was processed."""
        arrived_us = _micros(ingestion_time)
        if isinstance(processed_time, datetime):
            done_us: Millis = np.asarray(round(processed_time.timestamp() * 1e6), dtype=np.int64)
        else:
            done_us = _micros(processed_time)
        return Latencies(arrived_us // 1000, (done_us - arrived_us) // 1000)


def append_latencies(path: str | os.PathLike[str], latencies: Latencies) -> None:
    """Add lines to a file. A new file gets a header; it must have one writer at a time."""
    table = pa.table([latencies.ingestion_ms, latencies.latency_ms], schema=_SCHEMA)
    with Path(path).open("ab") as stream:
        options = pa.csv.WriteOptions(include_header=stream.tell() == 0, quoting_header="none")
        pa.csv.write_csv(table, stream, options)


def read_latencies(path: str | os.PathLike[str]) -> Latencies:
    """The lines of a file, or of all ``.csv`` files of a directory."""
    target = Path(path)
    files = sorted(target.glob("*.csv")) if target.is_dir() else [target]
    if not files or not target.exists():
        raise AnabranchError(f"There are no latency lines in {target}. Give a file or directory that has some.")
    table = pa.concat_tables([_read_file(file) for file in files])
    return Latencies(*(table.column(name).to_numpy() for name in _COLUMNS))


def summary(latencies: Latencies) -> dict[str, int]:
    """Over all rows: their count, percentiles and maximum."""
    if not len(latencies.latency_ms):
        return {"count": 0}
    ordered = np.sort(latencies.latency_ms)
    ranks = {name: _nearest_rank(np.asarray(len(ordered)), share) for name, share in _QUANTILES.items()}
    return {"count": len(ordered)} | {name: int(ordered[rank]) for name, rank in ranks.items()}


def per_second(latencies: Latencies, by: Literal["ingestion", "processed"] = "ingestion") -> pa.Table:
    """For each second that has rows: when it begins, how many rows, their percentiles and maximum.

    The second is that of the rows' arrival, or that in which they were processed.
    """
    times_ms = latencies.ingestion_ms if by == "ingestion" else latencies.processed_ms
    seconds = times_ms // 1000
    order = np.lexsort((latencies.latency_ms, seconds))
    ordered = latencies.latency_ms[order]
    which, begins, counts = np.unique(seconds[order], return_index=True, return_counts=True)
    columns = {"time_ms": which * 1000, "count": counts}
    for name, share in _QUANTILES.items():
        columns[name] = ordered[begins + _nearest_rank(counts, share)]
    return pa.table(columns)


def throughput(times_ms: Millis, *, first_s: int, last_s: int) -> Millis:
    """Rows in each second from first_s to last_s; seconds without any count as 0."""
    return np.bincount(times_ms // 1000 - first_s, minlength=last_s - first_s + 1)


def plot_latency(
    lines_path: str | os.PathLike[str],
    png_path: str | os.PathLike[str],
    events: Sequence[Event] = (),
    *,
    title: str = "",
) -> None:
    """Draw latency and throughput over time, one above the other, with a mark at each event."""
    # Matplotlib takes a second to import, and tasks that import this package never draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    latencies = read_latencies(lines_path)
    first_s, last_s = _bounds(latencies)
    figure = Figure(figsize=(11, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_latency(upper, per_second(latencies), first_s)
    _draw_throughput(lower, latencies, first_s, last_s)
    for axes in (upper, lower):
        axes.grid(visible=True, color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xlim(0, last_s - first_s + 1)
    lower.set_xlabel("time since the first row (s)")
    _mark_events(upper, lower, events, first_s)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.savefig(png_path)


def _draw_latency(axes: Axes, seconds: pa.Table, first_s: int) -> None:
    from matplotlib.ticker import LogLocator

    drawn = {name: seconds.column(name).to_numpy() for name in seconds.column_names}
    x, lows, highs = _with_gaps(drawn["time_ms"] // 1000 - first_s + 0.5, drawn["p50_ms"], drawn["p99_ms"])
    axes.fill_between(x, lows, highs, color="#2a6f97", alpha=0.12, linewidth=0)
    lines = (("max_ms", "#b9b9b9", 0.9), ("p99_ms", "#c1440e", 1.3), ("p95_ms", "#e09f3e", 1.3))
    for name, colour, width in (*lines, ("p50_ms", "#2a6f97", 1.9)):
        x, y = _with_gaps(drawn["time_ms"] // 1000 - first_s + 0.5, drawn[name])
        axes.plot(x, y, color=colour, linewidth=width, label=name.removesuffix("_ms"))
    lowest = int(drawn["p50_ms"].min())
    # A run with a standstill spans orders of magnitude, and a linear axis would flatten all the rest.
    if lowest > 0 and drawn["max_ms"].max() > 20 * float(np.median(drawn["p50_ms"])):
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.set_ylim(bottom=lowest / 2)
    else:
        axes.set_ylim(bottom=min(0, lowest))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("latency (ms), by arrival")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_throughput(axes: Axes, latencies: Latencies, first_s: int, last_s: int) -> None:
    edges = np.arange(last_s - first_s + 2)
    done = throughput(latencies.processed_ms, first_s=first_s, last_s=last_s)
    came = throughput(latencies.ingestion_ms, first_s=first_s, last_s=last_s)
    axes.stairs(done, edges, fill=True, color="#61a5c2", alpha=0.6, label="processed")
    axes.stairs(came, edges, color="#333333", linewidth=1.1, linestyle="--", label="arrived")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("rows per second")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _mark_events(upper: Axes, lower: Axes, events: Sequence[Event], first_s: int) -> None:
    """A line through both panels, and the label above, one step higher where it would hit its neighbour."""
    low, high = lower.get_xlim()
    ends = [-np.inf] * 3
    for time_ms, label in sorted(events):
        x = time_ms / 1000 - first_s
        for axes in (upper, lower):
            axes.axvline(x, color="#6a4c93", linewidth=1.1, linestyle=(0, (4, 2)))
        width = len(label) * 0.0085 * (high - low)
        level = next((step for step, end in enumerate(ends) if x > end), len(ends) - 1)
        ends[level] = x + width
        upper.annotate(
            label,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 3 + 12 * level),
            textcoords="offset points",
            color="#6a4c93",
            fontsize=9,
        )


def _with_gaps(seconds: npt.NDArray[np.float64], *values: Millis) -> list[npt.NDArray[np.float64]]:
    """The points of lines, broken where seconds without rows lie between, so that no line is drawn across."""
    breaks = np.flatnonzero(np.diff(seconds) > 1) + 1
    return [np.insert(column.astype(np.float64), breaks, np.nan) for column in (seconds, *values)]


def _bounds(latencies: Latencies) -> tuple[int, int]:
    """The first and last second of a run."""
    if not len(latencies.ingestion_ms):
        raise AnabranchError("There is a header but no latency lines. Let the query process some rows first.")
    first_s = int(min(latencies.ingestion_ms.min(), latencies.processed_ms.min())) // 1000
    last_s = int(latencies.processed_ms.max()) // 1000
    if last_s - first_s > _SECONDS_MAX:
        raise AnabranchError(f"The lines span {last_s - first_s} seconds. Plot lines of one run only.")
    return first_s, max(last_s, int(latencies.ingestion_ms.max()) // 1000)


def _read_file(path: Path) -> pa.Table:
    try:
        options = pa.csv.ConvertOptions(column_types=_SCHEMA)
        table = pa.csv.read_csv(path, convert_options=options)
        return table.select(_COLUMNS).cast(_SCHEMA)
    except (ArrowInvalid, KeyError) as error:
        raise AnabranchError(
            f"{path} does not hold latency lines ({error}). Give a file with the header {','.join(_COLUMNS)}."
        ) from error


def _nearest_rank(counts: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.int64]:
    """The position, among so many ordered values, of the smallest that at least this share does not exceed."""
    # Without the margin 0.95 * 20 is a hair above 19, and the rank one too high.
    ranks: npt.NDArray[np.int64] = np.ceil(counts * share - 1e-9).astype(np.int64) - 1
    return ranks


def _micros(column: pa.Array) -> Millis:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    micros: Millis = column.cast(pa.timestamp("us", tz=column.type.tz)).view(pa.int64()).to_numpy()
    return micros
