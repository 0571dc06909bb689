"""The task's local copy of a stage's state: read once, worked on window by window, its changes sent once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.errors import EpochError
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, INDEX, Layout, Op
from anabranch.operators.process.grouping import find_keys
from anabranch.operators.process.handles import LocalHandle
from anabranch.operators.process.program import Program
from anabranch.operators.process.timers import TIMERS
from anabranch.operators.process.tuples import UnstorableError
from anabranch.operators.process.variable import Changes, Entries
from anabranch.operators.state import StageState

Answer = tuple[npt.NDArray[np.int64], list[pa.Array]]


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
        self._changes: dict[str, list[Changes]] = defaultdict(list)
        self._window = 0, 0

    def read(self, state: StageState) -> None:
        """The one read of the task: of its keys, and of others whose timers are due.

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
        """Runs of the keys from this one on."""
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
            local.begin(Entries(end - first, owners[start:stop] - first, entries, expired))

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
                self._changes[name].append(Changes(changes.owners + first, changes.ops, columns))

    def _expiry_column(self, name: str, ops: npt.NDArray[np.int8]) -> pa.Array:
        """Whatever is set lives from now on."""
        expiries = np.full(len(ops), self._now_ms + self.handle.ttls_ms[name], np.int64)
        return pa.array(expiries, mask=ops != Op.PUT)

    def changes(self) -> Mapping[str, pa.Table]:
        """All changes of the task, in the columns in which they travel; variables without any are left out."""
        tables = {name: self._table(name, changes) for name, changes in self._changes.items()}
        for name, rows in self._swept.items():
            if rows.num_rows:
                removals = _removals(rows, self._spec.layouts[name])
                tables[name] = pa.concat_tables([tables[name], removals]) if name in tables else removals
        return tables

    def _table(self, name: str, changes: list[Changes]) -> pa.Table:
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
    """The changes that remove rows of state."""
    kept = len(layout.keys) + len(layout.subkey)
    ops = pa.array(np.full(rows.num_rows, Op.DELETE, np.int8))
    nothing = [pa.nulls(rows.num_rows, field.type) for field in layout.value]
    return pa.table([rows.column(0), ops, *rows.columns[1:kept], *nothing], schema=layout.changes)


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
