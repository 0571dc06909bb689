"""A whole stream under test: a real query on real workers, fed by hand."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import StructType

from anabranch.api.query import StreamQuery
from anabranch.api.stream import Stream, stream
from anabranch.core.errors import AnabranchError
from anabranch.testing.steps import Clock, KillWorker, Rescale, Restart, Rows, Step

_WAIT_S = 120


class StreamTest:
    """Runs a stream on rows that a test sends, and says what comes out.

    >>> with StreamTest(spark, "user string, amount bigint", lambda s: s.groupBy("user").count()) as test:
    ...     test.send([("ann", 3), ("bob", 4)])
    ...     test.kill_worker()
    ...     test.send([("ann", 5)])  # doctest: +SKIP
    [Row(user='ann', count=2)]
    """

    def __init__(
        self,
        spark: SparkSession,
        schema: StructType | str,
        build: Callable[[Stream], Stream],
        *,
        outputMode: str = "update",
        **settings: Any,
    ) -> None:
        """`settings` are Anabranch's, without their prefix: ``workers=1, store="rocksdb"``."""
        self._spark = spark
        self._schema = spark.createDataFrame([], schema).schema
        self._build = build
        self._mode = outputMode
        self._settings = {"workers": 2, "controlPort": -1, **settings}
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-test-"))
        self._sent = 0
        self._later_ms = 0
        self._output: list[Row] = []
        (self._folder / "input").mkdir()
        try:
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

    def send(self, rows: Sequence[Any]) -> list[Row]:
        """Send rows, which make one epoch; the rows that come out of it, and of what it brings about."""
        table = self._spark.createDataFrame(list(rows), self._schema).toArrow()
        # Written aside and renamed, so that Spark never sees half a file; names tell the order.
        new = self._folder / f"{uuid.uuid4().hex}.parquet"
        pq.write_table(table, new)
        new.rename(self._folder / "input" / f"{self._sent:08d}.parquet")
        self._sent += 1
        return self._settle()

    def advance_clock(self, seconds: float) -> list[Row]:
        """Let processing time pass; the rows that come out because of it. Event time passes with rows only."""
        self._later_ms += round(seconds * 1000)
        self.query.wish_for_epoch()
        return self._settle()

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
            case Rescale():
                self.rescale(step.workers, step.parallelism)
            case KillWorker():
                self.kill_worker(step.number)
            case Restart():
                self.restart(crash=step.crash, **step.settings)
        return []

    def _start(self) -> StreamQuery:
        reader = self._spark.readStream.schema(self._schema).option("maxFilesPerTrigger", 1)
        rows = stream(_plain(reader.parquet(str(self._folder / "input"))))
        writer = self._build(rows).writeStream.outputMode(self._mode).foreachBatch(self._collect)
        for name, value in self._settings.items():
            writer = writer.option(f"anabranch.{name}", value)
        query = writer.option("checkpointLocation", str(self._folder / "checkpoint")).start()
        query.use_clock(self._now_ms)
        return query

    def _collect(self, rows: DataFrame, epoch: int) -> None:
        del epoch
        self._output += rows.collect()

    def _settle(self) -> list[Row]:
        """What has come out when there is nothing more to do."""
        self.query.processAllAvailable()
        output, self._output = self._output, []
        return output

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._later_ms


def _plain(rows: DataFrame) -> DataFrame:
    """Also if the session has been enabled."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    classic: Any = rows
    return ClassicDataFrame(classic._jdf, rows.sparkSession)
