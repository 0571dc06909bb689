"""From Arrow columns to the pandas frames that a processor gets: one conversion, many slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.conversion import ArrowBatchTransformer

from anabranch.operators.process.columns import python_values, tuples_of
from anabranch.operators.process.program import FrameSettings


def frame_of(rows: pa.Table, settings: FrameSettings) -> pd.DataFrame:
    """The rows as Spark gives them to user code: timestamps are naive, in session time."""
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
    """A function that gives the rows from start to stop as a frame of their own, numbered from 0.

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
    """Whether the inner interface that slices without overhead is there, in this version of pandas."""
    probe = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    try:
        return bool(_block_slicer_of(probe)(1, 2).equals(pd.DataFrame({"a": [2], "b": ["y"]})))
    except (AttributeError, TypeError):
        return False


_CAN_SLICE_BLOCKS = _can_slice_blocks()


def frame_keys(keys: pa.Table, settings: FrameSettings) -> list[tuple[Any, ...]]:
    """Keys as Spark gives them to a processor of frames: timestamps are pandas', nulls are None."""
    columns = []
    for number, column in enumerate(keys.columns):
        if pa.types.is_timestamp(column.type) or pa.types.is_nested(column.type):
            (series,) = ArrowBatchTransformer.to_pandas(keys.select([number]), timezone=settings.timezone)
            columns.append([None if value is pd.NaT else value for value in series])
        else:
            columns.append(python_values(column))
    return tuples_of(columns, keys.num_rows)


def scalar_keys(keys: pa.Table, settings: FrameSettings) -> list[tuple[Any, ...]]:
    """Keys as Spark gives them to applyInPandasWithState: what a Series of the key has, such as numpy's numbers."""
    return tuples_of([_scalars(keys.select([number]), settings) for number in range(keys.num_columns)], keys.num_rows)


def _scalars(keys: pa.Table, settings: FrameSettings) -> list[Any]:
    """Nulls by themselves: in a Series, they would make floats of whole numbers."""
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
