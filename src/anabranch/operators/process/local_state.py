"""The task's local copy of a stage's state: read once, worked on window by window, its changes sent once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.errors import EpochError
from anabranch.core.schemas import HASH, INDEX, StageSpec
from anabranch.operators.process.handles import LocalHandle
from anabranch.operators.process.tuples import UnstorableError
from anabranch.operators.process.variable import Changes, Entries
from anabranch.operators.state import StageState


class LocalState:
    """Feeds the state variables of a handle with what is stored, and gathers what changed."""

    def __init__(self, spec: StageSpec, keys: pa.Table) -> None:
        self._spec = spec
        self._keys = keys
        self.handle = LocalHandle(spec.name, {variable.name: variable for variable in spec.variables})
        self._answers: dict[str, tuple[npt.NDArray[np.int64], list[pa.Array]]] = {}
        self._changes: dict[str, list[Changes]] = defaultdict(list)
        self._window = 0, 0

    def read(self, state: StageState) -> None:
        """The one read of the task. Nothing is asked for no keys, or for no variables."""
        if not self._keys.num_rows or not self._spec.variables:
            return
        answers = state.read(self._keys)
        for name in self.handle.variables:
            answer = answers[name]
            owners = _array(answer.column(INDEX)).to_numpy(zero_copy_only=False).astype(np.int64)
            self._answers[name] = owners, [_array(column) for column in answer.columns[1:]]

    def begin(self, first: int, end: int) -> None:
        """Makes the keys from first to end current: their positions in the window count from 0."""
        self._window = first, end
        for name, local in self.handle.variables.items():
            owners, columns = self._answers[name]
            start, stop = np.searchsorted(owners, (first, end)).tolist()
            entries = [column.slice(start, stop - start) for column in columns]
            local.begin(Entries(end - first, owners[start:stop] - first, entries))

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
                self._changes[name].append(Changes(changes.owners + first, changes.ops, changes.columns))

    def changes(self) -> Mapping[str, pa.Table]:
        """All changes of the task, in the columns in which they travel; variables without any are left out."""
        return {name: self._table(name, changes) for name, changes in self._changes.items()}

    def _table(self, name: str, changes: list[Changes]) -> pa.Table:
        layout = self._spec.layouts[name]
        keys = self._keys.take(pa.array(np.concatenate([part.owners for part in changes])))
        ops = pa.array(np.concatenate([part.ops for part in changes]))
        columns = [pa.chunked_array(parts) for parts in zip(*[part.columns for part in changes], strict=True)]
        return pa.Table.from_arrays(
            [keys.column(HASH), ops, *keys.columns[1:], *columns], schema=layout.changes
        ).combine_chunks()


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
