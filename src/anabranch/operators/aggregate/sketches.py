"""Merging sketches that Spark has made: Apache DataSketches, whose bytes Java and Python share, counters, bitmaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core.errors import EpochError


class SketchKind(StrEnum):
    """Which sketch the bytes are."""

    HLL = "hll"
    THETA_UNION = "theta union"
    THETA_INTERSECTION = "theta intersection"
    KLL_LONGS = "kll of longs"
    KLL_DOUBLES = "kll of doubles"
    KLL_FLOATS = "kll of floats"


@dataclass(frozen=True)
class Sketched:
    """Sketches as bytes. They are merged one by one: each is a data structure of its own, of up to a megabyte."""

    kind: SketchKind
    #: The binary logarithm of a theta sketch's nominal entries; of no meaning to others.
    lg_k: int = 12
    #: Whether HyperLogLog sketches of different sizes may meet.
    mixed: bool = False

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        merge = _MERGERS[self.kind]
        merged = [merge(self, a, b) for a, b in zip(old.to_pylist(), new.to_pylist(), strict=True)]
        return pa.array(merged, old.type)


def _hll(sketch: Sketched, old: bytes, new: bytes) -> bytes:
    import datasketches

    a, b = datasketches.hll_sketch.deserialize(old), datasketches.hll_sketch.deserialize(new)
    if a.lg_config_k != b.lg_config_k and not sketch.mixed:
        raise EpochError(
            f"[HLL_UNION_DIFFERENT_LG_K] Sketches with lgConfigK {a.lg_config_k} and {b.lg_config_k} meet. Make all of "
            "them with one, or pass allowDifferentLgConfigK=True to hll_union_agg."
        )
    union = datasketches.hll_union(a.lg_config_k)
    union.update(a)
    union.update(b)
    found: bytes = union.get_result(datasketches.tgt_hll_type.HLL_8).serialize_updatable()
    return found


def _theta_union(sketch: Sketched, old: bytes, new: bytes) -> bytes:
    import datasketches

    return _theta(datasketches.theta_union(sketch.lg_k), old, new)


def _theta_intersection(_: Sketched, old: bytes, new: bytes) -> bytes:
    import datasketches

    return _theta(datasketches.theta_intersection(), old, new)


def _theta(operation: Any, old: bytes, new: bytes) -> bytes:
    import datasketches

    for side in (old, new):
        operation.update(datasketches.compact_theta_sketch.deserialize(side))
    found: bytes = operation.get_result().serialize()
    return found


def _kll_longs(_: Sketched, old: bytes, new: bytes) -> bytes:
    import datasketches

    longs = datasketches.PyLongsSerDe()
    a, b = (datasketches.kll_items_sketch.deserialize(side, longs) for side in (old, new))
    a.merge(b)
    found: bytes = a.serialize(longs)
    return found


def _kll_doubles(_: Sketched, old: bytes, new: bytes) -> bytes:
    import datasketches

    return _kll(datasketches.kll_doubles_sketch, old, new)


def _kll_floats(_: Sketched, old: bytes, new: bytes) -> bytes:
    import datasketches

    return _kll(datasketches.kll_floats_sketch, old, new)


def _kll(kind: Any, old: bytes, new: bytes) -> bytes:
    a, b = kind.deserialize(old), kind.deserialize(new)
    a.merge(b)
    found: bytes = a.serialize()
    return found


_MERGERS: dict[SketchKind, Callable[[Sketched, bytes, bytes], bytes]] = {
    SketchKind.HLL: _hll,
    SketchKind.THETA_UNION: _theta_union,
    SketchKind.THETA_INTERSECTION: _theta_intersection,
    SketchKind.KLL_LONGS: _kll_longs,
    SketchKind.KLL_DOUBLES: _kll_doubles,
    SketchKind.KLL_FLOATS: _kll_floats,
}


@dataclass(frozen=True)
class CountMin:
    """Spark's count-min sketches, all of one shape: counters are added up."""

    #: Spark writes version, total, depth, width, then a hash seed for each row of counters, then the counters.
    _TOTAL = slice(4, 12)
    _DEPTH = slice(12, 16)
    _HEAD = 20

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        a, b = _matrix(old), _matrix(new)
        if a is None or b is None or a.shape != b.shape:
            raise EpochError("Count-min sketches of different shapes meet. Use one eps, confidence and seed for all.")
        depth = int.from_bytes(a[0, self._DEPTH].tobytes(), "big") if len(a) else 0
        counters = slice(self._HEAD + 8 * depth, None)
        merged = a.copy()
        for part in (self._TOTAL, counters):
            total = _longs(a[:, part]) + _longs(b[:, part])
            merged[:, part] = total.astype(">i8").view(np.uint8).reshape(len(a), -1)
        return _as_binary(merged, old.type)


@dataclass(frozen=True)
class Bitmaps:
    """Bitmaps of one length: all bits of both, or the bits that both have."""

    union: bool

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        a, b = _matrix(old), _matrix(new)
        if a is None or b is None or a.shape != b.shape:
            raise EpochError("Bitmaps of different lengths meet. Make all of them with bitmap_construct_agg.")
        return _as_binary(a | b if self.union else a & b, old.type)


def _matrix(values: pa.Array) -> npt.NDArray[np.uint8] | None:
    """Binary values of one length as rows of bytes; None if they have several lengths."""
    lengths = pc.binary_length(values).unique()
    if len(lengths) != 1:
        return None
    offsets = np.frombuffer(values.buffers()[1], np.int32, 1, values.offset * 4)
    width = lengths[0].as_py()
    return np.frombuffer(values.buffers()[2], np.uint8, width * len(values), offsets[0]).reshape(len(values), width)


def _longs(columns: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(columns).view(">i8").astype(np.int64)


def _as_binary(rows: npt.NDArray[np.uint8], kind: pa.DataType) -> pa.Array:
    width = rows.shape[1]
    offsets = np.arange(len(rows) + 1, dtype=np.int64) * width
    data = pa.py_buffer(np.ascontiguousarray(rows))
    return pa.Array.from_buffers(pa.large_binary(), len(rows), [None, pa.py_buffer(offsets), data]).cast(kind)
