"""How long rows took from their arrival to the sink: lines in a file, and summaries per second.

A line is ``<ingestion ms>,<latency ms>``: when the row arrived, in milliseconds since 1970, and how long it took.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
from pyarrow.lib import ArrowInvalid

from anabranch.core.errors import AnabranchError

Millis: TypeAlias = npt.NDArray[np.int64]

_COLUMNS = ("ingestion_time_ms", "latency_ms")
_SCHEMA = pa.schema([(name, pa.int64()) for name in _COLUMNS])
_QUANTILES = {"p50_ms": 0.50, "p95_ms": 0.95, "p99_ms": 0.99, "max_ms": 1.0}


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
        """Take two columns of timestamps, or one column and the moment at which all of it was processed."""
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
    """Read the lines of a file, or of all ``.csv`` files of a directory."""
    target = Path(path)
    files = sorted(target.glob("*.csv")) if target.is_dir() else [target]
    if not files or not target.exists():
        raise AnabranchError(f"There are no latency lines in {target}. Give a file or directory that has some.")
    table = pa.concat_tables([_read_file(file) for file in files])
    return Latencies(*(table.column(name).to_numpy() for name in _COLUMNS))


def summary(latencies: Latencies) -> dict[str, int]:
    """Return the count of all rows, their percentiles and maximum."""
    if not len(latencies.latency_ms):
        return {"count": 0}
    ordered = np.sort(latencies.latency_ms)
    ranks = {name: _nearest_rank(np.asarray(len(ordered)), share) for name, share in _QUANTILES.items()}
    return {"count": len(ordered)} | {name: int(ordered[rank]) for name, rank in ranks.items()}


def per_second(latencies: Latencies, by: Literal["ingestion", "processed"] = "ingestion") -> pa.Table:
    """Return for each second that has rows: when it begins, how many rows, their percentiles and maximum.

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
    """Count the rows in each second from first_s to last_s."""
    return np.bincount(times_ms // 1000 - first_s, minlength=last_s - first_s + 1)


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
    """Return the position, among ordered values, of the smallest that at least this share does not exceed."""
    # Without the margin 0.95 * 20 is a hair above 19, and the rank one too high.
    ranks: npt.NDArray[np.int64] = np.ceil(counts * share - 1e-9).astype(np.int64) - 1
    return ranks


def _micros(column: pa.Array) -> Millis:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    micros: Millis = column.cast(pa.timestamp("us", tz=column.type.tz)).view(pa.int64()).to_numpy()
    return micros
