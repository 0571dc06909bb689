"""The stage of broadcast tables: rows of a stream pass it unchanged, those of tables change its state in the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from anabranch.core.ids import StageNumber
from anabranch.core.schemas import HASH, Op, StageSpec
from anabranch.engine.late import LateKind
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.operators.aggregate.stage import ALL
from anabranch.operators.tables.changes import upserted
from anabranch.wire.routed import RoutedState, StageAccess

#: Which table a row belongs to, by its number, and whether it removes; the stream's own rows have another number.
TABLE, REMOVES = "_table", "_removes"
OF_STREAM = -1
#: All tables are in the state of one key, and so in one key group. The hash need not be Spark's, which places no rows.
_KEY_HASH = 0


@dataclass(frozen=True)
class TableSpec:
    """A table: its columns, and which of them are the key."""

    name: str
    schema: pa.Schema
    keys: tuple[str, ...]


@dataclass(frozen=True)
class TablesStage:
    """stream.withBroadcast(name=table, …)."""

    spec: StageSpec
    #: The columns of the stream.
    fields: tuple[StructField, ...]
    tables: tuple[TableSpec, ...]
    #: How many streaming sources the stream has, and how many its tables, which come after them.
    sources: tuple[int, int]
    #: What the tables are made of, by their names.
    origins: Mapping[str, object]

    #: The driver is the only one that works on it.
    parallelism: int | None = 1

    output_delay_ms: ClassVar[int] = 0

    @property
    def clock(self) -> StageClock:
        return StageClock.NONE

    @property
    def key_hash(self) -> int:
        return _KEY_HASH

    @property
    def table_keys(self) -> Mapping[str, tuple[str, ...]]:
        return {table.name: table.keys for table in self.tables}

    def numbered(self, number: StageNumber, name: str) -> Self:
        return replace(self, spec=self.spec.numbered(number, name))

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        """The source of a pipeline with tables is the union of all of them already."""
        del side, carry
        return rows

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        del arriving, complete
        return ()

    def variant(self, context: EpochContext) -> str:
        del context
        return "tables"

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        """The rows of the stream. The driver has seen to those of the tables."""
        del access, context
        columns = [F.col(stream_column(i)).alias(f.name, metadata=f.metadata) for i, f in enumerate(self.fields)]
        return rows.filter(F.col(TABLE) == OF_STREAM).select(*columns)

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """The table as it is."""
        (table,) = (table for table in self.tables if table.name == variable)
        names = [*table.keys, *(name for name in table.schema.names if name not in table.keys)]
        return state.drop(HASH, ALL).toDF(*names).select(*[f"`{name}`" for name in table.schema.names])

    def rows_of_tables(self, rows: DataFrame) -> DataFrame:
        columns = [
            table_column(i, j) for i, table in enumerate(self.tables) for j in range(len(table.schema))
        ]  # fmt: skip
        return rows.filter(F.col(TABLE) != OF_STREAM).select(TABLE, REMOVES, *columns)

    def stored(self, state: RoutedState) -> dict[str, pa.Table]:
        layout = self.spec.layouts[self.tables[0].name]
        found = state.read(pa.table([[_KEY_HASH], [0]], schema=layout.keys))
        tables = {}
        for table in self.tables:
            names = [*table.keys, *(name for name in table.schema.names if name not in table.keys)]
            entries = found[table.name]
            columns = dict(zip(names, entries.columns[1:], strict=True))
            tables[table.name] = pa.table(
                [columns[name] for name in table.schema.names], schema=table.schema
            ).combine_chunks()  # fmt: skip
        return tables

    def update(
        self, before: Mapping[str, pa.Table], arrived: pa.Table
    ) -> tuple[dict[str, pa.Table], dict[str, pa.Table]]:
        after, changes = dict(before), {}
        for number, table in enumerate(self.tables):
            mine = arrived.filter(pc.equal(arrived.column(TABLE), number))
            if not len(mine):
                continue
            columns = [mine.column(table_column(number, j)) for j in range(len(table.schema))]
            rows = pa.Table.from_arrays(
                [column.cast(field.type) for column, field in zip(columns, table.schema, strict=True)],
                schema=table.schema,
            )
            removes = pc.fill_null(mine.column(REMOVES), False).combine_chunks()
            upsert = upserted(before[table.name], rows, removes, table.keys)
            after[table.name] = upsert.table
            changes[table.name] = pa.concat_tables(
                [self._changes(table, upsert.put, Op.PUT), self._changes(table, upsert.removed, Op.DELETE)]
            )
        return after, changes

    def _changes(self, table: TableSpec, rows: pa.Table, op: int) -> pa.Table:
        count = len(rows)
        own = [np.full(count, _KEY_HASH, np.int64), np.full(count, op, np.int8), np.zeros(count, np.int8)]
        names = [*table.keys, *(name for name in table.schema.names if name not in table.keys)]
        columns = [*map(pa.array, own), *(rows.column(name) for name in names)]
        return pa.table(columns, schema=self.spec.layouts[table.name].changes)


def stream_column(i: int) -> str:
    return f"_c{i}"


def table_column(table: int, i: int) -> str:
    return f"_t{table}_{i}"
