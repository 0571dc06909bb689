"""What Spark knows about the streaming query: its watermark, which it tracks itself, and how much it has read."""

from __future__ import annotations

import threading
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from anabranch.core.errors import EpochError
from anabranch.engine.runner import LOST_WORKER
from anabranch.engine.spark.ticks import TICK
from anabranch.engine.tasks import FIRST_WATERMARK_MS

_ATTACH_TIMEOUT_S = 60.0
#: In the offsets of the ticks, and of no other source.
_TICK = f'{{"{TICK}":'
#: Why jobs are cancelled. The epoch that fails with it runs again, also if the loss has been made good meanwhile.
_WORKER_IS_LOST = f"because a state worker is lost ({LOST_WORKER})"


def checkpoint_of(query: StreamingQuery) -> str:
    """Returns the folder of a running query's checkpoint, with its scheme."""
    jvm_query: Any = query._jsq
    return str(jvm_query.streamingQuery().resolvedCheckpointRoot())


class SparkStream:
    """Asks Spark's query for what it knows. The first epoch may begin before the query's handle is there."""

    def __init__(self, *, has_watermark: bool) -> None:
        self._has_watermark = has_watermark
        self._attached = threading.Event()
        self._query: Any = None
        self._rows = 0

    def attach(self, query: StreamingQuery) -> None:
        self._query = query._jsq
        self._attached.set()

    def detach(self) -> None:
        """Forgets the query before the next one starts, which answers from then on."""
        self._attached.clear()
        self._query = None
        self._rows = 0

    def batch_time_ms(self) -> int:
        """Returns when Spark planned the epoch that runs, as it has logged it; a restart does not change it."""
        return int(self._handle().streamingQuery().lastExecution().offsetSeqMetadata().batchTimestampMs())

    def watermark_ms(self) -> int | None:
        """Returns the event time up to which input is complete; None without a watermark.

        From the first epoch on: Spark begins with 1970, so that rows before that are late, and never goes back.
        """
        execution = self._execution()
        return None if execution is None else int(execution.offsetSeqMetadata().batchWatermarkMs())

    def late_watermark_ms(self) -> int | None:
        """Returns the watermark of the epoch before, as Spark has logged it; a restart does not change it."""
        execution = self._execution()
        if execution is None:
            return None
        before = execution.prevOffsetSeqMetadata()
        return int(before.get().batchWatermarkMs()) if before.isDefined() else FIRST_WATERMARK_MS

    def _execution(self) -> Any:
        """Returns Spark's plan of the epoch that runs; None without a watermark."""
        return self._handle().streamingQuery().lastExecution() if self._has_watermark else None

    def previous_rows(self, epoch: int) -> int | None:
        """Returns how many rows the last epoch with any read; None if Spark has not reported on the epoch before."""
        progress = self._handle().lastProgress()
        if progress is None or progress.batchId() != epoch - 1:
            return None
        self._rows = progress.numInputRows() or self._rows
        return self._rows

    def is_stopped(self) -> bool:
        return self._query is not None and not self._query.isActive()

    def has_new_rows(self) -> bool:
        """Tells whether the epoch that runs has input: the offset of a source other than the ticks has moved."""
        execution = self._handle().streamingQuery()
        context = execution.getLatestExecutionContext()
        before, after = context.startOffsets(), context.endOffsets()
        sources = execution.sources()
        for position in range(sources.size()):
            source = sources.apply(position)
            offset = after.get(source)
            if offset.isDefined() and not offset.equals(before.get(source)) and _TICK not in offset.get().json():
                return True
        return False

    def has_rows_of(self, first: int, count: int) -> bool:
        """Tells whether any of these sources, in the order of the plan, has input in the epoch; True if unknown."""
        execution = self._handle().streamingQuery()
        context = execution.getLatestExecutionContext()
        before, after = context.startOffsets(), context.endOffsets()
        sources = execution.sources()
        # Beyond them there may be the ticks. Any other number means that Spark has taken two sources for one.
        if sources.size() not in (first + count, first + count + 1):
            return True
        for position in range(first, first + count):
            source = sources.apply(position)
            if not after.get(source).equals(before.get(source)):
                return True
        return False

    def cancel_jobs(self) -> None:
        """Lets the tasks that run for the query fail at once, instead of when their requests time out."""
        if self._query is None:
            return
        context = self._query.sparkSession().sparkContext()
        context.cancelJobGroup(self._query.runId().toString(), _WORKER_IS_LOST)

    def _handle(self) -> Any:
        if not self._attached.wait(_ATTACH_TIMEOUT_S):
            raise EpochError("Spark did not hand over the query's handle. Start the query again.")
        return self._query


def raise_watermark(query: StreamingQuery, to_ms: int) -> None:
    """Let Spark's watermark be at least here from the next epoch that Spark plans."""
    spark_query: Any = query
    tracker = spark_query._jsq.streamingQuery().watermarkTracker()
    tracker.setWatermark(max(to_ms, tracker.currentWatermark()))
