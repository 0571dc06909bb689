"""Runs applyInPandasWithState in a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues

from anabranch.operators.process.frame_input import scalar_keys
from anabranch.operators.process.frames import FrameRunner
from anabranch.operators.process.program import Program
from anabranch.operators.process.task import DueTimer, run_task
from anabranch.operators.process.timers import LocalTimers
from anabranch.operators.state import StageState


def run_groups(
    batches: Iterable[pa.RecordBatch],
    program: Program,
    state: StageState,
    timers: TimerValues | None = None,
    initial: Iterable[pa.RecordBatch] = (),
) -> Iterator[pa.RecordBatch]:
    """The output of one task whose function takes and yields pandas DataFrames, and keeps a GroupState."""
    return run_task(batches, program, state, timers, _GroupRunner, initial)


class _GroupRunner(FrameRunner):
    """Keys are what a Series of them has, with rows and without. Time-outs are ended by the calls, not after them."""

    def row_keys(self, keys: pa.Table) -> list[tuple[object, ...]]:
        return scalar_keys(keys, self._program.frames)

    def timer_keys(self, keys: pa.Table) -> list[tuple[object, ...]]:
        return scalar_keys(keys, self._program.frames)

    def expire(self, due: Iterator[DueTimer], timers: LocalTimers) -> Iterator[pa.RecordBatch]:
        del timers
        return super().expire(due, _Lasting(self._cursor))


class _Lasting(LocalTimers):
    """A timer that has fired stays, unless the call that it led to has deleted it."""

    def delete(self, expiryTimestampMs: int) -> None:
        """Not for the runner to do."""
