"""The life of a processor in a task: init, the rows of each key, its timers, close; state is read and written once."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from anabranch.core.errors import EpochError, WorkerError
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, INDEX, Layout, Op
from anabranch.operators.grouping import Groups, find_keys, group_rows
from anabranch.operators.process.handles import LocalHandle
from anabranch.operators.process.program import ROWS_MAX, Program
from anabranch.operators.process.timers import TIMERS, LocalTimers
from anabranch.operators.process.tuples import UnstorableError, state_rows
from anabranch.operators.process.variable import Cursor, WindowChanges, WindowEntries
from anabranch.operators.state import StageState
from anabranch.operators.usercode import user_traceback

_log = logging.getLogger(__name__)

#: What says by itself where it comes from. Other errors of ours are told as those of user code are, which called us.
OWN_ERRORS = (EpochError, WorkerError)
#: What the state answers for one variable: of each entry the position of its key, and columns.
Answer = tuple[npt.NDArray[np.int64], list[pa.Array]]
#: A key as user code sees it.
Key = tuple[Any, ...]
#: A timer that is due: the position of its key, the key and the time as user code sees them, and the time.
DueTimer = tuple[int, Key, ExpiredTimerInfo, int]


class Runner(ABC):
    """Passes rows to user code in one of its forms, and turns what comes back into batches."""

    def __init__(self, program: Program, groups: Groups, cursor: Cursor, times: TimerValues) -> None:
        self.program = program
        self.cursor = cursor
        self._groups = groups
        self._times = times

    @classmethod
    def run_task(
        cls,
        batches: Iterable[pa.RecordBatch],
        program: Program,
        state: StageState,
        times: TimerValues | None = None,
        initial: Iterable[pa.RecordBatch] = (),
    ) -> Iterator[pa.RecordBatch]:
        """Gives the output of one task, in the schema ``program.output_schema``; writes state before the last batch.

        Batches, those of the initial state too, have the columns HASH, those of the key, and the user's, in this order.
        """
        times = times or TimerValues()
        groups = group_rows(batches, program.spec.key).in_key_order()
        prior = _Prior(groups, group_rows(initial, program.spec.key))
        due_up_to_ms = program.due_up_to_ms(times)
        local = LocalState(
            program, prior.all_keys(), now_ms=times.getCurrentProcessingTimeInMs(), due_up_to_ms=due_up_to_ms
        )
        processor = program.processor
        # The last batch is held back: a reader that has seen it may rely on the changes having been sent.
        held: pa.RecordBatch | None = None
        try:
            with user_code(program, "init"):
                processor.init(local.handle)
                local.handle.close()
            local.read(state)
            runner = cls(program, groups, local.handle.cursor, times)
            for batch in _work(groups, prior, local, runner, due_up_to_ms):
                if held is not None:
                    yield held
                held = batch
        except BaseException:
            _close_after_failure(program)
            raise
        with user_code(program, "close"):
            processor.close()
        state.write(local.changes())
        if held is not None:
            yield held

    @abstractmethod
    def inputs(self, groups: Groups, first: int, end: int) -> Iterator[tuple[Key, Iterator[Any]]]:
        """Gives the keys from first to end and their rows, as user code sees them."""

    @abstractmethod
    def batches(self, calls: Iterator[Iterable[Any]], keys: Sequence[Key], method: str) -> Iterator[pa.RecordBatch]:
        """Gives in batches what calls of a method of user code yield; the last of the keys is that of the last call."""

    def timer_keys(self, keys: pa.Table) -> list[Key]:
        """Returns keys as user code sees them when a timer fires."""
        return state_rows(keys)

    def run(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Runs user code for the keys from first to end, for each of them at its position in the cursor."""
        handle, cursor, times = self.program.processor.handleInputRows, self.cursor, self._times
        inputs, keys = self.inputs(self._groups, first, end), list[Key]()

        # A loop over keys, as user code is called for each: the rest of the work is done around it.
        def calls() -> Iterator[Iterable[Any]]:
            for position, (key, rows) in enumerate(inputs):
                keys.append(key)
                cursor.key = position
                yield handle(key, rows, times)

        return self.batches(calls(), keys, "handleInputRows")

    def expire(self, due: Iterator[DueTimer], timers: LocalTimers) -> Iterator[pa.RecordBatch]:
        """Runs user code for timers, each of which is gone afterwards."""
        handle, keys = self.program.processor.handleExpiredTimer, list[Key]()

        def calls() -> Iterator[Iterable[Any]]:
            for position, key, timer, expiry_ms in due:
                keys.append(key)
                self.cursor.key = position
                yield handle(key=key, timerValues=self._times, expiredTimerInfo=timer)
                timers.delete(expiry_ms)

        return self.batches(calls(), keys, "handleExpiredTimer")

    def start(self, prior: Groups, number: int) -> None:
        """Gives the initial state of the current key to user code: the rows of one key of these."""
        ((key, rows),) = self.inputs(prior, number, number + 1)
        with user_code(self.program, "handleInitialState", [key]):
            for row in rows:
                self.program.processor.handleInitialState(key, row, self._times)


def _work(
    groups: Groups, prior: _Prior, local: LocalState, runner: Runner, due_up_to_ms: int | None
) -> Iterator[pa.RecordBatch]:
    """Works window by window: initial state, rows, timers. Keys cannot tell that timers come after all rows."""

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
    """Gives timers with their keys."""
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
        """Returns the keys with rows, then those with nothing but initial state."""
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


@contextmanager
def user_code(program: Program, method: str, keys: Sequence[Key] = ()) -> Iterator[None]:
    """Says of an exception that comes out of user code where it does: in which method, and for the last of the keys."""
    try:
        yield
    except OWN_ERRORS:
        raise
    except Exception as raised:
        # Python replaces one that leaves a generator, and the replacement does not say where it came from.
        error = raised.__cause__ if isinstance(raised.__cause__, StopIteration) else raised
        where = program.place(method, keys[-1]) if keys else method
        raise EpochError(
            f"Stage {program.spec.name}: {program.name} failed in {where}: "
            f"{type(error).__name__}: {error}\n{user_traceback(error)}"
            "Correct the processor or its input and start the query again: it resumes from its checkpoint."
        ) from error


class LocalState:
    """Feeds the state variables of a handle with what is stored, and gathers what changed."""

    def __init__(self, program: Program, keys: pa.Table, *, now_ms: int, due_up_to_ms: int | None) -> None:
        self._spec = program.spec
        #: The keys of the task: those with rows first, then others with something to do.
        self.keys = keys
        self.handle = LocalHandle(program.spec, program.time_mode, program.tables, program.asked)
        self._now_ms = now_ms
        self._due_up_to_ms = due_up_to_ms
        self._answers: dict[str, Answer] = {}
        #: By state variable: expired rows of keys that the task has nothing else to do with.
        self._swept: dict[str, pa.Table] = {}
        self._changes: dict[str, list[WindowChanges]] = defaultdict(list)
        self._window = 0, 0

    def read(self, state: StageState) -> None:
        """Does the one read of the task: of its keys, and of others whose timers are due.

        Nothing is asked for no keys, or for no variables, unless time may have made something due.
        """
        expiries, due = self._expiries(), self._due_timers()
        if not expiries and due is None:
            if self.keys.num_rows and self._spec.variables:
                self._take(state.read(self.keys))
            return
        answers = state.ask(self.keys, expiries=expiries, due=due)
        self._take(answers.found)
        if answers.due_keys is not None and answers.due_keys.num_rows:
            for name, (owners, columns) in self._answers.items():
                more_owners, more_columns = _answer(answers.due[name])
                joined = [pa.concat_arrays(pair) for pair in zip(columns, more_columns, strict=True)]
                self._answers[name] = np.concatenate((owners, more_owners + self.keys.num_rows)), joined
            self.keys = pa.concat_tables([self.keys, answers.due_keys]).combine_chunks()
        for name in self.handle.ttls_ms:
            expired = answers.expired[name]
            # What expires of the task's own keys is up to the state variable: user code may set it again.
            foreign = find_keys(self.keys, expired.select(self.keys.column_names)) < 0
            self._swept[name] = expired.filter(pa.array(foreign))

    def _due_timers(self) -> Expiry | None:
        if self._due_up_to_ms is None:
            return None
        # Also of key groups that are still on their way: if the epoch is repeated, the same timers have to fire.
        column = self._spec.layouts[TIMERS].subkey.names[0]
        return Expiry(TIMERS, column, "", self._due_up_to_ms)

    def _expiries(self) -> list[Expiry]:
        expiries = []
        for name in self.handle.ttls_ms:
            # Expired entries are not seen wherever they are; when they are removed does not matter.
            column = self._spec.layouts[name].value.names[-1]
            expiries.append(Expiry(name, column, "", self._now_ms, whole=False))
        return expiries

    def _take(self, answers: Mapping[str, pa.Table]) -> None:
        for name in self.handle.variables:
            self._answers[name] = _answer(answers[name])

    def windows_from(self, first: int, keys_max: int) -> Iterator[tuple[int, int]]:
        """Gives runs of the keys from this one on."""
        for start in range(first, self.keys.num_rows, keys_max):
            yield start, min(start + keys_max, self.keys.num_rows)

    def begin(self, first: int, end: int) -> None:
        """Makes the keys from first to end current: their positions in the window count from 0."""
        self._window = first, end
        for name, local in self.handle.variables.items():
            owners, columns = self._answers[name]
            start, stop = np.searchsorted(owners, (first, end)).tolist()
            entries = [column.slice(start, stop - start) for column in columns]
            expired = None
            if name in self.handle.ttls_ms:
                expired = self._is_expired(entries.pop())
            local.begin(WindowEntries(end - first, owners[start:stop] - first, entries, expired))

    def _is_expired(self, expiries: pa.Array) -> npt.NDArray[np.bool_] | None:
        over = pc.fill_null(pc.less_equal(expiries, self._now_ms), False)
        expired: npt.NDArray[np.bool_] = over.to_numpy(zero_copy_only=False)
        return expired if expired.any() else None

    def end(self) -> None:
        """Turns the changes of the window into columns."""
        first, _ = self._window
        for name, local in self.handle.variables.items():
            try:
                changes = local.end()
            except UnstorableError as error:
                raise EpochError(
                    f"Stage {self._spec.name}: state variable {name}, field {error.field}: {error.reason}. "
                    "Store a value that fits, or declare a wider type."
                ) from error
            if changes is not None:
                columns = list(changes.columns)
                if name in self.handle.ttls_ms:
                    columns.append(self._expiry_column(name, changes.ops))
                self._changes[name].append(WindowChanges(changes.owners + first, changes.ops, columns))

    def _expiry_column(self, name: str, ops: npt.NDArray[np.int8]) -> pa.Array:
        """Returns when entries expire: what is set lives from now on."""
        expiries = np.full(len(ops), self._now_ms + self.handle.ttls_ms[name], np.int64)
        return pa.array(expiries, mask=ops != Op.PUT)

    def changes(self) -> Mapping[str, pa.Table]:
        """Returns all changes of the task, in the columns in which they travel; variables without any are left out."""
        tables = {name: self._table(name, changes) for name, changes in self._changes.items()}
        for name, rows in self._swept.items():
            if rows.num_rows:
                removals = _removals(rows, self._spec.layouts[name])
                tables[name] = pa.concat_tables([tables[name], removals]) if name in tables else removals
        return tables

    def _table(self, name: str, changes: list[WindowChanges]) -> pa.Table:
        layout = self._spec.layouts[name]
        keys = self.keys.take(pa.array(np.concatenate([part.owners for part in changes])))
        ops = pa.array(np.concatenate([part.ops for part in changes]))
        columns = [pa.chunked_array(parts) for parts in zip(*[part.columns for part in changes], strict=True)]
        return pa.Table.from_arrays(
            [keys.column(HASH), ops, *keys.columns[1:], *columns], schema=layout.changes
        ).combine_chunks()


def _answer(answer: pa.Table) -> Answer:
    owners = _array(answer.column(INDEX)).to_numpy(zero_copy_only=False).astype(np.int64)
    return owners, [_array(column) for column in answer.columns[1:]]


def _removals(rows: pa.Table, layout: Layout) -> pa.Table:
    """Returns the changes that remove rows of state."""
    kept = len(layout.keys) + len(layout.subkey)
    ops = pa.array(np.full(rows.num_rows, Op.DELETE, np.int8))
    nothing = [pa.nulls(rows.num_rows, field.type) for field in layout.value]
    return pa.table([rows.column(0), ops, *rows.columns[1:kept], *nothing], schema=layout.changes)


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
