"""Variances, covariances and what follows from them: moments in the state, and Spark's own last step.

Moments are merged by the parallel formulas of Chan and of Pébay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, StructField, StructType

from anabranch.engine.spark import expressions
from anabranch.operators.aggregate.call import Buffer, Call, Columns, Parts

Doubles = npt.NDArray[np.float64]
#: Spark's classes whose buffers are n, avg, m2 and, for some, m3 and m4.
MOMENTS = ("VariancePop", "VarianceSamp", "StddevPop", "StddevSamp", "Skewness", "Kurtosis", "RegrReplacement")
#: Those whose buffers are n, xAvg, yAvg, ck and, for some, xMk and yMk, or an n, avg and m2 of x after the first four.
COMOMENTS = ("CovPopulation", "CovSample", "Corr", "RegrR2", "RegrSXY", "RegrSlope", "RegrIntercept")
#: These take their arguments the other way round: the dependent variable comes first.
_TURNED = ("RegrSlope", "RegrIntercept")


def moments(call: Call) -> Parts:
    names = [attribute.name() for attribute in expressions.sequence(call.function.aggBufferAttributes())]

    def partial(inputs: Columns) -> Column:
        (x,) = inputs
        n = F.count(x).cast("double")
        m2 = _or_zero(F.var_pop(x)) * n
        found = {
            "n": n,
            "avg": _mean(x),
            "m2": m2,
            # From Spark's own definitions of skewness and kurtosis, which are none where all values are equal.
            "m3": _or_zero(F.when(m2 != 0, F.skewness(x) * F.sqrt(m2 * m2 * m2 / n))),
            "m4": _or_zero(F.when(m2 != 0, (F.kurtosis(x) + 3.0) * m2 * m2 / n)),
        }
        return F.struct(*[found[name].alias(name) for name in names])

    def finish(buffers: Columns) -> Column:
        return call.evaluated([buffers[0][name] for name in names])

    return Parts(call.arguments, (Buffer("", partial, _doubles(*names), Moments()),), finish)


def comoments(call: Call) -> Parts:
    fields = ["n", "xAvg", "yAvg", "ck", "xMk", "yMk"]
    turned = expressions.kind(call.function) in _TURNED
    names = [attribute.name() for attribute in expressions.sequence(call.function.aggBufferAttributes())]
    names = [{"avg": "xAvg", "m2": "xMk"}.get(name, name) for name in names]

    def partial(inputs: Columns) -> Column:
        both = inputs[0].isNotNull() & inputs[1].isNotNull()
        x, y = (F.when(both, column) for column in (reversed(inputs) if turned else inputs))
        n = F.count(x).cast("double")
        found = [
            n,
            _mean(x),
            _mean(y),
            _or_zero(F.covar_pop(x, y)) * n,
            _or_zero(F.var_pop(x)) * n,
            _or_zero(F.var_pop(y)) * n,
        ]
        return F.struct(*[column.alias(name) for name, column in zip(fields, found, strict=True)])

    def finish(buffers: Columns) -> Column:
        return call.evaluated([buffers[0][name] for name in names])

    return Parts(call.arguments, (Buffer("", partial, _doubles(*fields), Comoments()),), finish)


def _mean(x: Column) -> Column:
    """Returns the mean, between the smallest and the largest value: a rounded sum may leave that range, or be infinite.

    Epochs of one and the same value must have that very mean, or the value would seem to vary.
    """
    x = x.cast("double")
    return _or_zero(F.greatest(F.min(x), F.least(F.max(x), F.avg(x))))


def _or_zero(column: Column) -> Column:
    return F.coalesce(column, F.lit(0.0))


def _doubles(*names: str) -> StructType:
    return StructType([StructField(name, DoubleType()) for name in names])


@dataclass(frozen=True)
class Moments:
    """Structs of n, avg, m2 and, as far as the struct has them, m3 and m4."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        order = old.type.num_fields - 1
        n1, mean1, *a = _columns(old)
        n2, mean2, *b = _columns(new)
        n = n1 + n2
        with np.errstate(all="ignore"):
            # What has seen nothing must not weigh in, not even as NaN.
            delta = mean2 - mean1
            step = np.where(n == 0, 0.0, delta / np.where(n == 0, 1.0, n))
            merged = [n, mean1 + step * n2, a[0] + b[0] + delta * step * n1 * n2]
            if order >= 3:
                merged.append(
                    a[1] + b[1] + step * step * delta * n1 * n2 * (n1 - n2) + 3.0 * step * (n1 * b[0] - n2 * a[0])
                )
            if order >= 4:
                merged.append(
                    a[2] + b[2] + step**3 * delta * n1 * n2 * (n1 * n1 - n1 * n2 + n2 * n2)
                    + 6.0 * step * step * (n1 * n1 * b[0] + n2 * n2 * a[0])
                    + 4.0 * step * (n1 * b[1] - n2 * a[1])
                )  # fmt: skip
        return _struct(merged, n1, n2, old, new)


@dataclass(frozen=True)
class Comoments:
    """Structs of n, xAvg, yAvg, ck (the sum of products of deviations), xMk and yMk (of their squares)."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        n1, x1, y1, c1, xx1, yy1 = _columns(old)
        n2, x2, y2, c2, xx2, yy2 = _columns(new)
        n = n1 + n2
        with np.errstate(all="ignore"):
            dx, dy = x2 - x1, y2 - y1
            some = np.where(n == 0, 1.0, n)
            sx, sy = dx / some, dy / some
            merged = [
                n,
                x1 + sx * n2,
                y1 + sy * n2,
                c1 + c2 + dx * sy * n1 * n2,
                xx1 + xx2 + dx * sx * n1 * n2,
                yy1 + yy2 + dy * sy * n1 * n2,
            ]
        return _struct(merged, n1, n2, old, new)


def _columns(moments: pa.Array) -> list[Doubles]:
    return [child.fill_null(0.0).to_numpy(zero_copy_only=False) for child in moments.flatten()]


def _struct(merged: list[Doubles], n1: Doubles, n2: Doubles, old: pa.Array, new: pa.Array) -> pa.Array:
    """Returns the merged columns; the other side as it is where one has seen nothing."""
    chosen = [
        np.where(n2 == 0, before, np.where(n1 == 0, after, both))
        for both, before, after in zip(merged, _columns(old), _columns(new), strict=True)
    ]
    return pa.StructArray.from_arrays([pa.array(column) for column in chosen], fields=list(old.type))
