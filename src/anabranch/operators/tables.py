"""The stage of broadcast tables: rows of a stream pass it unchanged, those of tables change its state in the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import HASH, OPERATOR, Op, StageSpec, VariableKind, VariableSpec
from anabranch.engine.spark.expressions import streaming_sources
from anabranch.engine.stages import EpochContext
from anabranch.operators.aggregate.stage import ALL
from anabranch.operators.keys import RESERVED, arrow_schema, check_key_fields, normalised, nullable_field
from anabranch.operators.stage import KeyedStage, StageName
from anabranch.wire.routed import RoutedState, StageAccess

#: Which table a row belongs to, by its number, and whether it removes; the stream's own rows have another number.
TABLE, REMOVES = "_table", "_removes"
OF_STREAM = -1
#: All tables are in the state of one key, and so in one key group. The hash need not be Spark's, which places no rows.
_KEY_HASH = 0
#: A column of a table's rows that says which of them remove.
DELETE = "_delete"
_NUMBER = "_number"


@dataclass(frozen=True)
class TableSpec:
    """A table: its columns, and which of them are the key."""

    name: str
    schema: pa.Schema
    keys: tuple[str, ...]

    @property
    def stored_names(self) -> list[str]:
        """The columns in the order in which the state has them: those of the key come first."""
        return [*self.keys, *(name for name in self.schema.names if name not in self.keys)]


@dataclass(frozen=True)
class TablesStage(KeyedStage):
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

    @property
    def key_hash(self) -> int:
        return _KEY_HASH

    @property
    def table_keys(self) -> Mapping[str, tuple[str, ...]]:
        return {table.name: table.keys for table in self.tables}

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        """Returns the rows: the source of a pipeline with tables is the union of all of them already."""
        del side, carry
        return rows

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        """Returns the rows of the stream. The driver has seen to those of the tables."""
        del access, context
        columns = [F.col(stream_column(i)).alias(f.name, metadata=f.metadata) for i, f in enumerate(self.fields)]
        return rows.filter(F.col(TABLE) == OF_STREAM).select(*columns)

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """Returns the table as it is."""
        (table,) = (table for table in self.tables if table.name == variable)
        return state.drop(HASH, ALL).toDF(*table.stored_names).select(*[f"`{name}`" for name in table.schema.names])

    def rows_of_tables(self, rows: DataFrame) -> DataFrame:
        columns = [table_column(i, j) for i, table in enumerate(self.tables) for j in range(len(table.schema))]
        return rows.filter(F.col(TABLE) != OF_STREAM).select(TABLE, REMOVES, *columns)

    def stored(self, state: RoutedState) -> dict[str, pa.Table]:
        layout = self.spec.layouts[self.tables[0].name]
        found = state.read(pa.table([[_KEY_HASH], [0]], schema=layout.keys))
        tables = {}
        for table in self.tables:
            entries = found[table.name]
            columns = dict(zip(table.stored_names, entries.columns[1:], strict=True))
            columns_in_order = [columns[name] for name in table.schema.names]
            tables[table.name] = pa.table(columns_in_order, schema=table.schema).combine_chunks()
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
        columns = [*map(pa.array, own), *(rows.column(name) for name in table.stored_names)]
        return pa.table(columns, schema=self.spec.layouts[table.name].changes)


def stream_column(i: int) -> str:
    return f"_c{i}"


def table_column(table: int, i: int) -> str:
    return f"_t{table}_{i}"


@dataclass(frozen=True)
class TableSource:
    """Where a table's rows come from: a streaming DataFrame, the names of its key, and which rows remove."""

    rows: DataFrame
    keys: tuple[str, ...]
    deleted: Column | None

    @property
    def fields(self) -> list[StructField]:
        """The columns of the table."""
        return [field for field in self.rows.schema.fields if self.deleted is not None or field.name != DELETE]

    @property
    def removes(self) -> Column:
        if self.deleted is not None:
            return self.deleted
        return F.col(DELETE).cast("boolean") if DELETE in self.rows.columns else F.lit(False)


def check_source(source: TableSource) -> None:
    """Refuses what cannot be a table, when it is declared."""
    fields = {field.name: field for field in source.fields}
    if len(fields) != len(source.fields):
        raise UnsupportedError("broadcast: two columns of the table have one name. Rename one of them.")
    if not source.keys:
        raise UnsupportedError("broadcast needs a key: the names of the columns that tell rows apart.")
    for key in source.keys:
        if key not in fields:
            raise UnsupportedError(f"broadcast: there is no column {key!r} for the key. Columns: {list(fields)}.")
        if isinstance(fields[key].dataType, StructType | ArrayType | MapType):
            raise UnsupportedError(f"broadcast: the key column {key!r} is nested. Use plain columns as the key.")
    check_key_fields([fields[key] for key in source.keys])
    if taken := {*fields} & {*RESERVED, ALL}:
        raise UnsupportedError(f"broadcast: Anabranch uses the name {min(taken)!r} itself. Rename that column.")
    source.rows.select(source.removes)


def build_tables(
    name: StageName, rows: DataFrame, sources: Mapping[str, TableSource]
) -> tuple[TablesStage, DataFrame, DataFrame]:
    """Makes the stage, the streaming DataFrame that feeds it, and an empty one with the columns of the rows."""
    tables = [TableSpec(table, arrow_schema(source.fields), source.keys) for table, source in sources.items()]
    stage = TablesStage(
        spec=StageSpec(
            number=name.number,
            name=name.name,
            key=pa.schema([pa.field(ALL, pa.int8())]),
            variables=tuple(_variable(table) for table in tables),
            traits={OPERATOR: "withBroadcast"},
        ),
        fields=tuple(rows.schema.fields),
        tables=tuple(tables),
        sources=(streaming_sources(rows), sum(streaming_sources(source.rows) for source in sources.values())),
        origins=sources,
    )
    union = _tagged(rows, sources, OF_STREAM)
    for number, source in enumerate(sources.values()):
        union = union.union(_tagged(source.rows, sources, number, stream=rows.schema.fields))
    return stage, union, rows.sparkSession.createDataFrame([], rows.schema)


def _variable(table: TableSpec) -> VariableSpec:
    return VariableSpec(
        table.name,
        VariableKind.MAP,
        value=pa.schema([field for field in table.schema if field.name not in table.keys]),
        map_key=pa.schema([table.schema.field(key) for key in table.keys]),
    )


def _tagged(
    rows: DataFrame, sources: Mapping[str, TableSource], number: int, *, stream: Sequence[StructField] = ()
) -> DataFrame:
    """Returns the rows of the stream, or of one table, in the columns of all."""
    columns = [F.lit(number).cast("byte").alias(TABLE)]
    if number == OF_STREAM:
        fields = rows.schema.fields
        # By position: two columns of the stream may have one name.
        rows = rows.toDF(*[stream_column(i) for i in range(len(fields))])
        columns += [F.lit(False).alias(REMOVES), *[F.col(stream_column(i)) for i in range(len(fields))]]
    else:
        removes = list(sources.values())[number].removes
        columns += [F.coalesce(removes, F.lit(False)).alias(REMOVES)]
        columns += [_nothing(field).alias(stream_column(i)) for i, field in enumerate(stream)]
    for i, source in enumerate(sources.values()):
        for j, field in enumerate(source.fields):
            own = F.col(f"`{field.name}`")
            own = normalised(own, field.dataType) if field.name in source.keys else own
            columns.append((own if i == number else _nothing(field)).alias(table_column(i, j)))
    return rows.select(*columns)


def _nothing(field: StructField) -> Column:
    return F.lit(None).cast(nullable_field(field).dataType)


@dataclass(frozen=True)
class Upsert:
    """A table after some rows have arrived."""

    table: pa.Table
    #: The rows that were added or replaced.
    put: pa.Table
    #: The last rows of keys that are not in the table any more; they may not have been before.
    removed: pa.Table


def upserted(table: pa.Table, rows: pa.Table, removes: pa.Array, keys: Sequence[str]) -> Upsert:
    """Brings a table up to date with rows, of which the last counts for each key. `removes` says which remove."""
    both = pa.concat_tables([table, rows.cast(table.schema)])
    numbered = both.select(list(keys)).append_column(_NUMBER, pa.array(np.arange(len(both))))
    latest = numbered.group_by(list(keys)).aggregate([(_NUMBER, "max")]).column(f"{_NUMBER}_max").to_numpy()
    latest = np.sort(latest)
    known = len(table)
    gone = np.zeros(len(both), np.bool_)
    gone[known:] = removes.to_numpy(zero_copy_only=False)
    new = latest[latest >= known]
    return Upsert(
        table=both.take(pa.array(latest[~gone[latest]])).combine_chunks(),
        put=both.take(pa.array(new[~gone[new]])).combine_chunks(),
        removed=both.take(pa.array(new[gone[new]])).combine_chunks(),
    )
