"""Changes that are not in the state yet, as tasks have sent them, or in the state and not durable yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.answers import DroppedRows, VariableChanges
from anabranch.core.errors import WorkerError
from anabranch.core.gather import PART_BYTES
from anabranch.core.ids import Epoch, Run, RunId, StageAttempt, StageNumber
from anabranch.core.requests import Write
from anabranch.core.schemas import OP, Op
from anabranch.wire.frames import Tables
from anabranch.wire.messages import KEYS
from anabranch.worker.state.allocation import give_back_after
from anabranch.worker.transfer.group_ownership import Variable

#: An epoch, the run that it came from, and its changes to each variable.
Deferred = tuple[Epoch, RunId, dict[Variable, pa.Table]]


class Staging:
    """The changes of each attempt, in the pieces in which they came. The caller checks that they are of this run."""

    def __init__(self) -> None:
        self._pieces: dict[StageAttempt, list[Tables]] = {}
        #: Rows that an attempt has dropped because they came too late.
        self._late: dict[StageAttempt, int] = {}

    def add(self, request: Write, tables: Tables) -> None:
        """Takes in the next piece. The first one replaces whatever the attempt has sent before."""
        if request.chunk == 0:
            self._pieces[request.staged] = []
            self._late[request.staged] = request.late
        self._pieces[request.staged].append(tables)

    def discard(self, attempt: StageAttempt) -> None:
        self._pieces.pop(attempt, None)
        self._late.pop(attempt, None)

    def clear(self) -> None:
        self._pieces.clear()
        self._late.clear()

    def late(self, attempts: Iterable[StageAttempt]) -> tuple[DroppedRows, ...]:
        """The late rows of all these attempts, by stage."""
        late: Counter[StageNumber] = Counter()
        for attempt in attempts:
            late[attempt.stage] += self._late.get(attempt, 0)
        return tuple(DroppedRows(stage=stage, rows=rows) for stage, rows in sorted(late.items()))

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


class DeferredChanges:
    """The epochs that are part of the state and not durable, oldest first: kept until the driver says that they are."""

    def __init__(self) -> None:
        self._epochs: list[Deferred] = []

    def add(self, epoch: Epoch, run: RunId, changes: dict[Variable, pa.Table]) -> None:
        self._epochs.append((epoch, run, changes))

    def clear(self) -> None:
        self._epochs = []

    def forget_up_to(self, durable: int) -> None:
        """Lets go of epochs whose changes are in files which manifests name."""
        self._epochs = [deferred for deferred in self._epochs if deferred[0] > durable]

    def forget_after(self, epoch: int) -> None:
        """Lets go of epochs that were rolled back."""
        self._epochs = [deferred for deferred in self._epochs if deferred[0] <= epoch]

    def take_out(self, wanted: Collection[tuple[Epoch, Run]], worker: str) -> list[Deferred]:
        """Gives these epochs, each named with its run; an error if one never became part of the state here.

        They stay: the driver may fail to write the manifests, and ask again.
        """
        here = {(epoch, run.run): (epoch, run, changes) for epoch, run, changes in self._epochs}
        for epoch, run in wanted:
            if (epoch, run) not in here:
                raise WorkerError(
                    f"Worker {worker} has no changes of run {run} of epoch {epoch}, which it is to make durable. "
                    "Return to the newest durable epoch."
                )
        return [here[epoch, run] for epoch, run in wanted]


def _whole(parts: list[pa.Table]) -> pa.Table:
    """Small parts in one piece, which is faster to work with; large ones as they are, without another copy."""
    table = pa.concat_tables(parts)
    return table.combine_chunks() if table.nbytes <= PART_BYTES else table


def keys_in(tables: Tables) -> pa.Table:
    """The keys that a read asks for."""
    keys = tables.get(KEYS)
    if keys is None:
        raise WorkerError("A read came without keys. Run the same version of anabranch everywhere.")
    return keys


def changes_in(variable: Variable, changes: pa.Table) -> VariableChanges:
    """How many changes set an entry, and how many remove something."""
    puts: int = pc.sum(pc.equal(changes.column(OP), Op.PUT)).as_py() or 0
    stage, name = variable
    return VariableChanges(stage=StageNumber(stage), variable=name, put=puts, removed=len(changes) - puts)
