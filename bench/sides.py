"""The sides: the same query on Spark's own state, on Anabranch, and with no state at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import anabranch
from anabranch.worker.stores import STORES
from bench.harness import BenchmarkError, Query, Side, data_epochs

SPARK = "spark"
ANABRANCH = "anabranch"
NO_STATE = "no state"
#: The next epoch starts when one ends.
BACK_TO_BACK = "0 seconds"


@dataclass(frozen=True)
class Setup:
    """How Anabranch runs, as far as benchmarks vary it."""

    workers: int
    parallelism: int
    store: str

    def __post_init__(self) -> None:
        if self.store not in STORES:
            raise BenchmarkError(f"There is no store {self.store!r}; give --store {' or '.join(STORES)}.")

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "anabranch.workers": self.workers,
            "anabranch.parallelism": self.parallelism,
            "anabranch.store": self.store,
        }


#: Both a DataFrame and an anabranch Stream, which have the methods that the benchmarks need.
Rows = Any
Build = Callable[[Rows], Rows]


def totals(rows: Rows) -> Rows:
    """Return the number of rows and the sum of the amounts of each key."""
    return rows.groupBy("key").agg(F.count(F.lit(1)).alias("rows"), F.sum("amount").alias("total"))


def counts(rows: Rows) -> Rows:
    """Return the number of rows of each key."""
    return rows.groupBy("key").count()


def spark_side(
    rows: DataFrame,
    build: Build,
    *,
    warmup: int,
    measured: int,
    name: str = SPARK,
    trigger: str = BACK_TO_BACK,
    keys: int | None = None,
    mode: str = "update",
) -> Side:
    """Make the side of Spark's own operators; `keys`: how many keys its state must hold in the end."""

    def start(checkpoint: str) -> Query:
        query: Query = _writer(build(rows), checkpoint, trigger, mode).start()
        return query

    def inspect(query: Query) -> Mapping[str, Any]:
        operators = data_epochs(query)[-1]["stateOperators"]
        facts = {"state_rows": operators[0]["numRowsTotal"], "state_bytes": operators[0]["memoryUsedBytes"]}
        check_keys(name, facts["state_rows"], keys)
        return facts

    return Side(name, start, warmup, measured, inspect)


def anabranch_side(
    rows: DataFrame,
    build: Build,
    setup: Setup,
    *,
    warmup: int,
    measured: int,
    name: str = ANABRANCH,
    trigger: str = BACK_TO_BACK,
    keys: int | None = None,
    mode: str = "update",
) -> Side:
    """Make the side with state in state workers; `keys`: how many keys they must hold in the end."""

    def start(checkpoint: str) -> Query:
        writer = _writer(build(anabranch.stream(rows)), checkpoint, trigger, mode)
        query: Query = writer.options(**setup.settings).start()
        return query

    def inspect(query: Any) -> Mapping[str, Any]:
        workers = query.workers()
        facts = {
            "state_rows": sum(worker["rows"] for worker in workers),
            "state_bytes": sum(worker["bytes"] for worker in workers),
        }
        check_keys(name, facts["state_rows"], keys)
        return facts

    return Side(name, start, warmup, measured, inspect)


def stateless_side(rows: DataFrame, build: Build, *, warmup: int, measured: int, name: str = NO_STATE) -> Side:
    """Make the ceiling: the same aggregation of each epoch by itself, as a batch, to the same sink."""

    def start(checkpoint: str) -> Query:
        return _BatchQuery(rows, build, checkpoint)

    return Side(name, start, warmup, measured)


class _BatchQuery:
    """A query that runs each epoch as a batch, and stops between two epochs only."""

    def __init__(self, rows: DataFrame, build: Build, checkpoint: str) -> None:
        self._build = build
        self._running = threading.Lock()
        writer = rows.writeStream.foreachBatch(self._run).option("checkpointLocation", checkpoint)
        self._query = writer.trigger(processingTime=BACK_TO_BACK).start()

    @property
    def lastProgress(self) -> Any:
        return self._query.lastProgress

    @property
    def recentProgress(self) -> Any:
        return self._query.recentProgress

    def awaitTermination(self, timeout: Any = None) -> bool | None:
        return self._query.awaitTermination(timeout)

    def stop(self) -> None:
        # Interrupting an epoch that Python runs makes Spark print pages of stack traces.
        with self._running:
            self._query.stop()

    def _run(self, rows: DataFrame, _epoch: int) -> None:
        # Only a stop holds it at this point, and that waits for us in turn.
        if not self._running.acquire(blocking=False):
            return
        try:
            # As in Spark's stateful queries and in Anabranch's epochs, the number of partitions is given.
            rows.sparkSession.conf.set("spark.sql.adaptive.enabled", "false")
            self._build(rows).write.format("noop").mode("append").save()
        finally:
            self._running.release()


def _writer(result: Rows, checkpoint: str, trigger: str, mode: str) -> Any:
    return (
        result.writeStream.outputMode(mode)
        .format("noop")
        .trigger(processingTime=trigger)
        .option("checkpointLocation", checkpoint)
    )


def check_keys(side: str, found: int, expected: int | None) -> None:
    """Raise BenchmarkError unless the state holds what it must hold, as far as that is known."""
    if expected is not None and found != expected:
        raise BenchmarkError(f"The state of {side!r} holds {found:,} keys instead of {expected:,}: its times are void.")
