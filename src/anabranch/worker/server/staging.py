"""What task attempts have sent in the epoch that runs, and has not been chosen or discarded yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.errors import EpochError, WorkerError
from anabranch.core.gather import PART_BYTES
from anabranch.core.requests import StageAttempt
from anabranch.core.schemas import OP, Op
from anabranch.wire import messages
from anabranch.worker.state.allocation import give_back_after

#: Changes by state variable.
Tables = dict[str, pa.Table]
#: Stage number and name.
Variable = tuple[int, str]


class Staging:
    """The changes of each attempt, in the pieces in which they came. The caller checks that they are of this run."""

    def __init__(self) -> None:
        self._pieces: dict[StageAttempt, list[Tables]] = {}
        #: Rows that an attempt has dropped because they came too late.
        self._late: dict[StageAttempt, int] = {}

    def begin(self, attempt: StageAttempt, tables: Tables, late: int = 0) -> None:
        """The first piece; it replaces whatever the attempt has sent before."""
        self._pieces[attempt] = [tables]
        self._late[attempt] = late

    def add(self, attempt: StageAttempt, number: int, tables: Tables) -> None:
        """A later piece. One that came before is as good."""
        pieces = self._pieces.get(attempt, [])
        if len(pieces) < number:
            raise EpochError(f"Changes of {attempt} are missing before part {number}. Let the task run again.")
        if len(pieces) == number:
            pieces.append(tables)

    def discard(self, attempt: StageAttempt) -> None:
        self._pieces.pop(attempt, None)
        self._late.pop(attempt, None)

    def clear(self) -> None:
        self._pieces.clear()
        self._late.clear()

    def late(self, attempts: Iterable[StageAttempt]) -> dict[int, int]:
        """The late rows of all these attempts, by stage."""
        late: Counter[int] = Counter()
        for attempt in attempts:
            late[attempt.stage] += self._late.get(attempt, 0)
        return dict(late)

    def combined(self, attempts: Iterable[StageAttempt]) -> dict[Variable, pa.Table]:
        """The changes of all these attempts to each variable."""
        parts: dict[Variable, list[pa.Table]] = {}
        for attempt in attempts:
            for piece in self._pieces.get(attempt, []):
                for variable, table in piece.items():
                    parts.setdefault((attempt.stage, variable), []).append(table)
        tables = [table for of_variable in parts.values() for table in of_variable]
        give_back_after(sum(map(len, tables)), sum(table.nbytes for table in tables))  # what receiving them took
        return {variable: _whole(tables) for variable, tables in parts.items()}


def _whole(parts: list[pa.Table]) -> pa.Table:
    """Small parts in one piece, which is faster to work with; large ones as they are, without another copy."""
    table = pa.concat_tables(parts)
    return table.combine_chunks() if table.nbytes <= PART_BYTES else table


def keys_in(tables: Tables) -> pa.Table:
    """The keys that a read asks for."""
    keys = tables.get(messages.KEYS)
    if keys is None:
        raise WorkerError("A read came without keys. Run the same version of anabranch everywhere.")
    return keys


def counts_of(changes: pa.Table) -> tuple[int, int]:
    """How many changes set an entry, and how many remove something."""
    puts: int = pc.sum(pc.equal(changes.column(OP), Op.PUT)).as_py() or 0
    return puts, len(changes) - puts
