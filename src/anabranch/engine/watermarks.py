"""The watermark of the running epoch. Spark tracks it, because withWatermark is part of the streaming query itself."""

from __future__ import annotations

import threading
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from anabranch.core.errors import EpochError

_ATTACH_TIMEOUT_S = 60.0


class WatermarkReader:
    """Asks Spark's query for its watermark. The first epoch may begin before the query's handle is there."""

    def __init__(self) -> None:
        self._attached = threading.Event()
        self._query: Any = None

    def attach(self, query: StreamingQuery) -> None:
        self._query = query._jsq
        self._attached.set()

    def current_ms(self) -> int | None:
        """The event time up to which input is complete, or None if there is no watermark yet."""
        if not self._attached.wait(_ATTACH_TIMEOUT_S):
            raise EpochError("Spark did not hand over the query's handle. Start the query again.")
        execution = self._query.streamingQuery().lastExecution()
        if execution is None:
            return None
        watermark_ms: int = execution.offsetSeqMetadata().batchWatermarkMs()
        return watermark_ms or None
