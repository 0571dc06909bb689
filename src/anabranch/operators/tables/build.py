"""Building the stage of broadcast tables, and the one stream that carries the rows of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import OPERATOR, StageSpec, VariableKind, VariableSpec
from anabranch.operators.aggregate.stage import ALL
from anabranch.operators.keys import (
    RESERVED,
    StageName,
    arrow_schema,
    check_key_fields,
    normalised,
    nullable_field,
)
from anabranch.operators.tables.stage import (
    OF_STREAM,
    REMOVES,
    TABLE,
    TableSpec,
    TablesStage,
    stream_column,
    table_column,
)

#: A column of a table's rows that says which of them remove.
DELETE = "_delete"


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
    """Refuse what cannot be a table, when it is declared."""
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
    """The stage, the streaming DataFrame that feeds it, and an empty one with the columns of the rows."""
    tables = [_table(table, source) for table, source in sources.items()]
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
        sources=(_streams(rows), sum(_streams(source.rows) for source in sources.values())),
        origins=sources,
    )
    union = _tagged(rows, sources, OF_STREAM)
    for number, source in enumerate(sources.values()):
        union = union.union(_tagged(source.rows, sources, number, stream=rows.schema.fields))
    return stage, union, rows.sparkSession.createDataFrame([], rows.schema)


def _table(name: str, source: TableSource) -> TableSpec:
    return TableSpec(name, arrow_schema(source.fields), source.keys)


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
    """The rows of the stream, or of one table, in the columns of all."""
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
            own = normalised(F.col(f"`{field.name}`"), field) if field.name in source.keys else F.col(f"`{field.name}`")
            columns.append((own if i == number else _nothing(field)).alias(table_column(i, j)))
    return rows.select(*columns)


def _nothing(field: StructField) -> Column:
    return F.lit(None).cast(nullable_field(field).dataType)


def _streams(rows: DataFrame) -> int:
    """How many streaming sources there are in the plan."""
    leaves: Any = rows._jdf.queryExecution().analyzed().collectLeaves()
    return sum(bool(leaves.apply(i).isStreaming()) for i in range(leaves.size()))
