"""Rescaling Spark's own state: stop the query, rewrite all of its state offline, start the query again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from bench.harness import BenchmarkError
from bench.rescale_load import Feed
from bench.rescale_run import LIMIT_S
from bench.rescale_watch import Watch
from bench.session import Lab
from bench.sides import totals


class SparkJob:
    """A count and a sum of each key on Spark's RocksDB store, of which only changes are uploaded."""

    def __init__(self, lab: Lab, feed: Feed, watch: Watch, *, trigger: str) -> None:
        self._lab = lab
        self._feed = feed
        self._watch = watch
        self._trigger = trigger
        self._checkpoint = lab.new_folder("spark")
        self._query: StreamingQuery | None = None

    def start(self) -> None:
        writer = totals(self._feed.rows).writeStream.outputMode("update").format("noop")
        writer = writer.trigger(processingTime=self._trigger).option("checkpointLocation", self._checkpoint)
        self._query = writer.start()

    def check(self) -> None:
        query = self._running
        if not query.isActive:
            raise query.exception() or BenchmarkError("Spark's query ended by itself.")

    def rescale(self, size: int) -> Mapping[str, Any]:
        """Rescale between two epochs, if there is time between them: else Spark would run one of them twice."""
        context, began_s = self._lab.spark.sparkContext, time.time()
        self._wait_for_epoch()
        ended_s = time.time()
        # Should it be in the middle of an epoch after all, the end of its tasks would fill pages.
        context.setLogLevel("OFF")
        self._running.stop()
        stopped_s = time.time()
        # Spark repartitions after an epoch that was interrupted only if told that the sink bears with a repetition.
        manager = self._lab.spark._streamingCheckpointManager
        manager.repartition(self._checkpoint, size, enforce_exactly_once_sink=False)
        context.setLogLevel("ERROR")
        rewritten_s = time.time()
        self.start()
        self._wait_for_epoch()
        done_s = time.time()
        report = self._watch.newest
        if report["stateOperators"][0]["numShufflePartitions"] != size:
            raise BenchmarkError(f"Spark's query does not have {size} partitions after it was repartitioned.")
        return {
            "epoch ended after, ms": (ended_s - began_s) * 1000,
            "stop, ms": (stopped_s - ended_s) * 1000,
            "offline repartition, ms": (rewritten_s - stopped_s) * 1000,
            "start and first epoch, ms": (done_s - rewritten_s) * 1000,
            "first epoch, ms": report["durationMs"]["triggerExecution"],
        }

    def finish(self) -> tuple[int, int]:
        self.stop()
        state = self._lab.spark.read.format("statestore").load(self._checkpoint)
        found = state.agg(F.count(F.lit(1)), F.sum("value.count")).first()
        assert found is not None
        return int(found[0]), int(found[1])

    def stop(self) -> None:
        # One that has failed has said so before.
        with suppress(StreamingQueryException):
            if self._query is not None:
                self._query.stop()

    @property
    def _running(self) -> StreamingQuery:
        assert self._query is not None, "the query has not been started"
        return self._query

    def _wait_for_epoch(self) -> None:
        """Wait until an epoch ends."""
        count = self._watch.epoch_count
        self._watch.wait(
            lambda: self._watch.epoch_count > count, "An epoch of Spark", limit_s=LIMIT_S, check=self.check
        )
