"""From the Rows that a processor yields to Arrow batches, by column, as Spark converts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import Row

from anabranch.core.errors import EpochError
from anabranch.operators.process.program import Program

_ARROW_ERRORS = (pa.ArrowException, OverflowError, TypeError, ValueError)


class MisfitError(EpochError):
    """A row that a processor yielded is none of its output. Whoever knows whose row it is can say so."""

    def __init__(self, stage: str, row: int, problem: str) -> None:
        super().__init__(f"Stage {stage}: the processor yielded {problem}")
        self.row = row
        self._stage, self._problem = stage, problem

    def of_key(self, key: object) -> EpochError:
        return EpochError(f"Stage {self._stage}: for key {key!r}, the processor yielded {self._problem}")


class _UnknownRowError(Exception):
    """What a row is that has not the fields of the output."""


class RowOutput:
    """Converts Rows. Fields are found by name, as Spark does it: missing ones are null, others are left out."""

    def __init__(self, program: Program) -> None:
        self._stage = program.spec.name
        self._schema = program.output_schema
        self._names: list[str] = list(self._schema.names)
        #: By the fields of a Row: where each output field is in it, or None.
        self._places: dict[tuple[str, ...], list[int | None]] = {}

    def batch(self, rows: list[Row]) -> pa.RecordBatch:
        """The rows in columns; MisfitError if one of them is none of the output."""
        columns: Sequence[Sequence[Any]] = list(zip(*self._tuples(rows), strict=True))
        arrays = [self._array(field, column) for field, column in zip(self._schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _tuples(self, rows: list[Row]) -> Sequence[tuple[Any, ...]]:
        """The rows with just the output fields, in their order. In the common case that is how they come."""
        try:
            if [row.__fields__ for row in rows].count(self._names) == len(rows):
                return rows
        except AttributeError:  # a plain tuple, or a Row without names
            pass
        arranged: list[tuple[Any, ...]] = []
        try:
            arranged.extend(map(self._arranged, rows))
        except _UnknownRowError as error:
            raise MisfitError(self._stage, len(arranged), str(error)) from None
        return arranged

    def _arranged(self, row: Any) -> tuple[Any, ...]:
        names = getattr(row, "__fields__", None)
        if not isinstance(row, tuple):
            raise _UnknownRowError(
                f"{row!r}, a {type(row).__name__}. Yield a Row with the fields ({', '.join(self._names)})."
            )
        if names is None:
            if len(row) != len(self._names):
                raise _UnknownRowError(
                    f"{row!r}: {len(row)} items for the {len(self._names)} output fields ({', '.join(self._names)}). "
                    "Yield a Row with these fields."
                )
            return tuple(row)
        places = self._places.get(tuple(names))
        if places is None:
            known = {name: place for place, name in enumerate(names)}
            places = self._places[tuple(names)] = [known.get(name) for name in self._names]
            if all(place is None for place in places):
                raise _UnknownRowError(
                    f"a Row with the fields ({', '.join(names)}) and none of the output fields "
                    f"({', '.join(self._names)}). Yield a Row with these fields."
                )
        items = tuple(row)
        return tuple([None if place is None else items[place] for place in places])

    def _array(self, field: pa.Field, values: Sequence[Any]) -> pa.Array:
        if pa.types.is_nested(field.type):
            values = [_plain(value) for value in values]
        try:
            array = pa.array(values, field.type)
        except _ARROW_ERRORS as error:
            raise self._misfit(field, values, error) from error
        if array.null_count and not field.nullable:
            raise MisfitError(
                self._stage,
                array.is_null().index(True).as_py(),
                f"None for the output field {field.name}, which is not nullable. Yield a value, or declare the field "
                "nullable.",
            )
        return array

    def _misfit(self, field: pa.Field, values: Sequence[Any], error: Exception) -> MisfitError:
        position = 0
        for number, value in enumerate(values):
            position = number
            try:
                pa.array([value], field.type)
            except _ARROW_ERRORS as own_error:
                error = own_error
                break
        return MisfitError(
            self._stage,
            position,
            f"{value!r} for the output field {field.name}, a {field.type}: {error}. Yield a value of this type, or "
            "change the output schema.",
        )


def _plain(value: Any) -> Any:
    """Rows within a value become dicts, so that Arrow finds their fields by name."""
    if isinstance(value, Row):
        return {name: _plain(item) for name, item in value.asDict().items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
