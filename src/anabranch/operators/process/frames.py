"""Runs a processor of pandas frames: Spark's transformWithStateInPandas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues

from anabranch.operators.process.frame_input import frame_keys, frame_of, slicer_of
from anabranch.operators.process.frame_output import FrameOutput
from anabranch.operators.process.grouping import Groups
from anabranch.operators.process.program import ROWS_MAX, FrameSettings, Program
from anabranch.operators.process.task import OWN_ERRORS, DueTimer, run_task, user_error
from anabranch.operators.process.timers import LocalTimers
from anabranch.operators.process.tuples import state_rows
from anabranch.operators.process.variable import Cursor
from anabranch.operators.state import StageState


def run_frames(
    batches: Iterable[pa.RecordBatch],
    program: Program,
    state: StageState,
    timers: TimerValues | None = None,
    initial: Iterable[pa.RecordBatch] = (),
) -> Iterator[pa.RecordBatch]:
    """The output of one task whose processor takes and yields pandas DataFrames.

    Batches, those of the initial state too, have the columns HASH, those of the key, and the user's, in this order.
    Output batches have the schema ``program.output_schema``.
    """
    return run_task(batches, program, state, timers, FrameRunner, initial)


class FrameRunner:
    def __init__(self, program: Program, groups: Groups, cursor: Cursor, timers: TimerValues) -> None:
        self._program = program
        self._groups = groups
        self._cursor = cursor
        self._timers = timers
        self._output = FrameOutput(program)

    def run(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        program, cursor, timers = self._program, self._cursor, self._timers
        handle = program.processor.handleInputRows
        output = self._output
        key: tuple[object, ...] = ()
        inputs = self._inputs(first, end)
        try:
            # A loop over keys, as user code is called for each: the rest of the work is done around it.
            for position, (key, frames) in enumerate(inputs):
                cursor.key = position
                for frame in handle(key, frames, timers):
                    output.add(frame, key)
                    if output.rows >= ROWS_MAX:
                        yield from output.flush()
        except OWN_ERRORS:
            raise
        except Exception as error:
            raise user_error(program, program.place("handleInputRows", key), error) from error
        yield from output.flush()

    def row_keys(self, keys: pa.Table) -> list[tuple[object, ...]]:
        """Keys as user code sees them with their rows."""
        return frame_keys(keys, self._program.frames)

    def timer_keys(self, keys: pa.Table) -> list[tuple[object, ...]]:
        return state_rows(keys)

    def expire(self, due: Iterator[DueTimer], timers: LocalTimers) -> Iterator[pa.RecordBatch]:
        handle = self._program.processor.handleExpiredTimer
        output = self._output
        key: tuple[object, ...] = ()
        try:
            for position, key, timer, expiry_ms in due:
                self._cursor.key = position
                for frame in handle(key=key, timerValues=self._timers, expiredTimerInfo=timer):
                    output.add(frame, key)
                    if output.rows >= ROWS_MAX:
                        yield from output.flush()
                timers.delete(expiry_ms)
        except OWN_ERRORS:
            raise
        except Exception as error:
            raise user_error(self._program, self._program.place("handleExpiredTimer", key), error) from error
        yield from output.flush()

    def start(self, prior: Groups, number: int) -> None:
        settings = self._program.frames
        (key,) = frame_keys(prior.given_keys.slice(number, 1), settings)
        start, stop = prior.offsets[number : number + 2].tolist()
        rows_max = settings.rows_in_frame(prior.rows)
        try:
            for frame in _in_pieces(prior.rows, start, stop, rows_max, settings):
                self._program.processor.handleInitialState(key, frame, self._timers)
        except OWN_ERRORS:
            raise
        except Exception as error:
            raise user_error(self._program, self._program.place("handleInitialState", key), error) from error

    def _inputs(self, first: int, end: int) -> Iterator[tuple[tuple[object, ...], Iterator[pd.DataFrame]]]:
        groups, settings = self._groups, self._program.frames
        keys = self.row_keys(groups.given_keys.slice(first, end - first))
        offsets = groups.offsets[first : end + 1].tolist()
        rows_max = settings.rows_in_frame(groups.rows)
        base, rows = offsets[0], offsets[-1] - offsets[0]
        if rows > ROWS_MAX:
            return iter([(keys[0], _in_pieces(groups.rows, base, offsets[-1], rows_max, settings))])
        cut = slicer_of(groups.rows.slice(base, rows), settings)
        bounds = [(start - base, stop - base) for start, stop in pairwise(offsets)]
        return (
            (key, iter((cut(start, stop),)) if stop - start <= rows_max else _in_cuts(cut, start, stop, rows_max))
            for key, (start, stop) in zip(keys, bounds, strict=True)
        )


def _in_pieces(rows: pa.Table, start: int, stop: int, rows_max: int, settings: FrameSettings) -> Iterator[pd.DataFrame]:
    """The rows of a large key in frames of bounded size, converted as user code asks for them."""
    for piece in range(start, stop, rows_max):
        yield frame_of(rows.slice(piece, min(rows_max, stop - piece)), settings)


def _in_cuts(cut: Callable[[int, int], pd.DataFrame], start: int, stop: int, rows_max: int) -> Iterator[pd.DataFrame]:
    return (cut(piece, min(piece + rows_max, stop)) for piece in range(start, stop, rows_max))
