"""Broadcast tables in the driver: brought up to date at the beginning of an epoch, and given to all of its tasks.

The driver does for their stage what tasks do for others: it reads the state, and writes what changes. So the tables are
part of the epoch's transaction, and a repeated epoch begins with the tables of the epoch before.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from anabranch.core.errors import EpochError
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import StageSpec
from anabranch.engine.spark.java import JvmCallError
from anabranch.engine.spark.query import SparkStream
from anabranch.engine.tasks import TaskEpoch
from anabranch.wire.routed import RoutedState, StageAccess

#: Versions of tables that a task's process keeps in the form in which user code reads them.
_KEPT_VERSIONS = 8

ArrowTables = Mapping[str, pa.Table]
#: Rows by their key, as user code reads them.
Rows = Mapping[Any, Any]


class TableRows(Protocol):
    """A table as processors read it."""

    def rows(self, make: Callable[[pa.Table, Sequence[str]], dict[Any, Any]]) -> Rows: ...


@dataclass(frozen=True)
class SharedTable:
    """A version of a table on its way to tasks."""

    token: str
    keys: tuple[str, ...]
    #: Spark's broadcast variable with the table as an Arrow stream.
    content: Any

    def table(self) -> pa.Table:
        return _kept(self.token, "table", lambda: pa.ipc.open_stream(self.content.value).read_all())

    def rows(self, make: Callable[[pa.Table, Sequence[str]], dict[Any, Any]]) -> Rows:
        """Returns the rows by their key, read-only."""
        rows: Rows = _kept(self.token, "rows", lambda: MappingProxyType(make(self.table(), self.keys)))
        return rows


_versions: OrderedDict[tuple[str, str], Any] = OrderedDict()


def _kept(token: str, form: str, make: Callable[[], Any]) -> Any:
    """Returns a form of a table, which is made once in each process, not in each task."""
    found = _versions.get((token, form))
    if found is None:
        found = _versions[token, form] = make()
        while len(_versions) > 2 * _KEPT_VERSIONS:
            _versions.popitem(last=False)
    return found


@dataclass(frozen=True, eq=False)
class EpochTables:
    """All tables as of an epoch; the same object as long as none of them changes."""

    tables: ArrowTables
    keys: Mapping[str, tuple[str, ...]]
    _shared: dict[str, SharedTable] = field(default_factory=dict)
    _frames: dict[str, DataFrame] = field(default_factory=dict)

    def shared(self, spark: SparkSession, name: str) -> SharedTable:
        """Returns a table for processors: it is sent to each executor once, whatever the number of tasks."""
        if name not in self._shared:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self.tables[name].schema) as stream:
                stream.write_table(self.tables[name])
            content = spark.sparkContext.broadcast(sink.getvalue().to_pybytes())
            self._shared[name] = SharedTable(uuid.uuid4().hex, self.keys[name], content)
        return self._shared[name]

    def frame(self, spark: SparkSession, name: str) -> DataFrame:
        """Returns a table for joins."""
        if name not in self._frames:
            self._frames[name] = spark.createDataFrame(self.tables[name])
        return self._frames[name]

    def release(self) -> None:
        """Removes this version from the executors and the driver's files; it is sent again if it is needed again."""
        while self._shared:
            _, table = self._shared.popitem()
            with suppress(FileNotFoundError):  # Spark's JVM may have been faster to delete it
                table.content.destroy(blocking=False)
        self._frames.clear()


@runtime_checkable
class TableStage(Protocol):
    """The stage that holds the tables of a query."""

    @property
    def spec(self) -> StageSpec: ...

    @property
    def table_keys(self) -> Mapping[str, tuple[str, ...]]:
        """The tables by name, with the columns of their keys."""

    @property
    def sources(self) -> tuple[int, int]:
        """How many streaming sources come before those of the tables, and how many the tables have."""

    def rows_of_tables(self, rows: DataFrame) -> DataFrame:
        """Those among an epoch's rows that change tables."""

    def stored(self, state: RoutedState) -> dict[str, pa.Table]:
        """The tables in the state."""

    def update(self, before: ArrowTables, arrived: pa.Table) -> tuple[ArrowTables, Mapping[str, pa.Table]]:
        """The tables after these rows have arrived, and what that changes in the state."""

    @property
    def key_hash(self) -> int:
        """The hash of the key that all tables are under."""


class TableKeeper:
    """Brings the tables up to date in every epoch."""

    def __init__(self, stage: TableStage, *, bytes_max: int) -> None:
        self._stage = stage
        self._bytes_max = bytes_max
        #: The newest epoch that is committed, as far as it is known, and the tables as of it.
        self._committed: tuple[int, EpochTables] | None = None
        self._current: EpochTables | None = None

    @property
    def current(self) -> EpochTables | None:
        return self._current

    def may_change(self, stream: SparkStream) -> bool:
        """Tells whether the epoch that runs brings rows for any table: only then they are looked for in its input."""
        before, own = self._stage.sources
        return stream.has_rows_of(before, own)

    def begin(
        self, rows: DataFrame, accesses: Mapping[int, StageAccess], epoch: TaskEpoch, *, may_change: bool
    ) -> None:
        """Applies the rows that an epoch brings for tables, before anything else runs in it."""
        access = accesses[self._stage.spec.number]
        arrived = self._stage.rows_of_tables(rows).toArrow() if may_change else None
        (group,) = key_groups_of(np.array([self._stage.key_hash]), access.key_groups)
        for partition in range(access.parallelism):
            state = access.open(epoch=epoch.epoch, run=epoch.run, partition=partition, attempt=0)
            changes: Mapping[str, pa.Table] = {}
            if partition == access.partitions[group]:
                before = self._before(state, epoch.epoch)
                self._use(before)
                if arrived is not None and len(arrived):
                    tables, changes = self._stage.update(before.tables, arrived)
                    self._check_size(tables)
                    self._use(EpochTables(tables, self._stage.table_keys))
            state.write(changes)

    def committed(self, epoch: int) -> None:
        """Notes that an epoch is part of the state, and so are its tables."""
        assert self._current is not None
        if self._committed is not None and self._committed[1] is not self._current:
            self._committed[1].release()
        self._committed = epoch, self._current

    def close(self) -> None:
        """Removes all versions: no more epochs run."""
        versions = [self._current, self._committed[1] if self._committed is not None else None]
        self._current = self._committed = None
        with suppress(JvmCallError, OSError):  # Spark may have been stopped: then nothing is left of them
            for tables in filter(None, versions):
                tables.release()

    def _use(self, tables: EpochTables) -> None:
        """Takes these tables for the epoch. Those of a run that has failed are removed."""
        last, self._current = self._current, tables
        if last is not None and last is not tables and (self._committed is None or last is not self._committed[1]):
            last.release()

    def _before(self, state: RoutedState, epoch: int) -> EpochTables:
        if self._committed is not None and self._committed[0] == epoch - 1:
            return self._committed[1]
        return EpochTables(self._stage.stored(state), self._stage.table_keys)

    def _check_size(self, tables: ArrowTables) -> None:
        for name, table in tables.items():
            if table.nbytes > self._bytes_max:
                raise EpochError(
                    f"The broadcast table {name!r} would have {len(table)} rows of {table.nbytes} bytes, more than "
                    f"anabranch.broadcastBytes, {self._bytes_max}: every executor holds all of it. Remove rows with "
                    "deleted=, join the two streams instead, or raise the setting; then start the query again."
                )
