"""Runs a processor of rows: Spark's transformWithState."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import pyarrow as pa
from pyspark.sql.types import Row

from anabranch.core.errors import EpochError
from anabranch.operators.grouping import Groups
from anabranch.operators.process.program import ROWS_MAX, Program
from anabranch.operators.process.task import Key, Runner, user_code
from anabranch.operators.process.tuples import python_values, row_class, rows_of, tuples_of


class RowRunner(Runner):
    """Passes rows to user code as Rows."""

    def batches(self, calls: Iterator[Iterable[Any]], keys: Sequence[Key], method: str) -> Iterator[pa.RecordBatch]:
        batch = RowOutput(self.program).batch
        yielded: list[Row] = []
        #: How many rows there were when each key was done, those that have gone out included.
        ends: list[int] = []
        gone = 0
        with user_code(self.program, method, keys):
            try:
                for results in calls:
                    rows = iter(results)
                    yielded.extend(islice(rows, ROWS_MAX))
                    while len(yielded) >= ROWS_MAX:
                        yield batch(yielded[:ROWS_MAX])
                        del yielded[:ROWS_MAX]
                        gone += ROWS_MAX
                        yielded.extend(islice(rows, ROWS_MAX))
                    ends.append(gone + len(yielded))
                if yielded:
                    yield batch(yielded)
            except MisfitError as misfit:
                raise misfit.of_key(keys[bisect_right(ends, gone + misfit.row)]) from misfit

    def inputs(self, groups: Groups, first: int, end: int) -> Iterator[tuple[Key, Iterator[Row]]]:
        given = groups.given_keys.slice(first, end - first)
        keys = tuples_of([python_values(column) for column in given.columns], end - first)
        row = row_class(groups.rows.column_names)
        offsets = groups.offsets[first : end + 1].tolist()
        if offsets[-1] - offsets[0] > ROWS_MAX:
            return iter([(keys[0], _in_pieces(groups.rows, row, offsets[0], offsets[-1]))])
        rows = _rows(groups.rows, row, offsets[0], offsets[-1])
        within = [offset - offsets[0] for offset in offsets]
        slices = map(rows.__getitem__, map(slice, within, islice(within, 1, None)))
        return zip(keys, map(iter, slices), strict=True)


def _rows(table: pa.Table, cls: type[Row], start: int, stop: int) -> list[Row]:
    part = table.slice(start, stop - start)
    columns = [python_values(column) for column in part.columns]
    return rows_of(cls, tuples_of(columns, stop - start))


def _in_pieces(table: pa.Table, cls: type[Row], start: int, stop: int) -> Iterator[Row]:
    """Gives the rows of a large key, converted as user code asks for them."""
    pieces = range(start, stop, ROWS_MAX)
    return chain.from_iterable(_rows(table, cls, piece, min(piece + ROWS_MAX, stop)) for piece in pieces)


_ARROW_ERRORS = (pa.ArrowException, OverflowError, TypeError, ValueError)


class MisfitError(EpochError):
    """Raised for a row, yielded by a processor, that is none of its output; `of_key` says whose row it is."""

    def __init__(self, stage: str, row: int, problem: str) -> None:
        super().__init__(f"Stage {stage}: the processor yielded {problem}")
        self.row = row
        self._stage, self._problem = stage, problem

    def of_key(self, key: object) -> EpochError:
        return EpochError(f"Stage {self._stage}: for key {key!r}, the processor yielded {self._problem}")


class _UnknownRowError(Exception):
    """Raised for a row without the fields of the output: says what it is."""


class RowOutput:
    """Converts Rows. Fields are found by name, as Spark does it: missing ones are null, others are left out."""

    def __init__(self, program: Program) -> None:
        self._stage = program.spec.name
        self._schema = program.output_schema
        self._names: list[str] = list(self._schema.names)
        #: By the fields of a Row: where each output field is in it, or None.
        self._places: dict[tuple[str, ...], list[int | None]] = {}

    def batch(self, rows: list[Row]) -> pa.RecordBatch:
        """Returns the rows in columns; MisfitError if one of them is none of the output."""
        columns: Sequence[Sequence[Any]] = list(zip(*self._tuples(rows), strict=True))
        arrays = [self._array(field, column) for field, column in zip(self._schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _tuples(self, rows: list[Row]) -> Sequence[tuple[Any, ...]]:
        """Returns the rows with just the output fields, in their order. In the common case that is how they come."""
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
    """Makes dicts of Rows within a value, so that Arrow finds their fields by name."""
    if isinstance(value, Row):
        return {name: _plain(item) for name, item in value.asDict().items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
