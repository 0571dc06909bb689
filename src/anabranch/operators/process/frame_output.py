"""From the pandas frames that a processor yields to Arrow batches, by column, as Spark converts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.conversion import PandasToArrowConversion
from pyspark.sql.types import StructField, StructType

from anabranch.core.errors import EpochError
from anabranch.operators.process.program import ROWS_MAX, Program


class FrameOutput:
    """Gathers small frames, and converts many of them at once."""

    def __init__(self, program: Program) -> None:
        self._stage = program.spec.name
        self._settings = program.frames
        self._fields = program.output.fields
        self._schema = program.output_schema
        self._columns: list[list[Any]] = [[] for _ in self._fields]
        self._keys: list[object] = []
        #: The labels of the columns of the frame seen last, and where the output fields are among them.
        self._labels: list[Any] | None = None
        self._places: list[int] = []
        self.rows = 0

    def add(self, frame: object, key: object) -> None:
        if not isinstance(frame, pd.DataFrame):
            raise EpochError(
                f"Stage {self._stage}: the processor yielded a {type(frame).__name__} for key {key!r}. "
                "Yield pandas.DataFrames from a processor for transformWithStateInPandas."
            )
        rows = len(frame)
        if not rows:
            return
        labels = frame.columns.tolist()
        if labels != self._labels:
            self._places = self._find(labels, key)
            self._labels = labels
        get = _columns_of(frame)
        for column, place in zip(self._columns, self._places, strict=True):
            column.append(get(place))
        self._keys.append(key)
        self.rows += rows

    def _find(self, labels: list[Any], key: object) -> list[int]:
        """By name if any column has a name, else by position, as Spark does it."""
        names = [field.name for field in self._fields]
        if self._settings.by_name and any(isinstance(label, str) for label in labels):
            missing = [name for name in names if name not in labels]
            if not missing:
                return [labels.index(name) for name in names]
            problem = f"without the output field {', '.join(missing)}"
        else:
            if len(labels) >= len(names):
                return list(range(len(names)))
            problem = f"of {len(labels)} columns for the {len(names)} output fields ({', '.join(names)})"
        raise EpochError(
            f"Stage {self._stage}: the processor yielded a DataFrame {problem}, for key {key!r}; its columns are "
            f"{labels}. Yield a DataFrame with the columns of the output schema."
        )

    def flush(self) -> Iterator[pa.RecordBatch]:
        """What was gathered, in batches of bounded size."""
        if not self.rows:
            return
        arrays = [
            self._array(field, target, column)
            for field, target, column in zip(self._fields, self._schema, self._columns, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._columns = [[] for _ in self._fields]
        self._keys = []
        self.rows = 0
        for start in range(0, batch.num_rows, ROWS_MAX):
            yield batch.slice(start, ROWS_MAX)

    def _array(self, field: StructField, target: pa.Field, pieces: list[Any]) -> pa.Array:
        dtypes = [piece.dtype for piece in pieces]
        if dtypes.count(dtypes[0]) == len(dtypes):
            array = self._convert(field, pieces, range(len(pieces)))
        else:
            by_dtype: dict[Any, list[int]] = defaultdict(list)
            for number, dtype in enumerate(dtypes):
                by_dtype[dtype].append(number)
            # One type must not change another's values on the way (an int64 among floats), so each is
            # converted by itself, and then the rows are put back in order.
            parts = [self._convert(field, pieces, numbers) for numbers in by_dtype.values()]
            lengths = np.array([len(piece) for piece in pieces])
            starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
            origin = np.concatenate(
                [np.arange(starts[n], starts[n] + lengths[n]) for numbers in by_dtype.values() for n in numbers]
            )
            array = pa.concat_arrays(parts).take(np.argsort(origin))
        if array.null_count and not target.nullable:
            first = array.is_null().index(True).as_py()
            number = int(np.searchsorted(np.cumsum([len(piece) for piece in pieces]), first, side="right"))
            raise EpochError(
                f"Stage {self._stage}: for key {self._keys[number]!r}, the processor yielded nulls for the output "
                f"field {field.name}, which is not nullable. Yield values, or declare the field nullable."
            )
        return array.cast(target.type)

    def _convert(self, field: StructField, pieces: list[Any], numbers: Sequence[int]) -> pa.Array:
        chosen = [pieces[number] for number in numbers]
        try:
            return self._convert_one(field, _concatenated(chosen))
        except (PySparkException, pa.ArrowException, TypeError, ValueError) as error:
            # Piece by piece: some may convert by themselves but not together, and the culprit has a key.
            converted = []
            for number in numbers:
                try:
                    converted.append(self._convert_one(field, pieces[number]))
                except (PySparkException, pa.ArrowException, TypeError, ValueError) as own_error:
                    raise EpochError(
                        f"Stage {self._stage}: the output field {field.name}, a "
                        f"{field.dataType.simpleString()}, cannot take what the processor yielded for key "
                        f"{self._keys[number]!r}: {own_error} Yield values of this type, or change the output "
                        "schema."
                    ) from error
            return pa.concat_arrays(converted)

    def _convert_one(self, field: StructField, values: Any) -> pa.Array:
        batch = PandasToArrowConversion.convert(
            [pd.Series(values, dtype=values.dtype)],
            StructType([field]),
            timezone=self._settings.timezone,
            safecheck=self._settings.safely,
            arrow_cast=True,
            assign_cols_by_name=self._settings.by_name,
            int_to_decimal_coercion_enabled=self._settings.int_to_decimal,
        )
        column = batch.column(0)
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _columns_of(frame: pd.DataFrame) -> Callable[[int], Any]:
    """A function that gives the values of a column, by its position, without making a Series of them."""
    manager: Any = frame._mgr
    blocks = manager.blocks
    if len(blocks) == 1:
        # The common case, in which pandas need not work out which block holds which column.
        values, places = blocks[0].values, blocks[0].mgr_locs
        if type(values) is np.ndarray and places.is_slice_like and places.as_slice == slice(0, len(values), 1):
            return values.__getitem__
    return manager.iget_values  # type: ignore[no-any-return]


def _concatenated(pieces: list[Any]) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)
    return type(pieces[0])._concat_same_type(pieces)
