"""Approximate aggregates: their state is small however many values there are, and their error is bounded.

===================== ================================================ ==============================================
function              state of a key                                   error, with the default parameters
===================== ================================================ ==============================================
approx_count_distinct HyperLogLog++ registers, at most 512             a relative standard deviation of 5 percent
hll_sketch_agg        DataSketches HLL with 4,096 registers, 4 KB      a relative standard deviation of 1.6 percent
theta_sketch_agg      DataSketches theta with 4,096 hashes, 32 KB      a relative standard deviation of 1.6 percent
kll_sketch_agg_*      DataSketches KLL with k = 200, about 4 KB        ranks within 1.33 percent, 99 times of 100
percentile_approx     KLL with a k that follows from the accuracy      ranks within 1 / accuracy, 99 times of 100
approx_top_k          values with counts, at most maxItemsTracked      counts within 4.5 / maxItemsTracked of all rows
count_min_sketch      Spark's own counters                             eps of all rows too much, with the confidence
===================== ================================================ ==============================================

They are what Spark gives while there are few values: then each of them is exact, or the same registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NumericType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from anabranch.core.errors import EpochError, UnsupportedError
from anabranch.engine.spark import expressions
from anabranch.operators.aggregate.call import Buffer, Call, Columns, Parts
from anabranch.operators.aggregate.collected import Registers, TopCounted
from anabranch.operators.aggregate.merge import Merge


class SketchKind(StrEnum):
    """Which sketch the bytes are."""

    HLL = "hll"
    THETA_UNION = "theta union"
    THETA_INTERSECTION = "theta intersection"
    KLL_LONGS = "kll of longs"
    KLL_DOUBLES = "kll of doubles"
    KLL_FLOATS = "kll of floats"


#: Spark's classes that make or merge KLL sketches, and of what.
KLL = {
    f"Kll{what}Agg{of}": kind
    for what in ("Sketch", "Merge")
    for of, kind in (
        ("Bigint", SketchKind.KLL_LONGS), ("Double", SketchKind.KLL_DOUBLES), ("Float", SketchKind.KLL_FLOATS)
    )
}  # fmt: skip
_KLL_LARGEST_K = 65_535


def hll(call: Call) -> Parts:
    mixed = expressions.kind(call.function) == "HllUnionAgg" and bool(_constant(call, 1, False))
    return call.simple(Sketched(SketchKind.HLL, mixed=mixed))


def theta(call: Call) -> Parts:
    return call.simple(Sketched(SketchKind.THETA_UNION, lg_k=_constant(call, 1, 12)))


def theta_intersection(call: Call) -> Parts:
    return call.simple(Sketched(SketchKind.THETA_INTERSECTION))


def kll(call: Call) -> Parts:
    return call.simple(Sketched(KLL[expressions.kind(call.function)]))


def count_min_sketch(call: Call) -> Parts:
    return call.simple(CountMin())


def bitmap_union(call: Call) -> Parts:
    return call.simple(Bitmaps(union=True))


def bitmap_intersection(call: Call) -> Parts:
    return call.simple(Bitmaps(union=False))


def approx_count_distinct(call: Call) -> Parts:
    """Counts with HyperLogLog++, with Spark's own hash, registers and estimate; the state has no registers of zero."""
    call.require_binary_collation()
    deviation = call.function.relativeSD()
    bits = math.ceil(2.0 * math.log(1.106 / deviation) / math.log(2.0))

    def partial(inputs: Columns) -> Column:
        (value,) = inputs
        if isinstance(call.types[0], FloatType | DoubleType):
            # There is one zero only.
            value = value + F.lit(0.0).cast(call.types[0])
        hashed = F.xxhash64(value)
        index = F.shiftrightunsigned(hashed, 64 - bits)
        rest = F.shiftleft(hashed, bits).bitwiseOR(F.lit(1 << (bits - 1)).cast("long"))
        rank = F.lit(65) - F.length(F.bin(rest))
        packed = F.when(inputs[0].isNotNull(), (index * 64 + rank).cast("int"))
        return _highest(F.collect_set(packed))

    buffer = Buffer("", partial, ArrayType(IntegerType()), Registers())
    return Parts(call.arguments, (buffer,), lambda buffers: _estimate(buffers[0], bits, deviation))


def _highest(registers: Column) -> Column:
    """Keeps, of the registers with one index, that with the highest rank."""

    def kept(ordered: Column) -> Column:
        last = F.size(ordered) - 1

        def is_last(packed: Column, number: Column) -> Column:
            following = ordered[F.least(number + 1, last)]
            return (number == last) | (F.shiftright(following, 6) != F.shiftright(packed, 6))

        return F.filter(ordered, is_last)

    return F.transform(F.array(F.array_sort(registers)), kept)[0]


def _estimate(registers: Column, bits: int, deviation: float) -> Column:
    """Returns the estimate as Spark's HyperLogLogPlusPlusHelper takes it, with its tables of thresholds and biases."""
    size = 1 << bits
    alpha = {4: 0.673, 5: 0.697, 6: 0.709}.get(bits, 0.7213 / (1.0 + 1.079 / size))
    empty = (F.lit(size) - F.size(registers)).cast("double")
    inverse = F.aggregate(registers, empty, lambda sum, packed: sum + F.pow(F.lit(2.0), -packed.bitwiseAND(F.lit(63))))
    raw = F.lit(alpha * size * size) / inverse
    corrected = raw
    counts_linearly = raw <= 2.5 * size
    if bits < 19:
        corrected = F.when(raw < 5.0 * size, raw - expressions.hyperloglog_bias(raw, deviation)).otherwise(raw)
    linear = F.when(empty > 0, F.lit(float(size)) * F.log(F.lit(float(size)) / empty))
    if bits < 19:
        counts_linearly = counts_linearly | (linear <= expressions.hyperloglog_threshold(bits))
    return F.floor(F.when((empty > 0) & counts_linearly, linear).otherwise(corrected) + 0.5)


def percentile_approx(call: Call) -> Parts:
    """Keeps a KLL sketch of doubles, large enough for the accuracy that was asked for."""
    accuracy = int(_constant(call, 2, 10_000))
    size = min(_KLL_LARGEST_K, max(200, math.ceil((2.296 * accuracy) ** (1 / 0.9021))))
    kind = call.types[0]
    _check_number(call, kind)
    floating = isinstance(kind, FloatType | DoubleType)
    percentages = expressions.column(call.parameter(1))
    several = isinstance(call.output, ArrayType)

    def partial(inputs: Columns) -> Column:
        value = _as_double(inputs[0], kind)
        # The sketch would leave out NaN. To Spark it is above every number, and so is infinity to the sketch.
        value = F.when(F.isnan(value), F.lit(math.inf)).otherwise(value) if floating else value
        return F.kll_sketch_agg_double(value, size)

    def finish(buffers: Columns) -> Column:
        found = F.kll_sketch_get_quantile_double(buffers[0], percentages)
        count = F.kll_sketch_get_n_double(buffers[0])

        def value(one: Column, percentage: Column) -> Column:
            if floating:
                is_nan = F.greatest(F.ceil(percentage * count), F.lit(1)) > count - buffers[1]
                one = F.when((buffers[1] > 0) & is_nan, F.lit(math.nan)).otherwise(one)
            return _from_double(one, kind)

        result = F.zip_with(found, percentages, value) if several else value(found, percentages)
        return F.when(count > 0, result)

    buffers = [Buffer("", partial, BinaryType(), Sketched(SketchKind.KLL_DOUBLES))]
    if floating:
        nans = Buffer(".nan", lambda inputs: F.count_if(F.isnan(inputs[0])), LongType(), Merge.SUM)
        buffers.append(nans)
    return Parts(call.arguments, tuple(buffers), finish)


def _check_number(call: Call, kind: DataType) -> None:
    if not isinstance(kind, NumericType | DateType | TimestampType) or isinstance(kind, TimestampNTZType):
        raise UnsupportedError(
            f"The aggregate {call.text!r} is not supported over {kind.simpleString()}. Cast it to a number."
        )


def _as_double(value: Column, kind: DataType) -> Column:
    if isinstance(kind, DateType):
        return F.unix_date(value).cast("double")
    if isinstance(kind, TimestampType):
        return F.unix_micros(value).cast("double")
    return value.cast("double")


def _from_double(value: Column, kind: DataType) -> Column:
    if isinstance(kind, DateType):
        return F.date_from_unix_date(value.cast("int"))
    if isinstance(kind, TimestampType):
        return F.timestamp_micros(value.cast("long"))
    # The nearest double of a decimal may be too large for its type.
    return value.try_cast(kind)


def approx_top_k(call: Call) -> Parts:
    """Keeps the most frequent of the values that Spark finds to be the most frequent of an epoch."""
    call.require_binary_collation()
    wanted, capacity = _constant(call, 1, 5), _constant(call, 2, 10_000)
    entry = call.output.elementType if isinstance(call.output, ArrayType) else call.output
    kind = StructType([StructField("items", ArrayType(entry)), StructField("error", LongType())])

    def partial(inputs: Columns) -> Column:
        parts = [inputs[0], F.lit(capacity), F.lit(capacity)]
        changed = expressions.with_children(call.function, [expressions.expression(part) for part in parts])
        return F.struct(expressions.aggregate(changed).alias("items"), F.lit(0).cast("long").alias("error"))

    def finish(buffers: Columns) -> Column:
        items, error = buffers[0]["items"], buffers[0]["error"]

        def later(a: Column, b: Column) -> Column:
            return F.when(a["count"] > b["count"], -1).when(a["count"] < b["count"], 1).otherwise(0)

        known = F.filter(items, lambda one: one["count"] > error)
        best = F.slice(F.array_sort(known, later), 1, wanted)
        return F.transform(best, lambda one: F.struct(one["item"].alias("item"), (one["count"] + error).alias("count")))

    return Parts(call.arguments, (Buffer("", partial, kind, TopCounted(capacity)),), finish)


def _constant(call: Call, position: int, default: int) -> int:
    """Returns the value of a constant argument."""
    parts = expressions.children(call.function)
    value: int = parts[position].eval(None) if position < len(parts) else default
    return value


@dataclass(frozen=True)
class Sketched:
    """Sketches as bytes. They are merged one by one: each is a data structure of its own, of up to a megabyte."""

    kind: SketchKind
    #: The binary logarithm of a theta sketch's nominal entries; of no meaning to others.
    lg_k: int = 12
    #: Whether HyperLogLog sketches of different sizes may meet.
    mixed: bool = False

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        import datasketches  # only where it is needed: loading it takes time

        merge = self._merger(datasketches)
        merged = [merge(a, b) for a, b in zip(old.to_pylist(), new.to_pylist(), strict=True)]
        return pa.array(merged, old.type)

    def _merger(self, library: Any) -> Callable[[bytes, bytes], bytes]:
        match self.kind:
            case SketchKind.HLL:
                return lambda old, new: self._hll(library, old, new)
            case SketchKind.THETA_UNION:
                return lambda old, new: _theta(library, library.theta_union(self.lg_k), old, new)
            case SketchKind.THETA_INTERSECTION:
                return lambda old, new: _theta(library, library.theta_intersection(), old, new)
            case SketchKind.KLL_LONGS:
                return lambda old, new: _kll(library.kll_items_sketch, old, new, library.PyLongsSerDe())
            case SketchKind.KLL_DOUBLES:
                return lambda old, new: _kll(library.kll_doubles_sketch, old, new)
            case SketchKind.KLL_FLOATS:
                return lambda old, new: _kll(library.kll_floats_sketch, old, new)

    def _hll(self, library: Any, old: bytes, new: bytes) -> bytes:
        a, b = library.hll_sketch.deserialize(old), library.hll_sketch.deserialize(new)
        if a.lg_config_k != b.lg_config_k and not self.mixed:
            raise EpochError(
                f"[HLL_UNION_DIFFERENT_LG_K] Sketches with lgConfigK {a.lg_config_k} and {b.lg_config_k} meet. Make "
                "all of them with one, or pass allowDifferentLgConfigK=True to hll_union_agg."
            )
        union = library.hll_union(a.lg_config_k)
        union.update(a)
        union.update(b)
        found: bytes = union.get_result(library.tgt_hll_type.HLL_8).serialize_updatable()
        return found


def _theta(library: Any, operation: Any, old: bytes, new: bytes) -> bytes:
    for side in (old, new):
        operation.update(library.compact_theta_sketch.deserialize(side))
    found: bytes = operation.get_result().serialize()
    return found


def _kll(kind: Any, old: bytes, new: bytes, *item_format: Any) -> bytes:
    a, b = kind.deserialize(old, *item_format), kind.deserialize(new, *item_format)
    a.merge(b)
    found: bytes = a.serialize(*item_format)
    return found


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
    """Returns binary values of one length as rows of bytes; None if they have several lengths."""
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
