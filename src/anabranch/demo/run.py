"""One run of the demonstration: start the job, watch it for a bounded time, look at its state, stop it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from anabranch.api.query import StreamQuery
from anabranch.demo.interrupts import StopRequest, children_without_interrupts
from anabranch.demo.job import build_job, start_job, warm_up
from anabranch.demo.meter import Meter, Snapshot
from anabranch.demo.options import DemoOptions
from anabranch.demo.output import OutputDirectory
from anabranch.demo.recorded import RecordedEvents
from anabranch.demo.sink import LatencySink
from anabranch.demo.view import View
from anabranch.workload.latency import read_latencies, summary

_LOOK_INTERVAL_S = 1.0


class Ending(StrEnum):
    """Why a run ended."""

    COMPLETE = "complete"  #: every row has come through
    TIME = "time"  #: the time was up, and rows were still waiting
    INTERRUPTED = "interrupted"  #: somebody asked for it
    FAILED = "failed"  #: the query failed


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and with what."""

    ending: Ending
    last: Snapshot
    #: The sum of all counts in the state, when every row had come through; None if some had not.
    counted: int | None
    latency_ms: dict[str, int]
    error: Exception | None

    def to_json(self, options: DemoOptions) -> dict[str, Any]:
        workers = [dataclasses.asdict(worker) for worker in self.last.workers]
        given = dataclasses.asdict(options) | {"input": None if options.input is None else str(options.input)}
        return {
            "options": given,
            "ending": str(self.ending),
            "error": None if self.error is None else str(self.error),
            "elapsed_s": round(self.last.elapsed_s, 3),
            "epochs": self.last.epochs,
            "rows": {"source": self.last.source_rows, "sink": self.last.sink_rows},
            "latency_ms": self.latency_ms,
            "state": {
                "keys": sum(worker.keys for worker in self.last.workers),
                "bytes": sum(worker.bytes for worker in self.last.workers),
                "counted": self.counted,
            },
            "workers": workers,
        }


def run_demo(
    spark: SparkSession,
    options: DemoOptions,
    recorded: RecordedEvents | None,
    output: OutputDirectory,
    view: View,
    stop: StopRequest,
) -> Outcome:
    """Run the job until its rows are through, its time is up, or somebody asks for the end."""
    sink = LatencySink(output.epochs)
    job = build_job(spark, options, recorded)
    view.say("Warming up.")
    warm_up(spark, options)
    with children_without_interrupts():
        query = start_job(job, options, sink, output.checkpoint)
    meter = Meter(query, sink)
    try:
        ending = _watch(query, meter, options, view, stop)
        last = meter.read()
        view.show(last, "stopping")
        counted = _counted(query) if ending is Ending.COMPLETE else None
    finally:
        query.stop()
    # The epoch that runs when a query is stopped may have come to the sink, but is not part of what Spark has done.
    sink.discard_after(-1 if last.last is None else last.last.epoch)
    return Outcome(ending, last, counted, _latency_of(output), query.exception())


def _watch(query: StreamQuery, meter: Meter, options: DemoOptions, view: View, stop: StopRequest) -> Ending:
    while True:
        snapshot = meter.read()
        if not query.isActive:
            return Ending.FAILED
        if _all_through(query, snapshot, options):
            return Ending.COMPLETE
        if snapshot.elapsed_s >= options.limit_s:
            return Ending.TIME
        waits = options.input is None and snapshot.elapsed_s >= options.seconds
        view.show(snapshot, "the last rows are on their way" if waits else "")
        if stop.wait(_LOOK_INTERVAL_S):
            return Ending.INTERRUPTED


def _all_through(query: StreamQuery, snapshot: Snapshot, options: DemoOptions) -> bool:
    if options.input is None:
        return snapshot.source_rows >= options.rows
    # How many rows the files have is not known, but Spark says when there is no further file.
    return bool(snapshot.epochs) and not query.status["isDataAvailable"]


def _counted(query: StreamQuery) -> int:
    """How many rows the counts in the state stand for."""
    row = query.state("count", "count").agg(F.sum("count")).first()
    return 0 if row is None or row[0] is None else int(row[0])


def _latency_of(output: OutputDirectory) -> dict[str, int]:
    if not any(output.epochs.glob("*.csv")):
        return {}
    figures = summary(read_latencies(output.epochs))
    return figures if figures.pop("count") else {}
