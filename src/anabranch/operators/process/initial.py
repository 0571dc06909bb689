"""The initial state of a process stage: rows of a batch DataFrame, which travel with those of the first epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql.classic.column import Column as ClassicColumn
from pyspark.sql.types import StructField

from anabranch.core.errors import UnsupportedError
from anabranch.operators.keys import key_name, normalised, nullable_field

_ROW, _INITIAL = "_row", "_initial"


@dataclass(frozen=True)
class InitialState:
    """What handleInitialState is given, before the first rows."""

    rows: DataFrame
    #: Expressions of the key columns; bound to the rows.
    key_columns: tuple[Column, ...]

    def united_with(self, rows: DataFrame, key_fields: Sequence[StructField]) -> DataFrame:
        """Key columns, and in one of two structs a row of the input or of the initial state."""
        keys = [key_name(i) for i in range(len(key_fields))]
        initial_keys = [
            normalised(column, field).cast(field.dataType).alias(key)
            for column, field, key in zip(self.key_columns, key_fields, keys, strict=True)
        ]
        values = rows.columns[len(keys) :]
        # By position: names may occur twice, which the fields of a struct must not.
        numbered = rows.toDF(*keys, *_numbered(len(values)))
        row = F.struct(*[F.col(name) for name in _numbered(len(values))]).alias(_ROW)
        ours = numbered.select(*keys, row)
        width = len(self.rows.columns)
        named = self.rows.select(*initial_keys, "*").toDF(*keys, *_numbered(width))
        theirs = named.select(*keys, F.struct(*[F.col(name) for name in _numbered(width)]).alias(_INITIAL))
        nothing = [F.lit(None).cast(frame.schema[-1].dataType) for frame in (ours, theirs)]
        return ours.select(*keys, _ROW, nothing[1].alias(_INITIAL)).union(
            theirs.select(*keys, nothing[0].alias(_ROW), _INITIAL)
        )


def initial_state(given: Any, key_fields: Sequence[StructField], method: str) -> InitialState:
    """From what the user passes: a batch DataFrame, grouped by the same key."""
    if not isinstance(given, GroupedData):
        raise UnsupportedError(
            f"{method}: initialState is a {type(given).__name__}. Pass a grouped batch DataFrame: df.groupBy(key)."
        )
    rows: DataFrame = given._df
    if rows.isStreaming:
        raise UnsupportedError(f"{method}: initialState is a streaming DataFrame. Pass one that is not.")
    grouping: Any = given._jgd.groupingExprs()
    jvm: Any = rows.sparkSession._jvm
    columns: tuple[Column, ...] = tuple(
        ClassicColumn(jvm.org.apache.spark.sql.classic.ExpressionUtils.column(grouping.apply(i)))
        for i in range(grouping.size())
    )
    found = [nullable_field(field).dataType for field in rows.select(*columns).schema.fields]
    wanted = [nullable_field(field).dataType for field in key_fields]
    if found != wanted:
        texts = [", ".join(kind.simpleString() for kind in kinds) for kinds in (found, wanted)]
        raise UnsupportedError(
            f"{method}: initialState is grouped by ({texts[0]}), and the stream by ({texts[1]}). "
            "Group both by keys of the same types, in the same order."
        )
    return InitialState(rows, columns)


@dataclass(frozen=True)
class UnitedRows:
    """How a task tells rows of the input from those of the initial state. Travels to the task."""

    keys: int
    names: tuple[str, ...]
    initial_names: tuple[str, ...]

    def split(self, batches: Sequence[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
        """Batches of input and of initial state, with HASH and the key in front."""
        rows, initial = [], []
        for batch in batches:
            is_initial = batch.column(self.keys + 2).is_valid()
            rows.append(self._unpacked(batch.filter(pc.invert(is_initial)), self.keys + 1, self.names))
            initial.append(self._unpacked(batch.filter(is_initial), self.keys + 2, self.initial_names))
        return [part for part in rows if part.num_rows], [part for part in initial if part.num_rows]

    def _unpacked(self, batch: pa.RecordBatch, position: int, names: Sequence[str]) -> pa.RecordBatch:
        front = list(range(self.keys + 1))
        columns = [*(batch.column(i) for i in front), *batch.column(position).flatten()]
        return pa.RecordBatch.from_arrays(columns, names=[*(batch.schema.names[i] for i in front), *names])


def _numbered(count: int) -> list[str]:
    return [f"_column{number}" for number in range(count)]
