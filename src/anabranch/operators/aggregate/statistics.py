"""Variances, covariances and what follows from them: moments in the state, and Spark's own last step."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, StructField, StructType

from anabranch.operators.aggregate import catalyst
from anabranch.operators.aggregate.call import Buffer, Call, Columns, Parts
from anabranch.operators.aggregate.moments import Comoments, Moments

#: Spark's classes whose buffers are n, avg, m2 and, for some, m3 and m4.
MOMENTS = ("VariancePop", "VarianceSamp", "StddevPop", "StddevSamp", "Skewness", "Kurtosis", "RegrReplacement")
#: Those whose buffers are n, xAvg, yAvg, ck and, for some, xMk and yMk, or an n, avg and m2 of x after the first four.
COMOMENTS = ("CovPopulation", "CovSample", "Corr", "RegrR2", "RegrSXY", "RegrSlope", "RegrIntercept")
#: These take their arguments the other way round: the dependent variable comes first.
_TURNED = ("RegrSlope", "RegrIntercept")


def moments(call: Call) -> Parts:
    names = [attribute.name() for attribute in catalyst.sequence(call.function.aggBufferAttributes())]

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
    turned = catalyst.kind(call.function) in _TURNED
    names = [attribute.name() for attribute in catalyst.sequence(call.function.aggBufferAttributes())]
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
    """The mean, between the smallest and the largest value: a sum that is rounded may leave that range, or be infinite.

    Epochs of one and the same value must have that very mean, or the value would seem to vary.
    """
    x = x.cast("double")
    return _or_zero(F.greatest(F.min(x), F.least(F.max(x), F.avg(x))))


def _or_zero(column: Column) -> Column:
    return F.coalesce(column, F.lit(0.0))


def _doubles(*names: str) -> StructType:
    return StructType([StructField(name, DoubleType()) for name in names])
