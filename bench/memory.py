"""Memory: what a key costs in a worker, as the system sees the process and as the worker itself reports it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch
from bench.figures import Budget, Figure
from bench.harness import BenchmarkError
from bench.machine import describe_machine
from bench.options import KeyCount, Parallelism, Repeats, Store, Workers
from bench.report import Line, Report, say
from bench.session import Lab, check_interrupted, open_lab
from bench.sides import ANABRANCH, Setup, totals

_KEYS = 1_000_000
_BUDGET = Budget(bound=300, aim=60, unit=" bytes", is_cost=True)
#: Epochs of the usual size, on the same keys, before the first look: buffers, pools and libraries are there already.
_FIRST_EPOCHS = 4
#: Epochs of a few rows push the last big epoch from its layer into the base.
_SETTLING_EPOCHS, _FEW_KEYS = 3, 10
_KNOWS_PEAKS = sys.platform == "linux"

KeysPerEpoch = Annotated[int, typer.Option(min=1, help="New keys in an epoch.")]
ValueBytes = Annotated[
    int, typer.Option(min=0, help="Bytes of the one value of a key; 0: two values of 8 bytes. Give fewer keys then.")
]


@dataclass(frozen=True)
class Look:
    """The memory of the workers at rest."""

    rss_bytes: int
    reported_bytes: int
    keys: int


def memory(
    keys: KeyCount = _KEYS,
    keys_per_epoch: KeysPerEpoch = 100_000,
    repeats: Repeats = 3,
    workers: Workers = 2,
    parallelism: Parallelism = 2,
    store: Store = "memory",
    value_bytes: ValueBytes = 0,
) -> None:
    """Bytes per key of an 8-byte key and its values: growth of the workers' memory, at rest and at its peak."""
    options = dict(locals())
    setup = Setup(workers=workers, parallelism=parallelism, store=store)
    runs: list[Mapping[str, Any]] = []
    with open_lab(parallelism=parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        for repetition in range(repeats):
            run = _run(lab, setup, keys=keys, keys_per_epoch=keys_per_epoch, value_bytes=value_bytes)
            say(f"repetition {repetition + 1} of {repeats}: {run['rss_bytes_per_key']:,.1f} bytes per key")
            runs.append(run)
    resident = Figure(tuple(run["rss_bytes_per_key"] for run in runs))
    reported = Figure(tuple(run["reported_bytes_per_key"] for run in runs))
    peak = Figure(tuple(run["peak_bytes_per_key"] for run in runs))
    budget = _BUDGET if keys == _KEYS and store == "memory" and not value_bytes else None
    lines = [
        Line("growth of the processes", ANABRANCH, {"bytes per key": resident}, None, budget, resident.median),
        Line("reported by the workers", ANABRANCH, {"bytes per key": reported}, None, budget, reported.median),
        Line("growth at its peak", ANABRANCH, {"bytes per key": peak}, None, None, peak.median),
    ]
    values = f"a value of {value_bytes:,} bytes" if value_bytes else "two values of 8 bytes"
    Report(
        name="memory",
        title=f"{keys:,} keys of 8 bytes with {values}, {workers} workers, {store} store",
        ratio_title="ratio",
        lines=lines,
        options=options,
        machine=machine,
        runs=runs,
    ).publish()


def _run(lab: Lab, setup: Setup, *, keys: int, keys_per_epoch: int, value_bytes: int) -> Mapping[str, Any]:
    feed = _Feed(lab, value_bytes)
    rows = anabranch.stream(lab.spark.readStream.schema("key LONG, amount LONG, text STRING").parquet(feed.folder))
    query = (
        (rows.groupBy("key").agg(F.max("text").alias("text")) if value_bytes else totals(rows))
        .writeStream.outputMode("update")
        .format("noop")
        .option("checkpointLocation", lab.new_folder("checkpoint"))
        .options(**setup.settings)
        .start()
    )
    try:
        for _ in range(_FIRST_EPOCHS):
            feed.put(query, 0, keys_per_epoch)
        before = _settle(query, feed, keys_per_epoch)
        _forget_peak(query)
        end = keys_per_epoch + keys
        for first in range(keys_per_epoch, end, keys_per_epoch):
            feed.put(query, first, min(first + keys_per_epoch, end))
        peak_bytes = _peak_bytes(query)
        after = _settle(query, feed, end)
    finally:
        with lab.silence():
            query.stop()
    return {
        "before": before.__dict__,
        "after": after.__dict__,
        "peak_bytes_per_key": (peak_bytes - before.rss_bytes) / keys,
        "rss_bytes_per_key": (after.rss_bytes - before.rss_bytes) / keys,
        "reported_bytes_per_key": after.reported_bytes / after.keys,
    }


def _settle(query: Any, feed: _Feed, expected_keys: int) -> Look:
    """Look at the workers once the last big epoch is part of the base."""
    for _ in range(_SETTLING_EPOCHS):
        feed.put(query, 0, _FEW_KEYS)
    workers = query.workers()
    look = Look(
        rss_bytes=sum(psutil.Process(worker["pid"]).memory_info().rss for worker in workers),
        reported_bytes=sum(worker["bytes"] for worker in workers),
        keys=sum(worker["rows"] for worker in workers),
    )
    if look.keys != expected_keys:
        raise BenchmarkError(f"The workers hold {look.keys:,} keys instead of {expected_keys:,}: the sizes are void.")
    return look


def _forget_peak(query: Any) -> None:
    """Let the system measure the workers' peaks from now on, where it does."""
    for worker in query.workers() if _KNOWS_PEAKS else ():
        Path(f"/proc/{worker['pid']}/clear_refs").write_text("5")


def _peak_bytes(query: Any) -> int:
    """Add up the most memory that each worker has had; where the system does not know it, what it has now."""
    pids = [worker["pid"] for worker in query.workers()]
    if not _KNOWS_PEAKS:
        return sum(psutil.Process(pid).memory_info().rss for pid in pids)
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class _Feed:
    """A directory of Parquet files that a query reads, one file for each epoch: between epochs the workers rest."""

    def __init__(self, lab: Lab, value_bytes: int) -> None:
        self.folder = lab.new_folder("feed")
        self._lab = lab
        self._text = f"rpad(sha2(string(id), 256), {value_bytes}, sha2(string(id), 256))" if value_bytes else "NULL"
        Path(self.folder).mkdir()

    @property
    def _spark(self) -> SparkSession:
        return self._lab.spark

    def put(self, query: Any, first: int, end: int) -> None:
        """Run an epoch with a row for each key from `first` up to `end`: the file appears when it is complete."""
        check_interrupted()
        staged = Path(self._lab.new_folder("staged"))
        rows = self._spark.range(first, end, numPartitions=1).selectExpr(
            "id AS key", "id % 1000 AS amount", f"{self._text} AS text"
        )
        rows.write.parquet(str(staged))
        for part in staged.glob("part-*.parquet"):
            part.rename(Path(self.folder) / part.name)
        shutil.rmtree(staged)
        query.processAllAvailable()
