"""The input of a stream under test: files that rows are sent in, each of them one epoch of all inputs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from anabranch.api.stream import Stream, stream
from anabranch.core.errors import UnsupportedError

Schema = StructType | str
#: Rows as tuples or dicts; by the name of their input, if there are several.
Sent = Sequence[Any] | Mapping[str, Sequence[Any]]


class OneInput:
    """The rows of the only input."""

    def __init__(self, spark: SparkSession, folder: Path, schema: Schema) -> None:
        self._spark = spark
        self._folder = folder
        self._schema: StructType = spark.createDataFrame([], schema).schema
        self._sent = 0
        folder.mkdir()

    def send(self, rows: Sent) -> None:
        """Add a file, which Spark takes as one epoch."""
        # Written aside and renamed, so that Spark never sees half a file; names tell the order.
        new = self._folder.parent / f"{uuid.uuid4().hex}.parquet"
        pq.write_table(self._table(rows), new)
        new.rename(self._folder / f"{self._sent:08d}.parquet")
        self._sent += 1

    def passed_to(self, build: Callable[..., Stream]) -> Stream:
        """What a function makes of the input."""
        return build(stream(self._read()))

    def _table(self, rows: Sent) -> pa.Table:
        if isinstance(rows, Mapping):
            raise UnsupportedError("The stream under test has one input without a name. Send a list of rows.")
        return self._spark.createDataFrame(list(rows), self._schema).toArrow()

    def _read(self) -> DataFrame:
        reader = self._spark.readStream.schema(self._schema).option("maxFilesPerTrigger", 1)
        return _plain(reader.parquet(str(self._folder)))


class NamedInputs(OneInput):
    """Several inputs. A file has the rows of all of them, one column for each, so that they come in the same epoch."""

    def __init__(self, spark: SparkSession, folder: Path, schemas: Mapping[str, Schema]) -> None:
        if not schemas:
            raise UnsupportedError("A stream under test needs an input: pass a schema, or schemas by name.")
        fields = [StructField(name, spark.createDataFrame([], schema).schema) for name, schema in schemas.items()]
        super().__init__(spark, folder, StructType(fields))

    def passed_to(self, build: Callable[..., Stream]) -> Stream:
        together = self._read()
        parts = {name: together.where(F.col(f"`{name}`").isNotNull()) for name in self._schema.names}
        return build(**{name: stream(part.select(f"`{name}`.*")) for name, part in parts.items()})

    def _table(self, rows: Sent) -> pa.Table:
        names = self._schema.names
        if not isinstance(rows, Mapping) or not set(rows) <= set(names):
            given = f"rows of {sorted(rows)}" if isinstance(rows, Mapping) else "rows of none in particular"
            raise UnsupportedError(f"The inputs are {names}, and {given} were sent. Send {{{names[0]!r}: [row, …]}}.")
        parts = []
        for field in self._schema.fields:
            kind: Any = field.dataType
            part = self._spark.createDataFrame(list(rows.get(field.name, ())), kind).toArrow().combine_chunks()
            parts.append(pa.table({field.name: part.to_struct_array()}))
        kinds = to_arrow_schema(self._schema, timezone="UTC")
        return pa.concat_tables(parts, promote_options="permissive").select(names).cast(kinds)


def _plain(rows: DataFrame) -> DataFrame:
    """Also if the session has been enabled."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    classic: Any = rows
    return ClassicDataFrame(classic._jdf, rows.sparkSession)
