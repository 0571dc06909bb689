"""Watching the epochs of a query from outside, through stops and starts: Spark reports each of them to a listener."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from bench.harness import BenchmarkError
from bench.rescale_epochs import Epoch
from bench.rescale_load import Feed, Load
from bench.session import check_interrupted

_POLL_INTERVAL_S = 0.2


class Watch(StreamingQueryListener):
    """The epochs that took rows, in order, as Spark reports them."""

    def __init__(self, load: Load, feed: Feed) -> None:
        self._load = load
        self._feed = feed
        self._reports: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()

    def onQueryStarted(self, event: Any) -> None:
        """Do nothing."""

    def onQueryProgress(self, event: Any) -> None:
        report = json.loads(event.progress.json)
        if report["numInputRows"] > 0:
            with self._changed:
                self._reports[report["batchId"]] = report
                self._changed.notify_all()

    def onQueryIdle(self, event: Any) -> None:
        """Do nothing."""

    def onQueryTerminated(self, event: Any) -> None:
        """Do nothing."""

    @property
    def newest(self) -> dict[str, Any]:
        """Spark's report of the newest epoch."""
        with self._changed:
            return self._reports[max(self._reports)]

    @property
    def epoch_count(self) -> int:
        with self._changed:
            return len(self._reports)

    @property
    def start_count(self) -> int:
        """How often the query was started."""
        with self._changed:
            return len({report["runId"] for report in self._reports.values()})

    def epochs(self) -> list[Epoch]:
        """Return the epochs whose rows came at the rate, without those that filled the state."""
        with self._changed:
            reports = [self._reports[number] for number in sorted(self._reports)]
        return [self._epoch(report) for report in reports if self._bundles(report).start >= self._load.fill_bundles]

    def wait(self, is_met: Callable[[], bool], what: str, *, limit_s: float, check: Callable[[], None]) -> None:
        """Wait until an epoch makes it true; `check` raises when waiting any longer makes no sense."""
        deadline_s = time.monotonic() + limit_s
        while not is_met():
            check_interrupted()
            check()
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"{what} took more than {limit_s:.0f} s. Try fewer --keys or a lower --rate.")
            with self._changed:
                self._changed.wait(_POLL_INTERVAL_S)

    def has_processed_all(self) -> bool:
        """Return whether every row that was fed is in the output."""
        with self._changed:
            done = [self._bundles(report).stop for report in self._reports.values()]
        return max(done, default=0) == self._feed.bundles

    def _bundles(self, report: dict[str, Any]) -> range:
        start, end = report["sources"][0]["startOffset"], report["sources"][0]["endOffset"]
        return range(self._feed.end_of(-1 if start is None else int(start)), self._feed.end_of(int(end)))

    def _epoch(self, report: dict[str, Any]) -> Epoch:
        start_s = datetime.fromisoformat(report["timestamp"]).timestamp()
        bundles = self._bundles(report)
        return Epoch(
            number=report["batchId"],
            start_s=start_s,
            end_s=start_s + report["durationMs"]["triggerExecution"] / 1000,
            rows=len(bundles) * self._load.bundle_rows,
            came_s=tuple(self._feed.came_s(bundle) for bundle in bundles),
        )


@contextmanager
def watching(spark: SparkSession, load: Load, feed: Feed) -> Iterator[Watch]:
    watch = Watch(load, feed)
    spark.streams.addListener(watch)
    try:
        yield watch
    finally:
        spark.streams.removeListener(watch)
