"""A batch in place of a stream: the same code on history, to back-fill or to test, with a DataFrame as its result.

Stages with code of the user's run as in an epoch, on all rows at once and without state before or after; for everything
else Spark's own batch operators do the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame

from anabranch.api.broadcast import BroadcastTable
from anabranch.api.grouped import GroupedStream, agg_text
from anabranch.api.stream import REFUSED_METHODS, Stream
from anabranch.core.errors import UnsupportedError
from anabranch.engine.batches import Batch
from anabranch.engine.segments import Operation
from anabranch.engine.spark.python_daemon import use_own_daemon
from anabranch.engine.stages import StatefulStage
from anabranch.operators.process.stage import ProcessStage
from anabranch.operators.vectorised import VectorisedStage
from anabranch.plan.pipeline import Pipeline

if TYPE_CHECKING:
    from anabranch.api.writer import StreamWriter


class BatchStream(Stream):
    """A batch DataFrame with the methods of a stream. ``toDF()`` is its result so far."""

    @property
    def isStreaming(self) -> bool:
        return False

    @property
    def writeStream(self) -> StreamWriter:
        raise UnsupportedError("This is a batch, and writeStream is for streams. Take its result: toDF().write.")

    def orderBy(self, *columns: Any, **keywords: Any) -> Stream:
        """Sort the result."""
        return self._apply("orderBy", columns, keywords)

    sort = orderBy

    def join(self, other: Any, on: Any = None, how: str | None = None) -> Stream:
        """Join with another batch."""
        given = {name: value for name, value in (("on", on), ("how", how)) if value is not None}
        return self._apply("join", (other,), given)

    def withBroadcast(self, **tables: BroadcastTable) -> Stream:
        """Refused: what changes while a query runs does not change while a batch does."""
        del tables
        raise UnsupportedError("withBroadcast is for streams. Join the batch with the rows of the table as they are.")

    def dropDuplicatesWithinWatermark(self, *subset: Any, **keywords: Any) -> Stream:
        """Refused, as in Spark: which of a batch's rows came within the watermark's delay is not known."""
        del subset, keywords
        raise UnsupportedError(
            "dropDuplicatesWithinWatermark is not supported on a batch, as in Spark: which rows came how much later "
            "than others is not known. Use dropDuplicates."
        )

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED_METHODS:
            raise UnsupportedError(f"{name} is not available here. Take the batch's result: toDF().{name}.")
        return super().__getattr__(name)

    def _grouped(self, keys: tuple[Column, ...]) -> GroupedStream:
        return _GroupedBatch(self._pipeline, self._sample, keys)

    def _result(self) -> DataFrame:
        return self._sample

    def _apply(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Stream:
        for value in (*arguments, *keywords.values()):
            if isinstance(value, Stream | DataFrame) and value.isStreaming:
                raise UnsupportedError(
                    f"{method} of a batch with a stream: begin with the stream, and give it the batch."
                )
        return super()._apply(method, arguments, keywords)

    def _deduplicated(self, method: str, subset: tuple[Any, ...], keywords: dict[str, Any]) -> Stream:
        applied = self._pipeline.with_stage(str(Operation(method, subset, keywords)))
        applied = applied.with_operation(Operation(method, subset, keywords))
        return BatchStream(applied, applied.source)


class _GroupedBatch(GroupedStream):
    """A batch grouped by key columns."""

    _unbounded = False

    def _aggregated(self, columns: list[Column]) -> Stream:
        pipeline, keys = self._named(agg_text(columns))
        rows = self._sample.groupBy(*keys).agg(*columns)
        return BatchStream(pipeline.with_batch(rows, stateful=False), rows)

    def _stateful(self, pipeline: Pipeline, stage: StatefulStage, sample: DataFrame) -> Stream:
        del sample
        assert isinstance(stage, ProcessStage | VectorisedStage)
        use_own_daemon(self._sample.sparkSession)
        batch = Batch(stage.spec, stage.parallelism, time.time_ns() // 1_000_000)
        rows = stage.apply_to_batch(stage.project(self._sample), batch)
        return BatchStream(pipeline.with_batch(rows, stateful=True), rows)
