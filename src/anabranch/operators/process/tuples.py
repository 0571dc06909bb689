"""How the tuples of a state variable travel: checked when user code passes them, in columns to and from state."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming import stateful_processor_api_client as spark_client
from pyspark.sql.types import Row

from anabranch.operators.process.values import ValueCodec, value_codec

Tuple = tuple[Any, ...]

# Spark's normalisation of numpy and pandas scalars sees numpy only after this.
spark_client._load_numpy()


class UnstorableError(Exception):
    """A tuple passed every check of its Python types, but does not fit into its column."""

    def __init__(self, position: int, field: str, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.field = field
        self.reason = reason


class TupleCodec:
    """The conversions of the tuples of one state variable: its values, or the keys of its map."""

    def __init__(self, schema: pa.Schema, variable: str, role: str = "value") -> None:
        self.schema = schema
        self.variable = variable
        self.role = role
        struct = from_arrow_schema(schema, prefer_timestamp_ntz=True)
        self.names: list[str] = list(struct.names)
        self.fields: list[ValueCodec] = [value_codec(field.dataType) for field in struct.fields]
        #: A tuple of exactly these types is admitted as it is. None equals no type.
        self.types: tuple[type | None, ...] = tuple(field.exact for field in self.fields)
        self.copy = _over_fields([field.copy for field in self.fields])
        self.freeze = _over_fields([field.freeze for field in self.fields])
        self.thaw = _over_fields([field.thaw for field in self.fields])

    def admit(self, value: Iterable[Any]) -> Tuple:
        """Returns what user code will read after it has written this. Refuses what does not fit the declared fields."""
        try:
            items = tuple(value)
        except TypeError:
            raise PySparkTypeError(
                f"State variable {self.variable}: its {self.role} is a tuple with the fields "
                f"({', '.join(self.names)}), not {value!r}. Pass a tuple with one item for each field."
            ) from None
        if tuple(map(type, items)) == self.types:
            return items
        if len(items) != len(self.names):
            raise PySparkRuntimeError(
                f"State variable {self.variable}: its {self.role} has the fields ({', '.join(self.names)}): "
                f"{len(self.names)} are required while {len(items)} values are provided. "
                "Pass a tuple with one item for each field."
            )
        return tuple([self._admit_item(position, item) for position, item in enumerate(items)])

    def _admit_item(self, position: int, item: Any) -> Any:
        field = self.fields[position]
        if item is None or type(item) is field.exact:
            return item
        try:
            normal = spark_client._normalize_state_value(item)
            return normal if normal is None or type(normal) is field.exact else field.admit(normal)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise PySparkTypeError(
                f"State variable {self.variable}: field {self.names[position]} of its {self.role} is a "
                f"{field.name}: {error}. Pass a value of the declared type, or declare another type."
            ) from None

    def load(self, columns: Sequence[pa.Array], length: int) -> list[Tuple]:
        """Returns the tuples in columns of state, as user code reads them."""
        loaded = []
        for column, field in zip(columns, self.fields, strict=True):
            values = python_values(column)
            if (restore := field.restore) is not None:
                values = [None if value is None else restore(value) for value in values]
            loaded.append(values)
        return tuples_of(loaded, length)

    def dump(self, tuples: Sequence[Tuple | None]) -> list[pa.Array]:
        """Columns of state; a tuple that is None becomes a row of nulls."""
        blank = (None,) * len(self.names)
        columns = list(zip(*[blank if item is None else item for item in tuples], strict=True))
        arrays = []
        for number, field in enumerate(self.fields):
            values: Sequence[Any] = columns[number] if columns else ()
            if (export := field.export) is not None:
                values = [None if value is None else export(value) for value in values]
            arrays.append(self._array(number, values))
        return arrays

    def _array(self, number: int, values: Sequence[Any]) -> pa.Array:
        kind = self.schema.field(number).type
        try:
            return pa.array(values, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            # One of them does not fit: only now is it worth finding out which.
            for position, value in enumerate(values):
                try:
                    pa.array([value], kind)
                except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                    reason = f"{value!r} is not a {self.fields[number].name}: {error}"
                    raise UnstorableError(position, self.names[number], reason) from None
            raise


def state_rows(table: pa.Table) -> list[Tuple]:
    """Returns rows of a table with the types of state. So Spark gives the keys of timers: as Rows, with naive times."""
    columns = [column.combine_chunks() for column in table.columns]
    tuples = TupleCodec(table.schema, "key").load(columns, table.num_rows)
    return list(rows_of(row_class(table.column_names), tuples))


def rows_by_key(table: pa.Table, keys: Sequence[str]) -> dict[Any, Any]:
    """Returns rows of a table by their key: its value, or a tuple of the values of several columns."""
    positions = [table.column_names.index(key) for key in keys]
    rows = state_rows(table)
    if len(positions) == 1:
        return {row[positions[0]]: row for row in rows}
    return {tuple([row[position] for position in positions]): row for row in rows}


def _over_fields(converts: list[Callable[[Any], Any] | None]) -> Callable[[Tuple], Tuple] | None:
    if not any(converts):
        return None

    def convert_all(items: Tuple) -> Tuple:
        return tuple(
            [
                item if convert is None or item is None else convert(item)
                for convert, item in zip(converts, items, strict=True)
            ]
        )

    return convert_all


#: Up to this many seconds from 1970, which is in 2106, a float tells all microseconds apart.
_EXACT_SECONDS = 1 << 32
#: A property that reads one item of a tuple. CPython's own, behind namedtuple, does not go through Python.
_item_property: Callable[[int, str], Any] = getattr(
    collections, "_tuplegetter", lambda index, doc: property(lambda row: tuple.__getitem__(row, index), doc=doc)
)


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Returns the same as ``column.to_pylist()``, but not one Arrow scalar at a time for timestamps."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        try:
            return _datetimes(column, kind.tz)
        except (AttributeError, ValueError, OverflowError):
            # Beyond the years of a datetime: Arrow's own conversion raises the error that says so.
            return list(column.to_pylist())
    return list(column.to_pylist())


def _datetimes(column: pa.Array | pa.ChunkedArray, timezone: str | None) -> list[Any]:
    zone = None if timezone is None else pa.lib.string_to_tzinfo(timezone)
    if zone is not None and not column.null_count:
        microseconds = _numpy(column.cast(pa.timestamp("us", timezone)).cast(pa.int64()))
        if not len(microseconds) or np.abs(microseconds).max() < _EXACT_SECONDS * 1_000_000:
            return list(map(datetime.datetime.fromtimestamp, (microseconds / 1e6).tolist(), repeat(zone)))
    values = _numpy(column).tolist()
    if zone is not None:
        return [None if value is None else zone.fromutc(value.replace(tzinfo=zone)) for value in values]
    if any(type(value) is int for value in values):
        raise ValueError("a year beyond those of a datetime")
    return list(values)


def _numpy(column: pa.Array | pa.ChunkedArray) -> Any:
    return column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)


def tuples_of(columns: Sequence[Sequence[Any]], length: int) -> list[tuple[Any, ...]]:
    """Returns the rows of some columns, which may be none."""
    return list(zip(*columns, strict=True)) if columns else [()] * length


def row_class(names: Sequence[str]) -> type[Row]:
    """Returns a class of Rows with these fields.

    A Row keeps the names of its fields in the instance and finds a field by searching them; user code that reads
    fields by name spends most of its time there. Here the class has the names, and a property for each field.
    """
    members: dict[str, Any] = {
        name: _item_property(index, "")
        for index, name in reversed(list(enumerate(names)))
        if not hasattr(Row, name) and not name.startswith("__")
    }
    return type("Row", (Row,), {**members, "__fields__": list(names), "__module__": Row.__module__})


def rows_of(cls: type[Row], tuples: Iterable[tuple[Any, ...]]) -> list[Row]:
    return list(map(tuple.__new__, repeat(cls), tuples))
