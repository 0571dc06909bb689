"""What is known about Spark's query: each answer is that of the query that runs, and of no earlier one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from anabranch.engine.spark.query import SparkStream


def query(watermark_ms: int, rows: int = 0) -> Any:
    """Stands for a query of Spark's, as far as it is asked."""
    metadata = SimpleNamespace(batchWatermarkMs=lambda: watermark_ms)
    execution = SimpleNamespace(offsetSeqMetadata=lambda: metadata)
    progress = SimpleNamespace(batchId=lambda: 0, numInputRows=lambda: rows)
    stream = SimpleNamespace(lastExecution=lambda: execution)
    java = SimpleNamespace(streamingQuery=lambda: stream, lastProgress=lambda: progress, isActive=lambda: False)
    return SimpleNamespace(_jsq=java)


def test_an_epoch_that_begins_before_its_query_is_there_does_not_ask_the_one_before() -> None:
    facts = SparkStream(has_watermark=True)
    facts.attach(query(watermark_ms=1))
    facts.detach()
    answers: list[int | None] = []
    asking = threading.Thread(target=lambda: answers.append(facts.watermark_ms()))
    asking.start()
    facts.attach(query(watermark_ms=2))
    asking.join()
    assert answers == [2]


def test_what_an_ended_query_said_is_forgotten() -> None:
    facts = SparkStream(has_watermark=True)
    facts.attach(query(watermark_ms=1, rows=70))
    assert facts.previous_rows(1) == 70
    assert facts.is_stopped()
    facts.detach()
    assert not facts.is_stopped()
    facts.attach(query(watermark_ms=1))
    assert facts.previous_rows(1) == 0
