"""What the state variables of a task share: the current key, what is stored for a window of keys, and changes.

A task works through its keys in windows, so that Python objects exist for a bounded number of keys at a time.
Within a window a key is known by its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError

from anabranch.core.schemas import VariableSpec


class Cursor:
    """The key that user code works on: its position in the window."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key = 0


@dataclass(frozen=True)
class Entries:
    """What is stored in one state variable for the keys of a window."""

    #: How many keys the window has.
    keys: int
    #: For each entry the position of its key; ascending.
    owners: npt.NDArray[np.int64]
    #: The columns of the sub-key, then those of the value.
    columns: list[pa.Array]

    def bounds(self) -> list[int]:
        """Where the entries of each key begin; the last number is where the last key's entries end."""
        return np.searchsorted(self.owners, np.arange(self.keys + 1)).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Changes:
    """What changed in one state variable for the keys of a window."""

    #: For each change the position of its key.
    owners: npt.NDArray[np.int64]
    ops: npt.NDArray[np.int8]
    #: The columns of the sub-key, then those of the value.
    columns: list[pa.Array]


class LocalVariable(Protocol):
    """The task's side of a state variable; the user's side is Spark's."""

    @property
    def variable(self) -> VariableSpec: ...

    def begin(self, entries: Entries) -> None:
        """Opens a window of keys."""
        ...

    def end(self) -> Changes | None:
        """Closes the window. Until the next one begins, no key is current and user code is refused."""
        ...


class OutOfTurn:
    """Stands in for the entries of a state variable while no key is current."""

    def __init__(self, variable: str) -> None:
        self._variable = variable

    def _refuse(self, *_: Any) -> NoReturn:
        raise PySparkRuntimeError(
            f"State variable {self._variable}: there is no key to read or write it for. "
            "Use state variables only in handleInputRows, not in init or close."
        )

    __getitem__ = __setitem__ = get = _refuse
