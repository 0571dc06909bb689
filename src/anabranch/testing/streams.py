"""A whole stream under test: a real query on real workers, fed by hand."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from anabranch.api.query import StreamQuery
from anabranch.api.running import run_of
from anabranch.api.stream import Stream, stream
from anabranch.core.errors import AnabranchError, UnsupportedError
from anabranch.engine.spark.frames import plain
from anabranch.engine.spark.query import raise_watermark
from anabranch.testing.steps import Clock, KillWorker, Rescale, Restart, Rows, Step, Watermark, milliseconds

Schema = StructType | str
#: Rows as tuples or dicts; by the name of their input, if there are several.
Sent = Sequence[Any] | Mapping[str, Sequence[Any]]

_WAIT_S = 120


class StreamTest:
    """Runs a stream on rows that a test sends, and returns what comes out.

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
        #: What came out, by epoch: one that is repeated gives the same again. Epochs up to `_past` were handed out.
        self._output: dict[int, list[Row]] = {}
        self._past = -1
        try:
            folder = self._folder / "input"
            if isinstance(schema, Mapping):
                self._input: _OneInput = _NamedInputs(spark, folder, schema)
            else:
                self._input = _OneInput(spark, folder, schema)
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
        """Let things happen one after the other; return what came out after each."""
        return [self._take(step) for step in steps]

    def send(self, rows: Sent) -> list[Row]:
        """Send rows, which make one epoch; return the rows that come out of it, and of what it brings about.

        Rows are tuples or dicts; if there are several inputs, by the name of the input.
        """
        self._input.send(rows)
        return self._settle()

    def advance_clock(self, seconds: float) -> list[Row]:
        """Let processing time pass; return the rows that come out because of it. It stands still otherwise."""
        self._now_ms += round(seconds * 1000)
        self.query.wish_for_epoch()
        return self._settle()

    def advance_watermark(self, to: datetime | int) -> list[Row]:
        """Let the watermark reach a datetime, or milliseconds since 1970; return the rows that come out because of it.

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
        """Return the state of a stage as of the last epoch, in no particular order."""
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
        if self._watermark_ms is not None and (running := run_of(self.query.runId)) is not None:
            raise_watermark(running.query, self._watermark_ms)
            self._watermark_ms = None

    def _settle(self) -> list[Row]:
        """Wait until there is nothing more to do, and return what has come out."""
        self.query.processAllAvailable()
        new = sorted(epoch for epoch in self._output if epoch > self._past)
        self._past = max(new, default=self._past)
        return [row for epoch in new for row in self._output[epoch]]


class _OneInput:
    """The only input of a stream under test: files that rows are sent in, each of them one epoch."""

    def __init__(self, spark: SparkSession, folder: Path, schema: Schema) -> None:
        self._spark = spark
        self._folder = folder
        self._schema: StructType = spark.createDataFrame([], schema).schema
        self._sent = 0
        folder.mkdir()

    def send(self, rows: Sent) -> None:
        """Add a file, which Spark takes as one epoch."""
        # Written aside and renamed, so that Spark never sees half a file; names tell the order.
        new = self._folder.parent / f"{uuid.uuid4().hex}.parquet"
        pq.write_table(self._table(rows), new)
        new.rename(self._folder / f"{self._sent:08d}.parquet")
        self._sent += 1

    def passed_to(self, build: Callable[..., Stream]) -> Stream:
        """Build the stream under test on the input."""
        return build(stream(self._read()))

    def _table(self, rows: Sent) -> pa.Table:
        if isinstance(rows, Mapping):
            raise UnsupportedError("The stream under test has one input without a name. Send a list of rows.")
        return self._spark.createDataFrame(list(rows), self._schema).toArrow()

    def _read(self) -> DataFrame:
        reader = self._spark.readStream.schema(self._schema).option("maxFilesPerTrigger", 1)
        return plain(reader.parquet(str(self._folder)))


class _NamedInputs(_OneInput):
    """Several inputs. A file has the rows of all of them, one column for each, so that they come in the same epoch."""

    def __init__(self, spark: SparkSession, folder: Path, schemas: Mapping[str, Schema]) -> None:
        if not schemas:
            raise UnsupportedError("A stream under test needs an input: pass a schema, or schemas by name.")
        fields = [StructField(name, spark.createDataFrame([], schema).schema) for name, schema in schemas.items()]
        super().__init__(spark, folder, StructType(fields))

    def passed_to(self, build: Callable[..., Stream]) -> Stream:
        together = self._read()
        parts = {name: together.where(F.col(f"`{name}`").isNotNull()) for name in self._schema.names}
        return build(**{name: stream(part.select(f"`{name}`.*")) for name, part in parts.items()})

    def _table(self, rows: Sent) -> pa.Table:
        names = self._schema.names
        if not isinstance(rows, Mapping) or not set(rows) <= set(names):
            given = f"rows of {sorted(rows)}" if isinstance(rows, Mapping) else "rows of none in particular"
            raise UnsupportedError(f"The inputs are {names}, and {given} were sent. Send {{{names[0]!r}: [row, …]}}.")
        parts = []
        for field in self._schema.fields:
            kind: Any = field.dataType
            part = self._spark.createDataFrame(list(rows.get(field.name, ())), kind).toArrow().combine_chunks()
            parts.append(pa.table({field.name: part.to_struct_array()}))
        kinds = to_arrow_schema(self._schema, timezone="UTC")
        return pa.concat_tables(parts, promote_options="permissive").select(names).cast(kinds)
