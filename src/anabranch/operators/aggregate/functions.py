"""Which aggregate functions of Spark's can be merged with state, and how each is taken apart.

A function that has to remember values keeps them in the state: distinct counts, sums and averages, collect_list,
collect_set, mode, median and percentile grow with the values of a key. The synopses (approx_count_distinct, sketches,
percentile_approx, approx_top_k) do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DecimalType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark import expressions
from anabranch.engine.spark.expressions import Expression
from anabranch.operators.aggregate import collected, moments, synopses
from anabranch.operators.aggregate.call import Buffer, Call, Columns, Parts
from anabranch.operators.aggregate.merge import Merge


@dataclass(frozen=True)
class AggregateFunction:
    """A column of the result: an aggregate, or an expression of several, taken apart."""

    #: What the columns of the state mean, one for each buffer: the functions' names.
    meanings: tuple[str, ...]
    #: The expressions that are aggregated, by name of the stage's columns.
    arguments: tuple[Column, ...]
    #: Its name and type in the result.
    output_name: str
    output_type: DataType
    buffers: tuple[Buffer, ...]
    #: From the merged buffers to the result.
    finish: Callable[[Sequence[Column]], Column]
    #: Whether its one buffer is the result.
    plain: bool


def take_apart(node: Expression, unbound: Callable[[Expression], Expression]) -> tuple[str, Parts]:
    """Takes an AggregateExpression of Spark's apart: returns its name and parts.

    `unbound` makes expressions of the stage's rows.
    """
    function = node.aggregateFunction()
    text = node.sql()
    name: str = function.prettyName()
    function = expressions.replacement(function)
    entry = _TABLE.get(expressions.kind(function))
    if entry is None:
        raise UnsupportedError(
            f"The aggregate {text!r} is not supported: {name} cannot be merged with the state of earlier epochs. "
            "Use transformWithState, or another aggregate."
        )
    take, count = entry
    arguments = expressions.children(function)[: count or None]
    condition = node.filter()
    call = Call(
        function=function,
        name=name,
        distinct=node.isDistinct(),
        values=tuple(expressions.column(unbound(argument)) for argument in arguments),
        types=tuple(expressions.type_of(argument) for argument in arguments),
        output=expressions.type_of(function),
        condition=expressions.column(unbound(condition.get())) if condition.isDefined() else None,
        text=text,
    )
    if call.distinct and take not in _DISTINCT:
        raise UnsupportedError(
            f"The aggregate {text!r} is over distinct values, which is supported for count, sum, avg, min, max, "
            "collect_list and collect_set only."
        )
    parts = take(call)
    return f"{name} distinct" if call.distinct and take in (_count, _sum, _avg) else name, parts


def _count(call: Call) -> Parts:
    if call.distinct:
        return collected.count_distinct(call)
    if call.condition is None and all(not part.nullable() for part in expressions.children(call.function)):
        # Nothing to look at in the rows: as F.count("*").
        buffer = Buffer("", lambda _: F.count(F.lit(1)), LongType(), Merge.SUM, nullable=False)
        return Parts((), (buffer,), lambda buffers: buffers[0], plain=True)
    return call.simple(Merge.SUM, nullable=False)


def _sum(call: Call) -> Parts:
    if call.distinct:
        return collected.sum_distinct(call)
    attempted = call.name == "try_sum"
    if not attempted and not isinstance(call.types[0], DecimalType):
        return call.simple(Merge.SUM)
    how = Merge.TRY_SUM if attempted else Merge.SUM
    seen = Buffer(".seen", lambda inputs: F.count(inputs[0]) > 0, BooleanType(), Merge.MAX)
    return Parts(call.arguments, (Buffer("", call.again, call.output, how, seen=1), seen), lambda buffers: buffers[0])


def _avg(call: Call) -> Parts:
    if call.distinct:
        return collected.avg_distinct(call)
    total_type, _ = (
        expressions.type_of(attribute) for attribute in expressions.sequence(call.function.aggBufferAttributes())
    )
    # Decimals and intervals that do not fit are null in Spark's buffer, and errors, if any, come when it is evaluated.
    attempted = isinstance(total_type, DecimalType) and call.name == "try_avg"
    count = Buffer(".count", lambda inputs: F.count(inputs[0]), LongType(), Merge.SUM)
    total = Buffer(
        ".sum",
        lambda inputs: (F.try_sum if attempted else F.sum)(inputs[0].cast(total_type)).cast(total_type),
        total_type,
        Merge.TRY_SUM if attempted else Merge.SUM,
        seen=1 if isinstance(total_type, DecimalType) else 0,
    )
    return Parts(call.arguments, (total, count), call.evaluated)


def _simple(how: Merge) -> Callable[[Call], Parts]:
    return lambda call: call.simple(how)


def _extreme(how: Merge) -> Callable[[Call], Parts]:
    def take(call: Call) -> Parts:
        call.require_binary_collation()
        return call.simple(how)

    return take


def _first_or_last(function: Callable[..., Column], how: Merge) -> Callable[[Call], Parts]:
    """Keeps the value in a struct, because the first value may be a null, which is not the same as none."""

    def take(call: Call) -> Parts:
        (value,) = call.values
        held = F.struct(value.alias("value"))
        conditions = [] if call.condition is None else [call.condition]
        if call.function.ignoreNulls():
            conditions.append(value.isNotNull())
        for condition in conditions:
            held = F.when(condition, held)
        kind = StructType([StructField("value", call.output)])
        buffer = Buffer("", lambda inputs: function(inputs[0], ignorenulls=True), kind, how)
        return Parts((held,), (buffer,), lambda buffers: buffers[0]["value"])

    return take


def _by(extreme: Callable[[Column], Column], how: Merge) -> Callable[[Call], Parts]:
    def take(call: Call) -> Parts:
        call.require_binary_collation()

        def partial(inputs: Columns) -> Column:
            by = extreme(inputs[1])
            return F.when(by.isNotNull(), F.struct(call.again(inputs).alias("value"), by.alias("by")))

        kind = StructType([StructField("value", call.output), StructField("by", call.types[1])])
        return Parts(call.arguments, (Buffer("", partial, kind, how),), lambda buffers: buffers[0]["value"])

    return take


def _listagg(call: Call) -> Parts:
    if len(expressions.children(call.function)) > 2 or not isinstance(call.output, StringType):
        raise UnsupportedError(
            f"The aggregate {call.text!r} is not supported: listagg takes strings, without WITHIN GROUP. Collect "
            "structs with collect_list, and sort them in a select after the aggregation."
        )
    return collected.joined(call)


_min, _max = _extreme(Merge.MIN), _extreme(Merge.MAX)
#: By the name of Spark's class: how it is taken apart, and how many of its arguments are values (0: all of them).
_TABLE: dict[str, tuple[Callable[[Call], Parts], int]] = {
    "Count": (_count, 0),
    "Sum": (_sum, 1),
    "Average": (_avg, 1),
    "Min": (_min, 1),
    "Max": (_max, 1),
    "Product": (_simple(Merge.PRODUCT), 1),
    "BitAndAgg": (_simple(Merge.BIT_AND), 1),
    "BitOrAgg": (_simple(Merge.BIT_OR), 1),
    "BitXorAgg": (_simple(Merge.BIT_XOR), 1),
    "First": (_first_or_last(F.first, Merge.FIRST), 1),
    "Last": (_first_or_last(F.last, Merge.LAST), 1),
    "MinBy": (_by(F.min, Merge.MIN_BY), 2),
    "MaxBy": (_by(F.max, Merge.MAX_BY), 2),
    "CollectList": (collected.collect_list, 1),
    "CollectSet": (collected.collect_set, 1),
    "CollectUnion": (collected.collect_union, 1),
    "ListAgg": (_listagg, 1),
    "Mode": (collected.mode, 1),
    "Percentile": (collected.percentile, 1),
    "PercentileDisc": (collected.percentile, 1),
    **dict.fromkeys(moments.MOMENTS, (moments.moments, 1)),
    **dict.fromkeys(moments.COMOMENTS, (moments.comoments, 2)),
    "HyperLogLogPlusPlus": (synopses.approx_count_distinct, 1),
    "HllSketchAgg": (synopses.hll, 1),
    "HllUnionAgg": (synopses.hll, 1),
    "ThetaSketchAgg": (synopses.theta, 1),
    "ThetaUnionAgg": (synopses.theta, 1),
    "ThetaIntersectionAgg": (synopses.theta_intersection, 1),
    **dict.fromkeys(synopses.KLL, (synopses.kll, 1)),
    "ApproximatePercentile": (synopses.percentile_approx, 1),
    "ApproxTopK": (synopses.approx_top_k, 1),
    "CountMinSketchAgg": (synopses.count_min_sketch, 1),
    "BitmapConstructAgg": (synopses.bitmap_union, 1),
    "BitmapOrAgg": (synopses.bitmap_union, 1),
    "BitmapAndAgg": (synopses.bitmap_intersection, 1),
}
#: Those that can be over distinct values: to some it makes no difference.
_DISTINCT = (_count, _sum, _avg, _min, _max, collected.collect_list, collected.collect_set)
