"""Starting a query of Spark's after another one: what is asked while it starts is not answered by the one before."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.api import start
from anabranch.engine.spark.query import SparkStream


class Writer:
    """Stands for Spark's writer: an epoch may begin before the query's handle is there."""

    def __init__(self, stream: SparkStream, started: list[bool]) -> None:
        self._stream = stream
        self._started = started

    def foreachBatch(self, _: Any) -> Writer:
        return self

    def option(self, *_: Any) -> Writer:
        return self

    def start(self) -> Any:
        self._started.append(self._stream.is_stopped())
        return ended_query()


def ended_query() -> Any:
    return SimpleNamespace(_jsq=SimpleNamespace(isActive=lambda: False))


def test_an_ended_query_answers_nothing_while_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "fast_log_files", lambda *_: nullcontext())
    stream, was_stopped = SparkStream(has_watermark=True), list[bool]()
    rows: Any = SimpleNamespace(writeStream=Writer(stream, was_stopped), sparkSession=None)
    loop: Any = None
    for _ in range(2):
        start._start_spark(rows, loop, stream, "checkpoint", {}, None)
        assert stream.is_stopped()
    assert was_stopped == [False, False]
