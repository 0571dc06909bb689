"""From Arrow columns to the Python objects that user code sees, many at a time."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import Row

#: Up to so many seconds from 1970, which is in 2106, a float tells all microseconds apart.
_EXACT_SECONDS = 1 << 32
#: A property that reads one item of a tuple. CPython's own, behind namedtuple, does not go through Python.
_item_property: Callable[[int, str], Any] = getattr(
    collections, "_tuplegetter", lambda index, doc: property(lambda row: tuple.__getitem__(row, index), doc=doc)
)


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The same as ``column.to_pylist()``, but not one Arrow scalar at a time for timestamps."""
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
    """The rows of some columns, which may be none."""
    return list(zip(*columns, strict=True)) if columns else [()] * length


def row_class(names: Sequence[str]) -> type[Row]:
    """A class of Rows with these fields.

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
