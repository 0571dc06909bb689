"""A whole stream under test: a real query on real workers, fed by hand."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

from anabranch.api.query import StreamQuery
from anabranch.api.running import run_of
from anabranch.api.stream import Stream
from anabranch.core.errors import AnabranchError, UnsupportedError
from anabranch.testing.inputs import NamedInputs, OneInput, Schema, Sent
from anabranch.testing.moments import milliseconds
from anabranch.testing.steps import Clock, KillWorker, Rescale, Restart, Rows, Step, Watermark

_WAIT_S = 120


class StreamTest:
    """Runs a stream on rows that a test sends, and says what comes out.

    >>> with StreamTest(spark, "user string, amount bigint", lambda s: s.groupBy("user").count()) as test:
    ...     test.send([("ann", 3), ("bob", 4)])
    ...     test.kill_worker()
    ...     test.send([("ann", 5)])  # doctest: +SKIP
    [Row(user='ann', count=2)]

    Several inputs have names, each with its schema, and the function takes them under these names:

    >>> both = lambda views, clicks: views.join(clicks, "user")
    >>> with StreamTest(spark, {"views": "user string", "clicks": "user string"}, both, outputMode="append") as test:
    ...     test.send({"views": [("ann",)], "clicks": [("ann",)]})  # doctest: +SKIP
    [Row(user='ann')]
    """

    def __init__(
        self,
        spark: SparkSession,
        schema: Schema | Mapping[str, Schema],
        build: Callable[..., Stream],
        *,
        outputMode: str = "update",
        **settings: Any,
    ) -> None:
        """`settings` are Anabranch's, without their prefix: ``workers=1, store="rocksdb"``."""
        self._build = build
        self._mode = outputMode
        self._settings = {"workers": 2, "controlPort": -1, **settings}
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-test-"))
        self._now_ms = time.time_ns() // 1_000_000
        #: Where the watermark is to be after the next epoch, at least.
        self._watermark_ms: int | None = None
        #: By epoch: one that is repeated gives the same again. Those up to the last that was handed out are past.
        self._output: dict[int, list[Row]] = {}
        self._past = -1
        try:
            make: Callable[..., OneInput] = NamedInputs if isinstance(schema, Mapping) else OneInput
            self._input = make(spark, self._folder / "input", schema)
            self.query: StreamQuery = self._start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def __enter__(self) -> StreamTest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the query and remove all that it left."""
        self.query.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def play(self, steps: Sequence[Step]) -> list[list[Row]]:
        """Let things happen one after the other; what came out after each."""
        return [self._take(step) for step in steps]

    def send(self, rows: Sent) -> list[Row]:
        """Send rows, which make one epoch; the rows that come out of it, and of what it brings about.

        Rows are tuples or dicts; if there are several inputs, by the name of the input.
        """
        self._input.send(rows)
        return self._settle()

    def advance_clock(self, seconds: float) -> list[Row]:
        """Let processing time pass; the rows that come out because of it. It stands still otherwise."""
        self._now_ms += round(seconds * 1000)
        self.query.wish_for_epoch()
        return self._settle()

    def advance_watermark(self, to: datetime | int) -> list[Row]:
        """Let the watermark reach a datetime, or milliseconds since 1970; the rows that come out because of it.

        Rows move it as well, as always. It never goes back.
        """
        if not self.query.pipeline.has_watermark:
            raise UnsupportedError("The stream has no watermark to advance. Set one: withWatermark(column, delay).")
        self._watermark_ms = milliseconds(to)
        # Spark keeps to the watermark that it has computed for the next epoch: the one after that has the new one.
        self.query.wish_for_epoch()
        before = self._settle()
        self.query.wish_for_epoch()
        return before + self._settle()

    def rescale(self, workers: int | None = None, parallelism: int | None = None) -> None:
        """Change the number of workers or the parallelism of all stages, and wait until all state has moved."""
        rescale = self.query.rescale(workers=workers, parallelism=parallelism)
        if not rescale.wait(_WAIT_S):
            raise AnabranchError(f"The rescale is not complete after {_WAIT_S} s: {rescale.progress()}.")

    def kill_worker(self, number: int = 0) -> None:
        """Kill a state worker, as ``kill -9`` does."""
        pids = self._worker_pids()
        os.kill(pids[number % len(pids)], signal.SIGKILL)

    def restart(self, *, crash: bool = False, **settings: Any) -> None:
        """Stop the query, and start it again from its checkpoint."""
        if crash:
            for pid in self._worker_pids():
                os.kill(pid, signal.SIGKILL)
        self.query.stop()
        self._settings.update(settings)
        self.query = self._start()

    def state(self, stage: str | int, variable: str | None = None) -> list[Row]:
        """The state of a stage as of the last epoch, in no particular order."""
        rows: list[Row] = self.query.state(stage, variable).collect()
        return rows

    def _worker_pids(self) -> list[int]:
        return [worker["pid"] for worker in sorted(self.query.workers(), key=lambda worker: str(worker["id"]))]

    def _take(self, step: Step) -> list[Row]:
        match step:
            case Rows():
                return self.send(step.rows)
            case Clock():
                return self.advance_clock(step.seconds)
            case Watermark():
                return self.advance_watermark(step.to)
            case Rescale():
                self.rescale(step.workers, step.parallelism)
            case KillWorker():
                self.kill_worker(step.number)
            case Restart():
                self.restart(crash=step.crash, **step.settings)
        return []

    def _start(self) -> StreamQuery:
        result = self._input.passed_to(self._build)
        writer = result.writeStream.outputMode(self._mode).foreachBatch(self._collect).clock(lambda: self._now_ms)
        for name, value in self._settings.items():
            writer = writer.option(f"anabranch.{name}", value)
        return writer.option("checkpointLocation", str(self._folder / "checkpoint")).start()

    def _collect(self, rows: DataFrame, epoch: int) -> None:
        self._output[epoch] = rows.collect()
        running = run_of(self.query.runId) if self._watermark_ms is not None else None
        if running is not None and self._watermark_ms is not None:
            spark_query: Any = running.query
            tracker = spark_query._jsq.streamingQuery().watermarkTracker()
            tracker.setWatermark(max(self._watermark_ms, tracker.currentWatermark()))
            self._watermark_ms = None

    def _settle(self) -> list[Row]:
        """What has come out when there is nothing more to do."""
        self.query.processAllAvailable()
        new = sorted(epoch for epoch in self._output if epoch > self._past)
        self._past = max(new, default=self._past)
        return [row for epoch in new for row in self._output[epoch]]
