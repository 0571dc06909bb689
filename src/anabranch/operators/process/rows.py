"""Runs a processor of rows: Spark's transformWithState."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import Row

from anabranch.operators.process.columns import python_values, row_class, rows_of, tuples_of
from anabranch.operators.process.grouping import Groups
from anabranch.operators.process.program import ROWS_MAX, Program
from anabranch.operators.process.row_output import MisfitError, RowOutput
from anabranch.operators.process.task import OWN_ERRORS, DueTimer, run_task, user_error
from anabranch.operators.process.timers import LocalTimers
from anabranch.operators.process.tuples import state_rows
from anabranch.operators.process.variable import Cursor
from anabranch.operators.state import StageState


def run_rows(
    batches: Iterable[pa.RecordBatch],
    program: Program,
    state: StageState,
    timers: TimerValues | None = None,
    initial: Iterable[pa.RecordBatch] = (),
) -> Iterator[pa.RecordBatch]:
    """The output of one task whose processor takes and yields Rows.

    Batches, those of the initial state too, have the columns HASH, those of the key, and the user's, in this order.
    Output batches have the schema ``program.output_schema``.
    """
    return run_task(batches, program, state, timers, _RowRunner, initial)


class _RowRunner:
    def __init__(self, program: Program, groups: Groups, cursor: Cursor, timers: TimerValues) -> None:
        self._program = program
        self._groups = groups
        self._cursor = cursor
        self._timers = timers
        self._row = row_class(groups.rows.column_names)
        self._output = RowOutput(program)

    def run(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        program, cursor, timers = self._program, self._cursor, self._timers
        handle = program.processor.handleInputRows
        batch = self._output.batch
        yielded: list[Row] = []
        #: How many rows there were when each key was done, those that have gone out included.
        ends: list[int] = []
        gone = 0
        key: tuple[object, ...] = ()
        inputs = self._inputs(first, end)
        try:
            # A loop over keys, as user code is called for each: the rest of the work is done around it.
            for position, (key, rows) in enumerate(inputs):
                cursor.key = position
                results: Iterator[Row] = iter(handle(key, rows, timers))  # type: ignore[arg-type]
                yielded.extend(islice(results, ROWS_MAX))
                while len(yielded) >= ROWS_MAX:
                    yield batch(yielded[:ROWS_MAX])
                    del yielded[:ROWS_MAX]
                    gone += ROWS_MAX
                    yielded.extend(islice(results, ROWS_MAX))
                ends.append(gone + len(yielded))
            if yielded:
                yield batch(yielded)
        except MisfitError as misfit:
            raise misfit.of_key(self._keys(first, end)[bisect_right(ends, gone + misfit.row)]) from misfit
        except OWN_ERRORS:
            raise
        except Exception as error:
            raise user_error(program, program.place("handleInputRows", key), error) from error

    def timer_keys(self, keys: pa.Table) -> list[tuple[object, ...]]:
        return state_rows(keys)

    def expire(self, due: Iterator[DueTimer], timers: LocalTimers) -> Iterator[pa.RecordBatch]:
        handle = self._program.processor.handleExpiredTimer
        yielded: list[Row] = []
        #: The keys whose timers were run, and how many rows there were when each was done.
        told: list[tuple[object, ...]] = []
        ends: list[int] = []
        gone = 0
        key: tuple[object, ...] = ()
        try:
            for position, key, timer, expiry_ms in due:
                told.append(key)
                self._cursor.key = position
                results = iter(handle(key=key, timerValues=self._timers, expiredTimerInfo=timer))
                yielded.extend(islice(results, ROWS_MAX))  # type: ignore[arg-type]
                while len(yielded) >= ROWS_MAX:
                    yield self._output.batch(yielded[:ROWS_MAX])
                    del yielded[:ROWS_MAX]
                    gone += ROWS_MAX
                    yielded.extend(islice(results, ROWS_MAX))  # type: ignore[arg-type]
                timers.delete(expiry_ms)
                ends.append(gone + len(yielded))
            if yielded:
                yield self._output.batch(yielded)
        except MisfitError as misfit:
            raise misfit.of_key(told[bisect_right(ends, gone + misfit.row)]) from misfit
        except OWN_ERRORS:
            raise
        except Exception as error:
            raise user_error(self._program, self._program.place("handleExpiredTimer", key), error) from error

    def start(self, prior: Groups, number: int) -> None:
        given = prior.given_keys.slice(number, 1)
        (key,) = tuples_of([python_values(column) for column in given.columns], 1)
        cls = row_class(prior.rows.column_names)
        try:
            for row in _in_pieces(prior.rows, cls, int(prior.offsets[number]), int(prior.offsets[number + 1])):
                self._program.processor.handleInitialState(key, row, self._timers)
        except OWN_ERRORS:
            raise
        except Exception as error:
            raise user_error(self._program, self._program.place("handleInitialState", key), error) from error

    def _keys(self, first: int, end: int) -> list[tuple[object, ...]]:
        given = self._groups.given_keys.slice(first, end - first)
        return tuples_of([python_values(column) for column in given.columns], end - first)

    def _inputs(self, first: int, end: int) -> Iterator[tuple[tuple[object, ...], Iterator[Row]]]:
        groups, keys = self._groups, self._keys(first, end)
        offsets = groups.offsets[first : end + 1].tolist()
        if offsets[-1] - offsets[0] > ROWS_MAX:
            return iter([(keys[0], _in_pieces(groups.rows, self._row, offsets[0], offsets[-1]))])
        rows = _rows(groups.rows, self._row, offsets[0], offsets[-1])
        within = [offset - offsets[0] for offset in offsets]
        slices = map(rows.__getitem__, map(slice, within, islice(within, 1, None)))
        return zip(keys, map(iter, slices), strict=True)


def _rows(table: pa.Table, cls: type[Row], start: int, stop: int) -> list[Row]:
    part = table.slice(start, stop - start)
    columns = [python_values(column) for column in part.columns]
    return rows_of(cls, tuples_of(columns, stop - start))


def _in_pieces(table: pa.Table, cls: type[Row], start: int, stop: int) -> Iterator[Row]:
    """The rows of a large key, converted as user code asks for them."""
    pieces = range(start, stop, ROWS_MAX)
    return chain.from_iterable(_rows(table, cls, piece, min(piece + ROWS_MAX, stop)) for piece in pieces)
