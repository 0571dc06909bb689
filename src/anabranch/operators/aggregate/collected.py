"""Aggregates that remember values: lists, sets, distinct values, and values with their counts, merged in columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DecimalType, LongType, NumericType, StructField, StructType

from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark import expressions
from anabranch.operators.aggregate.call import Buffer, Call, Columns, Parts
from anabranch.operators.aggregate.merge import ranks

Numbers = npt.NDArray[np.int64]


def collect_list(call: Call) -> Parts:
    if call.distinct:
        return collect_set(call)
    _check_nulls(call)
    return call.simple(Concatenated())


def collect_set(call: Call) -> Parts:
    _check_nulls(call)
    call.require_binary_collation()
    make = call.again
    if expressions.kind(call.function) != "CollectSet":
        # A list of distinct values.
        make = lambda inputs: F.collect_set(inputs[0])  # noqa: E731
    buffer = Buffer("", make, call.output, United())
    return Parts(call.arguments, (buffer,), lambda buffers: buffers[0], plain=True)


def collect_union(call: Call) -> Parts:
    call.require_binary_collation()
    return call.simple(United())


def joined(call: Call) -> Parts:
    """Joins a string of all strings, with the delimiter between them."""
    delimiter = expressions.column(call.parameter(1))
    if call.distinct:
        raise UnsupportedError(f"The aggregate {call.text!r} is over distinct values: join a collect_set instead.")
    kind = ArrayType(call.types[0])
    buffer = Buffer("", lambda inputs: F.collect_list(inputs[0]), kind, Concatenated())

    def finish(buffers: Columns) -> Column:
        text = F.call_function("array_join", buffers[0], F.coalesce(delimiter.cast("string"), F.lit("")))
        return F.when(F.size(buffers[0]) > 0, text)

    return Parts(call.arguments, (buffer,), finish)


def count_distinct(call: Call) -> Parts:
    """Keeps the set of all distinct values in the state; its size is the result."""
    return _distinct(call, lambda values: F.size(values).cast("long"))


def sum_distinct(call: Call) -> Parts:
    attempted = call.name == "try_sum"
    fails = str(call.function.evalContext().evalMode()) == "ANSI"
    return _distinct(call, lambda values: _total(values, call.output, attempted=attempted, fails=fails))


def avg_distinct(call: Call) -> Parts:
    total, _ = (expressions.type_of(a) for a in expressions.sequence(call.function.aggBufferAttributes()))
    attempted = call.name == "try_avg"

    def finish(values: Column) -> Column:
        # A sum of decimals that does not fit is null in Spark's buffer, and fails, if it does, when that is evaluated.
        return call.evaluated([_total(values, total, attempted=attempted, fails=False), F.size(values).cast("long")])

    return _distinct(call, finish)


def mode(call: Call) -> Parts:
    """Finds the most frequent value; of several the smallest, unless ORDER BY ... DESC asks for the largest."""
    reverse = call.function.reverseOpt()
    largest = reverse.isDefined() and not reverse.get()

    def finish(counts: Column) -> Column:
        ordered = F.reverse(counts) if largest else counts

        def more(best: Column, entry: Column) -> Column:
            return F.when(best.isNull() | (entry["count"] > best["count"]), entry).otherwise(best)

        return F.aggregate(ordered, F.lit(None).cast(_entry(call.types[0])), more)["value"]

    return _counted(call, finish)


def percentile(call: Call) -> Parts:
    """Finds exact percentiles, which need all values."""
    function = call.function
    if len(expressions.children(function)) > 2 and call.parameter(2).sql() not in ("1L", "1"):
        raise UnsupportedError(
            f"The aggregate {call.text!r} has a frequency, which is not supported. Use percentile without one."
        )
    backwards, discrete = function.reverse(), expressions.kind(function) == "PercentileDisc"
    if discrete and function.legacyCalculation():
        raise UnsupportedError("percentile_disc is not supported with spark.sql.legacy.percentileDiscCalculation.")
    if not isinstance(call.types[0], NumericType):
        raise UnsupportedError(
            f"The aggregate {call.text!r} is not supported over {call.types[0].simpleString()}. Cast it to a number."
        )
    percentages = expressions.column(call.parameter(1))

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
    """Returns the value at a position among all values, in order."""
    start = F.struct(F.lit(0).cast("long").alias("n"), F.lit(None).cast("double").alias("value"))

    def go_on(found: Column, entry: Column) -> Column:
        further = F.struct((found["n"] + entry["count"]).alias("n"), entry["value"].cast("double").alias("value"))
        return F.when(found["n"] > index, found).otherwise(further)

    return F.aggregate(counts, start, go_on)["value"]


def _bound(value: Column, use: Callable[[Column], Column]) -> Column:
    """Returns `use(value)` with the value computed once: inside of a lambda, Spark computes it again and again."""
    return F.transform(F.array(value), use)[0]


def _counted(call: Call, finish: Callable[[Column], Column]) -> Parts:
    call.require_binary_collation()
    kind = ArrayType(_entry(call.types[0]))
    buffer = Buffer("", lambda inputs: _value_counts(F.collect_list(inputs[0])), kind, Counted())
    return Parts(call.arguments, (buffer,), lambda buffers: finish(buffers[0]))


def _entry(value: DataType) -> StructType:
    return StructType([StructField("value", value), StructField("count", LongType())])


def _value_counts(values: Column) -> Column:
    """Returns an array as structs of value and count, sorted by value."""

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
    """Returns the sum of an array's elements; null if there are none, or if it is only attempted and does not fit.

    A sum of decimals that does not fit is null as well, unless it `fails`.
    """
    if isinstance(kind, DecimalType):
        total = expressions.sum_of_decimals(values, kind, fails=fails)
    elif attempted:
        total = F.aggregate(values, F.lit(0).cast(kind), lambda sum, value: F.try_add(sum, value.cast(kind)))
    else:
        total = F.aggregate(values, F.lit(0).cast(kind), lambda sum, value: sum + value.cast(kind))
    return F.when(F.size(values) > 0, total)


def _check_nulls(call: Call) -> None:
    """Refuses to keep nulls with a FILTER clause, which makes nulls of what it leaves out."""
    methods = {method.getName() for method in call.function.getClass().getMethods()}
    ignores = "ignoreNulls" not in methods or bool(call.function.ignoreNulls())
    if not ignores and (call.distinct or call.condition is not None):
        raise UnsupportedError(
            f"The aggregate {call.text!r} keeps nulls, which is not supported with DISTINCT or FILTER. Filter the rows "
            "before the aggregation."
        )


@dataclass(frozen=True)
class Concatenated:
    """The elements of the state, then those of the epoch."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old, new)
        return _lists(elements.take(pa.array(np.argsort(rows, kind="stable"))), rows, old)


@dataclass(frozen=True)
class United:
    """The elements of both, each once."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old, new)
        order, first = _grouped(rows, ranks(elements))
        kept = order[first]
        return _lists(elements.take(pa.array(kept)), rows[kept], old)


@dataclass(frozen=True)
class Counted:
    """Structs of value and count, sorted by value, with the counts of equal values added up."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old, new)
        values, totals, owners = _added_up(elements, rows)
        return _lists(_pairs(values, totals, elements.type), owners, old)


@dataclass(frozen=True)
class TopCounted:
    """The most frequent values: a struct of values with counts, and by how much these may be too small.

    Where more than ``capacity`` values come together, the count of the first that does not fit is taken from all, which
    lets go of at least one (Misra and Gries). What was taken in all is at most one part in ``capacity`` of all rows.
    """

    capacity: int

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old.field("items"), new.field("items"))
        values, totals, owners = _added_up(elements, rows)
        size = len(old)
        position = np.empty(len(owners), dtype=np.int64)
        by_count = np.lexsort((-totals, owners))
        starts = np.searchsorted(owners, np.arange(size))
        position[by_count] = np.arange(len(owners)) - starts[owners]
        taken = np.zeros(size, dtype=np.int64)
        too_many = position == self.capacity
        taken[owners[too_many]] = totals[too_many]
        totals = totals - taken[owners]
        kept = np.flatnonzero((totals > 0) & (position < self.capacity))
        items = _lists(
            _pairs(values.take(pa.array(kept)), totals[kept], elements.type), owners[kept], old.field("items")
        )
        error = pc.add(pc.add(old.field("error"), new.field("error")), pa.array(taken))
        return pa.StructArray.from_arrays([items, error], fields=list(old.type))


@dataclass(frozen=True)
class Registers:
    """Registers of a HyperLogLog, as numbers ``64 * index + rank``: of one index the highest rank counts."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old, new)
        packed = elements.to_numpy().astype(np.int64)
        order = np.lexsort((packed, rows))
        rows, packed = rows[order], packed[order]
        last = np.ones(len(rows), dtype=np.bool_)
        last[:-1] = (rows[1:] != rows[:-1]) | (packed[1:] >> 6 != packed[:-1] >> 6)
        return _lists(pa.array(packed[last], elements.type), rows[last], old)


def _flat(old: pa.Array, new: pa.Array) -> tuple[pa.Array, Numbers]:
    """Returns the elements of both columns of lists, and of each the row that it belongs to. A null has no elements."""
    elements = pa.concat_arrays([old.flatten(), new.flatten()])
    return elements, np.concatenate([np.repeat(np.arange(len(lists)), _lengths(lists)) for lists in (old, new)])


def _lengths(lists: pa.Array) -> Numbers:
    lengths: Numbers = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _grouped(rows: Numbers, values: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Returns an order in which equal values of a row are neighbours, and where in that order a new one begins."""
    order = np.lexsort((values, rows))
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (np.diff(rows[order]) != 0) | (np.diff(values[order]) != 0)
    return order, first


def _added_up(elements: pa.Array, rows: Numbers) -> tuple[pa.Array, Numbers, Numbers]:
    """Returns of each row the values without repetition, sorted, their counts, and the row."""
    values, counts = elements.flatten()
    order, first = _grouped(rows, ranks(values))
    starts = np.flatnonzero(first)
    totals = counts.to_numpy(zero_copy_only=False)[order]
    totals = np.add.reduceat(totals, starts) if len(starts) else totals
    kept = order[first]
    return values.take(pa.array(kept)), totals.astype(np.int64), rows[kept]


def _pairs(values: pa.Array, counts: Numbers, kind: pa.DataType) -> pa.Array:
    return pa.StructArray.from_arrays([values, pa.array(counts, kind.field(1).type)], fields=list(kind))


def _lists(elements: pa.Array, rows: Numbers, like: pa.Array) -> pa.Array:
    """Makes elements, which are in the order of their rows, lists of a type."""
    counts = np.bincount(rows, minlength=len(like)) if len(rows) else np.zeros(len(like), dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements, type=like.type)
