"""How long the code of a pandas processor takes by itself, without any engine: no engine can be faster than that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from anabranch.engine.spark import python_worker as pythonworker
from bench.session import Lab
from bench.sources import Size

_REPEATS = 3


class _Value:
    """State that costs nothing: always there, and never kept."""

    def __init__(self, fields: int) -> None:
        self._held = (1,) * fields

    def get(self) -> tuple[int, ...]:
        return self._held

    def update(self, _: Any) -> None:
        pass

    def clear(self) -> None:
        pass


class _Handle:
    def getValueState(self, _name: str, schema: str, *_: Any) -> _Value:
        return _Value(fields=schema.count(",") + 1)

    def registerTimer(self, _: int) -> None:
        pass

    def deleteTimer(self, _: int) -> None:
        pass


def alone_ms(lab: Lab, processor: type[StatefulProcessor], size: Size, *, parallelism: int) -> float:
    """For one epoch: rows of every key, and, where the processor has timers, those of half of the keys."""

    def body(keys: Iterable[int]) -> Iterable[float]:
        pythonworker.tune()  # as in our tasks: fewer looks for garbage
        count = sum(1 for _ in keys)
        columns = {name: np.arange(count * size.rows_per_key) for name in ("key", "amount", "time_ms")}
        rows = pd.DataFrame(columns)
        frames = [part.reset_index(drop=True) for _, part in rows.groupby(rows.index // size.rows_per_key)]
        user: Any = processor()
        user.init(_Handle())
        has_timers = processor.handleExpiredTimer is not StatefulProcessor.handleExpiredTimer
        started_s = time.perf_counter()
        for number, frame in enumerate(frames):
            for _ in user.handleInputRows((number,), iter((frame,)), None):
                pass
        for number in range(count // 2 if has_timers else 0):
            for _ in user.handleExpiredTimer((number,), None, None):
                pass
        yield 1000 * (time.perf_counter() - started_s)

    keys = lab.spark.sparkContext.parallelize(range(size.keys), parallelism)
    return statistics.median(max(keys.mapPartitions(body).collect()) for _ in range(_REPEATS))
