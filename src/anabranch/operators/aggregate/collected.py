"""Aggregates that remember values: lists, sets, distinct values, and values with their counts."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DecimalType, LongType, NumericType, StructField, StructType

from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark.java import java_class
from anabranch.operators.aggregate import catalyst
from anabranch.operators.aggregate.call import Buffer, Call, Columns, Parts
from anabranch.operators.aggregate.lists import Concatenated, Counted, United


def collect_list(call: Call) -> Parts:
    if call.distinct:
        return collect_set(call)
    _check_nulls(call)
    return call.simple(Concatenated())


def collect_set(call: Call) -> Parts:
    _check_nulls(call)
    call.require_binary_collation()
    make = call.again
    if catalyst.kind(call.function) != "CollectSet":
        # A list of distinct values.
        make = lambda inputs: F.collect_set(inputs[0])  # noqa: E731
    buffer = Buffer("", make, call.output, United())
    return Parts(call.arguments, (buffer,), lambda buffers: buffers[0], plain=True)


def collect_union(call: Call) -> Parts:
    call.require_binary_collation()
    return call.simple(United())


def joined(call: Call) -> Parts:
    """A string of all strings, with the delimiter between them."""
    delimiter = catalyst.column(call.parameter(1))
    if call.distinct:
        raise UnsupportedError(f"The aggregate {call.text!r} is over distinct values: join a collect_set instead.")
    kind = ArrayType(call.types[0])
    buffer = Buffer("", lambda inputs: F.collect_list(inputs[0]), kind, Concatenated())

    def finish(buffers: Columns) -> Column:
        text = F.call_function("array_join", buffers[0], F.coalesce(delimiter.cast("string"), F.lit("")))
        return F.when(F.size(buffers[0]) > 0, text)

    return Parts(call.arguments, (buffer,), finish)


def count_distinct(call: Call) -> Parts:
    """The set of all distinct values is in the state, and its size is the result."""
    return _distinct(call, lambda values: F.size(values).cast("long"))


def sum_distinct(call: Call) -> Parts:
    attempted = call.name == "try_sum"
    fails = str(call.function.evalContext().evalMode()) == "ANSI"
    return _distinct(call, lambda values: _total(values, call.output, attempted=attempted, fails=fails))


def avg_distinct(call: Call) -> Parts:
    total, _ = (catalyst.type_of(a) for a in catalyst.sequence(call.function.aggBufferAttributes()))
    attempted = call.name == "try_avg"

    def finish(values: Column) -> Column:
        # A sum of decimals that does not fit is null in Spark's buffer, and fails, if it does, when that is evaluated.
        return call.evaluated([_total(values, total, attempted=attempted, fails=False), F.size(values).cast("long")])

    return _distinct(call, finish)


def mode(call: Call) -> Parts:
    """The most frequent value; of several the smallest, unless ORDER BY ... DESC asks for the largest."""
    reverse = call.function.reverseOpt()
    largest = reverse.isDefined() and not reverse.get()

    def finish(counts: Column) -> Column:
        ordered = F.reverse(counts) if largest else counts

        def more(best: Column, entry: Column) -> Column:
            return F.when(best.isNull() | (entry["count"] > best["count"]), entry).otherwise(best)

        return F.aggregate(ordered, F.lit(None).cast(_entry(call.types[0])), more)["value"]

    return _counted(call, finish)


def percentile(call: Call) -> Parts:
    """Exact percentiles, which need all values."""
    function = call.function
    if len(catalyst.children(function)) > 2 and call.parameter(2).sql() not in ("1L", "1"):
        raise UnsupportedError(
            f"The aggregate {call.text!r} has a frequency, which is not supported. Use percentile without one."
        )
    backwards, discrete = function.reverse(), catalyst.kind(function) == "PercentileDisc"
    if discrete and function.legacyCalculation():
        raise UnsupportedError("percentile_disc is not supported with spark.sql.legacy.percentileDiscCalculation.")
    if not isinstance(call.types[0], NumericType):
        raise UnsupportedError(
            f"The aggregate {call.text!r} is not supported over {call.types[0].simpleString()}. Cast it to a number."
        )
    percentages = catalyst.column(call.parameter(1))

    def finish(counts: Column) -> Column:
        ordered = F.reverse(counts) if backwards else counts

        def of_all(percentage: Column) -> Column:
            return _bound(ordered, lambda found: _percentile(found, percentage, discrete))

        several = isinstance(call.output, ArrayType)
        value = F.transform(percentages, of_all) if several else of_all(percentages)
        return F.when(F.size(counts) > 0, value)

    return _counted(call, finish)


def _percentile(counts: Column, percentage: Column, discrete: bool) -> Column:
    total = F.aggregate(counts, F.lit(0).cast("long"), lambda n, entry: n + entry["count"])
    if discrete:
        last = F.ceil(total * percentage) - 1
        return _bound(F.greatest(last, F.lit(0).cast("long")), lambda index: _value_at(counts, index))

    def at(position: Column) -> Column:
        lower, higher = F.floor(position), F.ceil(position)
        low, high = (_value_at(counts, index) for index in (lower, higher))
        between = low + (position - lower) * (high - low)
        return F.when((lower == higher) | (low == high), low).otherwise(between)

    return _bound((total - 1) * percentage, at)


def _value_at(counts: Column, index: Column) -> Column:
    """The value at a position among all values, in order."""
    start = F.struct(F.lit(0).cast("long").alias("n"), F.lit(None).cast("double").alias("value"))

    def go_on(found: Column, entry: Column) -> Column:
        further = F.struct((found["n"] + entry["count"]).alias("n"), entry["value"].cast("double").alias("value"))
        return F.when(found["n"] > index, found).otherwise(further)

    return F.aggregate(counts, start, go_on)["value"]


def _bound(value: Column, use: Callable[[Column], Column]) -> Column:
    """`use(value)` with the value computed once: inside of a lambda, Spark computes an expression again and again."""
    return F.transform(F.array(value), use)[0]


def _counted(call: Call, finish: Callable[[Column], Column]) -> Parts:
    call.require_binary_collation()
    kind = ArrayType(_entry(call.types[0]))
    buffer = Buffer("", lambda inputs: _value_counts(F.collect_list(inputs[0])), kind, Counted())
    return Parts(call.arguments, (buffer,), lambda buffers: finish(buffers[0]))


def _entry(value: DataType) -> StructType:
    return StructType([StructField("value", value), StructField("count", LongType())])


def _value_counts(values: Column) -> Column:
    """An array as structs of value and count, sorted by value."""

    def ends(ordered: Column) -> Column:
        last = F.size(ordered) - 1
        indices = F.transform(ordered, lambda _, index: index)
        return F.filter(indices, lambda i: (i == last) | ~ordered[F.least(i + 1, last)].eqNullSafe(ordered[i]))

    def entries(ordered: Column) -> Column:
        return _bound(
            ends(ordered),
            lambda found: F.transform(
                found,
                lambda end, number: F.struct(
                    ordered[end].alias("value"),
                    (end - F.when(number == 0, F.lit(-1)).otherwise(found[F.greatest(number - 1, F.lit(0))]))
                    .cast("long")
                    .alias("count"),
                ),
            ),
        )

    return _bound(F.array_sort(values), entries)


def _distinct(call: Call, finish: Callable[[Column], Column]) -> Parts:
    call.require_binary_collation()
    several = len(call.values) > 1
    values = call.values
    held: Column = values[0]
    if several:
        held = F.struct(*[value.alias(f"value{number}") for number, value in enumerate(values)])
        for value in values:
            held = F.when(value.isNotNull(), held)
    if call.condition is not None:
        held = F.when(call.condition, held)
    kind: DataType = call.types[0]
    if several:
        kind = StructType([StructField(f"value{number}", found) for number, found in enumerate(call.types)])
    buffer = Buffer(".values", lambda inputs: F.collect_set(inputs[0]), ArrayType(kind), United())
    return Parts((held,), (buffer,), lambda buffers: finish(buffers[0]))


def _total(values: Column, kind: DataType, *, attempted: bool, fails: bool) -> Column:
    """The sum of an array's elements; null if there are none, or if it is only attempted and does not fit.

    A sum of decimals that does not fit is null as well, unless it `fails`.
    """
    if isinstance(kind, DecimalType):
        total = _total_of_decimals(values, kind, fails=fails)
    elif attempted:
        total = F.aggregate(values, F.lit(0).cast(kind), lambda sum, value: F.try_add(sum, value.cast(kind)))
    else:
        total = F.aggregate(values, F.lit(0).cast(kind), lambda sum, value: sum + value.cast(kind))
    return F.when(F.size(values) > 0, total)


def _total_of_decimals(values: Column, kind: DecimalType, *, fails: bool) -> Column:
    """The sum as Spark's own aggregate takes it: a plus of two columns makes room in front, at the cost of digits."""
    expressions = "org.apache.spark.sql.catalyst.expressions."
    java_type = java_class("org.apache.spark.sql.types.DataTypes").createDecimalType(kind.precision, kind.scale)

    def add(sum: Column, value: Column) -> Column:
        parts = [catalyst.expression(column) for column in (sum, value.cast(kind))]
        return catalyst.column(java_class(expressions + "DecimalAddNoOverflowCheck")(*parts, java_type))

    total = catalyst.expression(F.aggregate(values, F.lit(0).cast(kind), add))
    return catalyst.column(java_class(expressions + "CheckOverflowInSum")(total, java_type, not fails, None))


def _check_nulls(call: Call) -> None:
    """A FILTER clause makes nulls of what it leaves out, which must not be collected."""
    methods = {method.getName() for method in call.function.getClass().getMethods()}
    ignores = "ignoreNulls" not in methods or bool(call.function.ignoreNulls())
    if not ignores and (call.distinct or call.condition is not None):
        raise UnsupportedError(
            f"The aggregate {call.text!r} keeps nulls, which is not supported with DISTINCT or FILTER. Filter the rows "
            "before the aggregation."
        )
