"""Runs a processor of pandas frames: Spark's transformWithStateInPandas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.conversion import ArrowBatchTransformer, PandasToArrowConversion
from pyspark.sql.types import StructField, StructType

from anabranch.core.errors import EpochError
from anabranch.operators.grouping import Groups
from anabranch.operators.process.program import ROWS_MAX, FrameSettings, Program
from anabranch.operators.process.task import Key, Runner, user_code
from anabranch.operators.process.tuples import python_values, tuples_of


class FrameRunner(Runner):
    """Passes rows to user code as pandas frames."""

    def batches(self, calls: Iterator[Iterable[Any]], keys: Sequence[Key], method: str) -> Iterator[pa.RecordBatch]:
        output = FrameOutput(self.program)
        with user_code(self.program, method, keys):
            for results in calls:
                for frame in results:
                    output.add(frame, keys[-1])
                    if output.rows >= ROWS_MAX:
                        yield from output.flush()
        yield from output.flush()

    def inputs(self, groups: Groups, first: int, end: int) -> Iterator[tuple[Key, Iterator[pd.DataFrame]]]:
        settings = self.program.frames
        keys = self.row_keys(groups.given_keys.slice(first, end - first))
        offsets = groups.offsets[first : end + 1].tolist()
        rows_max = settings.rows_in_frame(groups.rows)
        base, rows = offsets[0], offsets[-1] - offsets[0]
        if rows > ROWS_MAX:
            return iter([(keys[0], _in_pieces(groups.rows, base, offsets[-1], rows_max, settings))])
        cut = slicer_of(groups.rows.slice(base, rows), settings)
        bounds = [(start - base, stop - base) for start, stop in pairwise(offsets)]
        return (
            (key, iter((cut(start, stop),)) if stop - start <= rows_max else _in_cuts(cut, start, stop, rows_max))
            for key, (start, stop) in zip(keys, bounds, strict=True)
        )

    def row_keys(self, keys: pa.Table) -> list[Key]:
        """Returns keys as user code sees them with their rows."""
        return frame_keys(keys, self.program.frames)


def _in_pieces(rows: pa.Table, start: int, stop: int, rows_max: int, settings: FrameSettings) -> Iterator[pd.DataFrame]:
    """Gives the rows of a large key in frames of bounded size, converted as user code asks for them."""
    for piece in range(start, stop, rows_max):
        yield frame_of(rows.slice(piece, min(rows_max, stop - piece)), settings)


def _in_cuts(cut: Callable[[int, int], pd.DataFrame], start: int, stop: int, rows_max: int) -> Iterator[pd.DataFrame]:
    return (cut(piece, min(piece + rows_max, stop)) for piece in range(start, stop, rows_max))


def frame_of(rows: pa.Table, settings: FrameSettings) -> pd.DataFrame:
    """Returns the rows as Spark gives them to user code: timestamps are naive, in session time."""
    columns: list[Any] = ArrowBatchTransformer.to_pandas(
        rows, timezone=settings.timezone, prefer_int_ext_dtype=settings.prefer_int_extension
    )
    if settings.widened:
        # Spark rebuilds frames from single values, in which numpy's narrow numbers become Python's.
        columns = [_widened(column) for column in columns]
    frame: pd.DataFrame = pd.concat(columns, axis="columns")
    # Fresh memory, so that user code may write into a frame; and few blocks, so that slicing is cheap.
    return frame.copy()


def _widened(series: Any) -> Any:
    dtype = series.dtype
    if isinstance(dtype, np.dtype):
        if dtype.kind in "iu" and dtype.itemsize < 8:
            return series.astype(np.int64)
        if dtype.kind == "f" and dtype.itemsize < 8:
            return series.astype(np.float64)
    return series


def slicer_of(rows: pa.Table, settings: FrameSettings) -> Callable[[int, int], pd.DataFrame]:
    """Returns a function that gives the rows from start to stop as a frame of their own, numbered from 0.

    Slices share memory: rows go to one slice only, so writing into one does no harm to another.
    """
    if not settings.widened and any(map(_depends_on_nulls, rows.columns)):
        return lambda start, stop: frame_of(rows.slice(start, stop - start), settings)
    cut = _slicer_of(frame_of(rows, settings))
    if any(pa.types.is_boolean(column.type) and column.null_count for column in rows.columns):
        # Booleans with nulls are objects in pandas; in a slice without nulls they are booleans again.
        return lambda start, stop: cut(start, stop).infer_objects()
    return cut


def _depends_on_nulls(column: pa.ChunkedArray) -> bool:
    kind = column.type
    return bool(column.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)))


def _slicer_of(frame: pd.DataFrame) -> Callable[[int, int], pd.DataFrame]:
    if not _CAN_SLICE_BLOCKS:
        return lambda start, stop: frame.iloc[start:stop].reset_index(drop=True)
    return _block_slicer_of(frame)


def _block_slicer_of(frame: Any) -> Callable[[int, int], pd.DataFrame]:
    manager, blocks, columns = type(frame._mgr), frame._mgr.blocks, frame.columns
    from_blocks: Any = pd.DataFrame._from_mgr  # type: ignore[attr-defined]
    numbered: Any = pd.RangeIndex._simple_new  # type: ignore[attr-defined]

    def cut(start: int, stop: int) -> pd.DataFrame:
        rows = slice(start, stop)
        # Indexes of its own, as user code may name them.
        axes = [columns._view(), numbered(range(stop - start))]
        part = manager(tuple([block.slice_block_rows(rows) for block in blocks]), axes, verify_integrity=False)
        return from_blocks(part, axes)  # type: ignore[no-any-return]

    return cut


def _can_slice_blocks() -> bool:
    """Tells whether the inner interface that slices without overhead is there, in this version of pandas."""
    probe = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    try:
        return bool(_block_slicer_of(probe)(1, 2).equals(pd.DataFrame({"a": [2], "b": ["y"]})))
    except (AttributeError, TypeError):
        return False


_CAN_SLICE_BLOCKS = _can_slice_blocks()


def frame_keys(keys: pa.Table, settings: FrameSettings) -> list[tuple[Any, ...]]:
    """Returns keys as Spark gives them to a processor of frames: timestamps are pandas', nulls are None."""
    columns = []
    for number, column in enumerate(keys.columns):
        if pa.types.is_timestamp(column.type) or pa.types.is_nested(column.type):
            (series,) = ArrowBatchTransformer.to_pandas(keys.select([number]), timezone=settings.timezone)
            columns.append([None if value is pd.NaT else value for value in series])
        else:
            columns.append(python_values(column))
    return tuples_of(columns, keys.num_rows)


def scalar_keys(keys: pa.Table, settings: FrameSettings) -> list[tuple[Any, ...]]:
    """Returns keys as applyInPandasWithState gets them: what a Series of the key has, such as numpy's numbers."""
    return tuples_of([_scalars(keys.select([number]), settings) for number in range(keys.num_columns)], keys.num_rows)


def _scalars(keys: pa.Table, settings: FrameSettings) -> list[Any]:
    """Converts nulls by themselves: in a Series, they would make floats of whole numbers."""
    valid = keys.column(0).is_valid().to_numpy()
    scalars: list[Any] = [None] * len(valid)
    for chosen in (valid, ~valid):
        if chosen.any():
            (series,) = ArrowBatchTransformer.to_pandas(keys.filter(pa.array(chosen)), timezone=settings.timezone)
            is_number = isinstance(series.dtype, np.dtype) and series.dtype.kind in "iufb"
            values = list(series.to_numpy() if is_number else series)
            for position, value in zip(np.flatnonzero(chosen).tolist(), values, strict=True):
                scalars[position] = value
    return scalars


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
        """Finds fields by name if any column has a name, else by position, as Spark does it."""
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
        """Gives what was gathered, in batches of bounded size."""
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
    """Returns a function that gives the values of a column, by its position, without making a Series of them."""
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
