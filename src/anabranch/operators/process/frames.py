"""Runs a processor of pandas frames: Spark's transformWithStateInPandas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues

from anabranch.core.errors import AnabranchError
from anabranch.operators.process.frame_input import frame_keys, frame_of, slicer_of
from anabranch.operators.process.frame_output import FrameOutput
from anabranch.operators.process.grouping import Groups
from anabranch.operators.process.program import ROWS_MAX, Program
from anabranch.operators.process.task import for_key, run_task, user_error
from anabranch.operators.process.variable import Cursor
from anabranch.operators.state import StageState


def run_frames(
    batches: Iterable[pa.RecordBatch],
    program: Program,
    state: StageState,
    timers: TimerValues | None = None,
) -> Iterator[pa.RecordBatch]:
    """The output of one task whose processor takes and yields pandas DataFrames.

    Batches have the columns HASH, those of the key, and the user's, in this order. Output batches have the
    schema ``program.output_schema``.
    """
    return run_task(batches, program, state, timers, _FrameRunner)


class _FrameRunner:
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
        except AnabranchError:
            raise
        except Exception as error:
            raise user_error(program, for_key(key), error) from error
        yield from output.flush()

    def _inputs(self, first: int, end: int) -> Iterator[tuple[tuple[object, ...], Iterator[pd.DataFrame]]]:
        groups, settings = self._groups, self._program.frames
        keys = frame_keys(groups.given_keys.slice(first, end - first), settings)
        offsets = groups.offsets[first : end + 1].tolist()
        rows_max = settings.rows_max if settings.rows_max > 0 else offsets[-1]
        base, rows = offsets[0], offsets[-1] - offsets[0]
        if rows > ROWS_MAX:
            return iter([(keys[0], self._in_pieces(base, offsets[-1], rows_max))])
        cut = slicer_of(groups.rows.slice(base, rows), settings)
        bounds = [(start - base, stop - base) for start, stop in pairwise(offsets)]
        return (
            (key, iter((cut(start, stop),)) if stop - start <= rows_max else _in_cuts(cut, start, stop, rows_max))
            for key, (start, stop) in zip(keys, bounds, strict=True)
        )

    def _in_pieces(self, start: int, stop: int, rows_max: int) -> Iterator[pd.DataFrame]:
        """The rows of a large key in frames of bounded size, converted as user code asks for them."""
        for piece in range(start, stop, rows_max):
            part = self._groups.rows.slice(piece, min(rows_max, stop - piece))
            yield frame_of(part, self._program.frames)


def _in_cuts(cut: Callable[[int, int], pd.DataFrame], start: int, stop: int, rows_max: int) -> Iterator[pd.DataFrame]:
    return (cut(piece, min(piece + rows_max, stop)) for piece in range(start, stop, rows_max))
