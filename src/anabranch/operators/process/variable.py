"""What the state variables of a task share: the current key, what is stored for a window of keys, and changes.

A task works through its keys in windows, so that Python objects exist for a bounded number of keys at a time.
Within a window a key is known by its position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import StructType

from anabranch.core.schemas import MEANING, VariableKind, VariableSpec

#: The last field of a state variable whose entries live for a time: when they expire, in milliseconds since 1970.
EXPIRY = "_expiry_ms"


@dataclass(frozen=True)
class StateRequest:
    """What init asks for under a name, as it says it: in a task, nothing can parse the text of a schema."""

    kind: VariableKind
    #: The schema of the value; of a map, that of its key before it.
    schemas: tuple[str | StructType, ...]
    ttl_ms: int | None = None

    def same_as(self, other: StateRequest) -> bool:
        mine, others = ([_without_spaces(schema) for schema in each.schemas] for each in (self, other))
        return (self.kind, self.ttl_ms) == (other.kind, other.ttl_ms) and mine == others

    def __str__(self) -> str:
        texts = [schema if isinstance(schema, str) else schema.simpleString() for schema in self.schemas]
        lives = "" if self.ttl_ms is None else f" that lives for {self.ttl_ms} ms"
        return f"a {self.kind} of {' to '.join(texts)}{lives}"


def _without_spaces(schema: str | StructType) -> str | StructType:
    return " ".join(schema.split()) if isinstance(schema, str) else schema


def has_expiry(variable: VariableSpec) -> bool:
    return bool(variable.value.names) and variable.value.names[-1] == EXPIRY


def with_expiry(variable: VariableSpec) -> VariableSpec:
    """Returns the variable with a time at which each of its entries expires."""
    # With a meaning, so that it is not among the fields that may be gone: a time to live cannot be taken away.
    expiry = pa.field(EXPIRY, pa.int64(), metadata={MEANING: b"time of expiry"})
    return replace(variable, value=variable.value.append(expiry))


def without_expiry(variable: VariableSpec) -> VariableSpec:
    """Returns the variable as user code sees it."""
    return replace(variable, value=pa.schema(list(variable.value)[:-1])) if has_expiry(variable) else variable


class Cursor:
    """The key that user code works on: its position in the window."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key = 0


@dataclass(frozen=True)
class WindowEntries:
    """What is stored in one state variable for the keys of a window."""

    #: How many keys the window has.
    keys: int
    #: For each entry the position of its key; ascending.
    owners: npt.NDArray[np.int64]
    #: The columns of the sub-key, then those of the value.
    columns: list[pa.Array]
    #: For each entry whether its time to live is over: user code does not see it. None if that is so for none.
    expired: npt.NDArray[np.bool_] | None = None

    def bounds(self) -> list[int]:
        """Returns where the entries of each key begin; the last number is where the last key's entries end."""
        return np.searchsorted(self.owners, np.arange(self.keys + 1)).tolist()  # type: ignore[no-any-return]


#: What a state variable has while no window is open.
NO_ENTRIES = WindowEntries(0, np.empty(0, np.int64), [])


@dataclass(frozen=True)
class WindowChanges:
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

    def begin(self, entries: WindowEntries) -> None:
        """Opens a window of keys."""
        ...

    def end(self) -> WindowChanges | None:
        """Closes the window. Until the next one begins, no key is current and user code is refused."""
        ...


class OutOfTurn:
    """Stands in for the entries of a state variable while no key is current."""

    def __init__(self, variable: str, *, timers: bool = False) -> None:
        self._what = ("Timers", "them", "timers") if timers else (f"State variable {variable}", "it", "state variables")

    def _refuse(self, *_: Any) -> NoReturn:
        subject, them, plural = self._what
        raise PySparkRuntimeError(
            f"{subject}: there is no key to read or write {them} for. "
            f"Use {plural} only in handleInputRows, handleExpiredTimer and handleInitialState, not in init or close."
        )

    __getitem__ = __setitem__ = get = _refuse
