"""The life of a processor in a task: init, the rows of each key, its timers, close; state is read and written once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from anabranch.core.errors import EpochError, WorkerError
from anabranch.operators.process.grouping import Groups, find_keys, group_rows
from anabranch.operators.process.local_state import LocalState
from anabranch.operators.process.program import ROWS_MAX, Program
from anabranch.operators.process.timers import LocalTimers
from anabranch.operators.process.variable import Cursor
from anabranch.operators.state import StageState
from anabranch.operators.usercode import user_traceback

_log = logging.getLogger(__name__)

#: What says by itself where it comes from. Other errors of ours are told as those of user code are, which called us.
OWN_ERRORS = (EpochError, WorkerError)
#: A timer that is due: the position of its key, the key and the time as user code sees them, and the time.
DueTimer = tuple[int, tuple[object, ...], ExpiredTimerInfo, int]


class Runner(Protocol):
    """Passes rows to user code in one of its forms, and turns what comes back into batches."""

    def run(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Runs user code for the keys from first to end, for each of them at its position in the cursor."""
        ...

    def timer_keys(self, keys: pa.Table) -> list[tuple[object, ...]]:
        """Keys as user code sees them when a timer fires."""
        ...

    def expire(self, due: Iterator[DueTimer], timers: LocalTimers) -> Iterator[pa.RecordBatch]:
        """Runs user code for timers, each of which is gone afterwards."""
        ...

    def start(self, prior: Groups, number: int) -> None:
        """Gives the initial state of the current key to user code: the rows of one key of these."""
        ...


class MakeRunner(Protocol):
    def __call__(self, program: Program, groups: Groups, cursor: Cursor, timers: TimerValues) -> Runner: ...


def run_task(
    batches: Iterable[pa.RecordBatch],
    program: Program,
    state: StageState,
    timers: TimerValues | None,
    make_runner: MakeRunner,
    initial: Iterable[pa.RecordBatch] = (),
) -> Iterator[pa.RecordBatch]:
    """The output of one task. State is written before the last batch is given out."""
    times = timers or TimerValues()
    groups = group_rows(batches, program.spec.key).in_key_order()
    prior = _Prior(groups, group_rows(initial, program.spec.key))
    due_up_to_ms = program.due_up_to_ms(times)
    local = LocalState(
        program, prior.all_keys(), now_ms=times.getCurrentProcessingTimeInMs(), due_up_to_ms=due_up_to_ms
    )
    processor = program.processor
    # The last batch is held back: whoever has seen it may rely on the changes having been sent.
    held: pa.RecordBatch | None = None
    try:
        try:
            processor.init(local.handle)
            local.handle.close()
        except OWN_ERRORS:
            raise
        except Exception as error:
            raise user_error(program, "init", error) from error
        local.read(state)
        runner = make_runner(program, groups, local.handle.cursor, times)
        for batch in _work(groups, prior, local, runner, due_up_to_ms):
            if held is not None:
                yield held
            held = batch
    except BaseException:
        _close_after_failure(program)
        raise
    try:
        processor.close()
    except Exception as error:
        raise user_error(program, "close", error) from error
    state.write(local.changes())
    if held is not None:
        yield held


def _work(
    groups: Groups, prior: _Prior, local: LocalState, runner: Runner, due_up_to_ms: int | None
) -> Iterator[pa.RecordBatch]:
    """Window by window: initial state, rows, timers. That timers come after all rows, keys cannot tell."""

    def timers() -> Iterator[pa.RecordBatch]:
        if due_up_to_ms is not None:
            known = local.handle.timers("handleExpiredTimer")
            if due := known.due(due_up_to_ms):
                yield from runner.expire(_due_timers(local, runner, first, due), known)

    for first, end in groups.windows(ROWS_MAX):
        local.begin(first, end)
        prior.start(runner, local.handle.cursor, first, end)
        yield from runner.run(first, end)
        yield from timers()
        local.end()
    for first, end in local.windows_from(groups.keys.num_rows, ROWS_MAX):
        local.begin(first, end)
        prior.start(runner, local.handle.cursor, first, end)
        yield from timers()
        local.end()


def _due_timers(local: LocalState, runner: Runner, first: int, due: list[tuple[int, int]]) -> Iterator[DueTimer]:
    """Timers with their keys."""
    positions = np.unique([position for _, position in due])
    keys = local.keys.take(pa.array(positions + first))
    shown = runner.timer_keys(keys.select(keys.column_names[1:]).combine_chunks())
    key_of = dict(zip(positions.tolist(), shown, strict=True))
    return ((position, key_of[position], ExpiredTimerInfo(expiry_ms), expiry_ms) for expiry_ms, position in due)


class _Prior:
    """The initial state of keys, in the first epoch: for each key of the task the rows that it starts with."""

    def __init__(self, groups: Groups, prior: Groups) -> None:
        self._rows = groups.keys
        self._prior = prior
        known = find_keys(groups.keys, prior.keys)
        self._further = np.flatnonzero(known < 0)
        known[self._further] = groups.keys.num_rows + np.arange(len(self._further))
        #: For each key of the task its number in the prior groups, where it has one.
        self._numbers = dict(zip(known.tolist(), range(len(known)), strict=True))

    def all_keys(self) -> pa.Table:
        """The keys with rows, then those with nothing but initial state."""
        if not len(self._further):
            return self._rows
        return pa.concat_tables([self._rows, self._prior.keys.take(pa.array(self._further))]).combine_chunks()

    def start(self, runner: Runner, cursor: Cursor, first: int, end: int) -> None:
        if not self._numbers:
            return
        for key in range(first, end):
            number = self._numbers.get(key)
            if number is not None:
                cursor.key = key - first
                runner.start(self._prior, number)


def _close_after_failure(program: Program) -> None:
    try:
        program.processor.close()
    except Exception:
        # The first error is the one to raise.
        _log.warning("Stage %s: the processor failed in close as well", program.spec.name, exc_info=True)


def user_error(program: Program, where: str, error: Exception) -> EpochError:
    """What to raise for an exception that came out of user code."""
    return EpochError(
        f"Stage {program.spec.name}: {program.name} failed in {where}: "
        f"{type(error).__name__}: {error}\n{user_traceback(error)}"
        "Correct the processor or its input and start the query again: it resumes from its checkpoint."
    )
