"""One run of the demonstration: start the job, watch it for a bounded time, look at its state, stop it."""

from __future__ import annotations

import logging

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from anabranch.api.query import StreamQuery
from anabranch.core.errors import UnsupportedError
from anabranch.demo.job import COUNT_STAGE, LatencySink, build_job, start_job, warm_up
from anabranch.demo.meter import Meter, RunFigures
from anabranch.demo.options import DemoOptions, RecordedEvents
from anabranch.demo.outcome import Ending, Outcome, phases
from anabranch.demo.output import OutputDirectory
from anabranch.demo.session import StopRequest, children_without_interrupts
from anabranch.demo.view import View
from anabranch.workload.latency import Latencies, read_latencies, summary

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
_RESCALE_LOOK_INTERVAL_S = 0.25


def run_demo(
    spark: SparkSession,
    options: DemoOptions,
    recorded: RecordedEvents | None,
    output: OutputDirectory,
    view: View,
    stop: StopRequest,
) -> Outcome:
    """Run the job until its rows are through, its time is up, or its end is asked for."""
    sink = LatencySink(output.epochs)
    job = build_job(spark, options, recorded)
    view.say("Warming up.")
    warm_up(spark, options)
    with children_without_interrupts():
        query = start_job(job, options, sink, output.checkpoint)
    meter = Meter(query, sink)
    middle = Middle(options, None if recorded is None else recorded.files)
    try:
        ending = _watch(query, meter, options, middle, view, stop)
        last = meter.read()
        view.show(last, "stopping")
        counted = _counted(query) if ending is Ending.COMPLETE else None
    finally:
        query.stop()
    # The epoch that runs when a query is stopped may have come to the sink, but is not part of what Spark has done.
    sink.discard_after(-1 if last.last is None else last.last.epoch)
    nothing = Latencies(np.empty(0, np.int64), np.empty(0, np.int64))
    latencies = read_latencies(output.epochs) if any(output.epochs.glob("*.csv")) else nothing
    latency_ms = summary(latencies)
    return Outcome(
        ending,
        last,
        counted,
        latency_ms if latency_ms.pop("count") else {},
        phases(latencies, meter.epochs, last.rescales, end_ms=last.now_ms),
        query.exception(),
    )


class Middle:
    """Rescales the run once, in its middle or when its options say."""

    def __init__(self, options: DemoOptions, files: int | None) -> None:
        self._options = options
        self._files = files
        self._is_over = not options.workers_after

    def rescale_if_due(self, query: StreamQuery, figures: RunFigures) -> None:
        options = self._options
        if self._is_over or (figures.elapsed_s < options.rescale_at_s and not self._is_half_read(figures)):
            return
        self._is_over = True
        # The count is the only stage with state; the others have their partitions from the source. Workers are started
        # by threads that begin here.
        with children_without_interrupts():
            try:
                query.rescale(workers=options.workers_after, parallelism=options.parallelism_after, stage=COUNT_STAGE)
            except UnsupportedError as error:
                # The query has just ended; the next look finds out, and how it ended is told then.
                logger.debug("no rescale: %s", error)

    def _is_half_read(self, figures: RunFigures) -> bool:
        """Recorded events may be through long before the time is up."""
        return self._files is not None and self._options.rescale_at is None and 2 * figures.epochs >= self._files


def _watch(
    query: StreamQuery, meter: Meter, options: DemoOptions, middle: Middle, view: View, stop: StopRequest
) -> Ending:
    while True:
        figures = meter.read()
        if not query.isActive:
            return Ending.FAILED
        if figures.elapsed_s >= options.limit_s:
            return Ending.TIME
        # Without a drain, a rescale does not complete: there is nothing to wait for.
        if not (figures.is_rescaling and options.drain) and _all_through(query, figures, options):
            return Ending.COMPLETE
        waits = options.input is None and figures.elapsed_s >= options.seconds
        view.show(figures, "the last rows are on their way" if waits else "")
        middle.rescale_if_due(query, figures)
        if _pause(meter, stop):
            return Ending.INTERRUPTED


def _pause(meter: Meter, stop: StopRequest) -> bool:
    """Wait for the next look, which is sooner while a rescale is under way; return whether the end was asked for."""
    until_s = meter.elapsed_s + _LOOK_INTERVAL_S
    known = meter.read_rescales()
    while (left_s := until_s - meter.elapsed_s) > 0:
        if stop.wait(min(left_s, _RESCALE_LOOK_INTERVAL_S)):
            return True
        rescales = meter.read_rescales()
        if rescales != known or any(rescale.ended_ms is None for rescale in rescales):
            return False
    return False


def _all_through(query: StreamQuery, figures: RunFigures, options: DemoOptions) -> bool:
    if options.input is None:
        return figures.source_rows >= options.rows
    # How many rows the files have is not known, but Spark says when there is no further file; a query that was just
    # restarted has not looked for one yet.
    status = query.status
    return bool(figures.epochs) and status["message"].startswith("Waiting for") and not status["isDataAvailable"]


def _counted(query: StreamQuery) -> int:
    """Return how many rows the counts in the state stand for."""
    row = query.state("count", "count").agg(F.sum("count")).first()
    return 0 if row is None or row[0] is None else int(row[0])
