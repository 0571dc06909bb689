"""What is shorter or smaller in a simulation than in production, so that thousands of histories take minutes.

Waits fit simulated time, drains take small steps, and what costs most is replaced by something that does the same:
files are not looked through for older columns, and state is kept in
dictionaries (``simulated.state``), unless a history wants that of production.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pyarrow as pa

from anabranch.checkpoint import datafiles, paths
from anabranch.control.epochs import maintenance
from anabranch.core.schemas import Layout, StageSpec
from anabranch.wire import frames
from anabranch.worker import compaction
from anabranch.worker.state import job_state as jobstate
from anabranch.worker.stores import Store
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.transfer import drain
from anabranch.worker.transfer import group_ownership as ownership
from simulated.state import DictMerge, DictState

#: About what a row of a message takes.
_ROW_BYTES = 24
#: An attribute of a module or class, and what stands in its place.
Place = tuple[Any, str, Any]


@contextmanager
def replaced(places: Sequence[Place]) -> Iterator[None]:
    """Puts other things in these places, while this lasts."""
    known = [vars(owner)[name] for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(reversed(places), reversed(known), strict=True):
            setattr(owner, name, value)


class SimStores(StoreOptions):
    """Opens no store where state is kept in dictionaries."""

    def open(self, _job: str, _spec: StageSpec, _variable: str, _key_groups: int) -> Store:
        return _DICTIONARIES


_DICTIONARIES: Any = object()


def _to_layout(table: pa.Table, target: pa.Schema, _path: str, **_about: Any) -> pa.Table:
    return pa.table(table.columns, schema=target)


def _open_state(layout: Layout, key_groups: int, store: Any) -> Any:
    return DictState(layout, key_groups) if store is _DICTIONARIES else VARIABLE_STATE(layout, key_groups, store)


def _fields_of(value: Any) -> dict[str, Any]:
    """As asdict, of values whose fields are plain."""
    return dict(vars(value))


VARIABLE_STATE = jobstate.VariableState

_SMALL: tuple[Place, ...] = (
    (drain, "_GROUPS_AT_FIRST", 1),
    (drain, "_GROUPS_MAX", 2),
    (drain, "_RETRY_S", 0.05),
    (drain, "_NO_EPOCH_S", 0.1),
    (drain, "_EPOCH_MAX_S", 1.0),
    (maintenance, "_PAUSE_S", 0.1),
    (paths, "safe_name", cache(paths.safe_name)),
    (ownership, "asdict", _fields_of),
    (datafiles, "to_layout", _to_layout),
)
_DICTIONARY_STATE: tuple[Place, ...] = (
    (jobstate, "VariableState", _open_state),
    (compaction._VariableFiles, "_empty", lambda files: DictMerge(files.layout, files.key_groups)),
)


def shortcuts(*, real_state: bool, drain_rest_s: float, message_rows: int) -> list[Place]:
    sizes: tuple[Place, ...] = (
        (drain, "_REST_MIN_S", drain_rest_s),
        (frames, "MESSAGE_BYTES", _ROW_BYTES * message_rows),
    )
    return [*_SMALL, *sizes, *(() if real_state else _DICTIONARY_STATE)]
