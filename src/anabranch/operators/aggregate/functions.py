"""From Spark's own aggregate columns, such as ``F.sum("x").alias("total")``, to mergeable partial aggregates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    NumericType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from anabranch.core.errors import UnsupportedError
from anabranch.operators.aggregate.merge import Merge

_ORDERABLE = (
    NumericType,
    StringType,
    BinaryType,
    BooleanType,
    DateType,
    TimestampType,
    TimestampNTZType,
)
SUPPORTED = ("count", "sum", "avg", "min", "max")


@dataclass(frozen=True)
class Buffer:
    """One column of partial aggregate: how Spark computes it from an epoch's rows, and how two of them merge."""

    suffix: str
    partial: Callable[[Sequence[Column]], Column]
    type: DataType
    merge: Merge
    #: How many buffers further on is the one that tells whether any value was seen: a sum of decimals that is null
    #: although it has seen some has overflowed, and stays null. 0: a null means that there was no value yet.
    seen: int = 0


@dataclass(frozen=True)
class AggregateFunction:
    """An aggregate as the user wrote it, taken apart."""

    name: str
    #: The expressions that it aggregates; they may be bound to the DataFrame that the user took them from.
    arguments: tuple[Column, ...]
    #: Its name and type in the result.
    output_name: str
    output_type: DataType
    buffers: tuple[Buffer, ...]
    #: From the merged buffers to the result.
    finish: Callable[[Sequence[Column]], Column]


@dataclass(frozen=True)
class Call:
    """A function column before its types are known."""

    function: str
    arguments: tuple[Column, ...]
    text: str


def parse(column: Column) -> Call:
    """Read function and arguments from a column, or say why it cannot be merged."""
    node = _node_of(column)
    text = node.sql()
    while node.getClass().getSimpleName() == "Alias":
        node = node.child()
    kind = node.getClass().getSimpleName()
    if kind == "SqlExpression":
        raise UnsupportedError(
            f"The aggregate {text!r} is SQL text, which cannot be taken apart. Write it with functions, for example "
            "F.sum('x') instead of F.expr('sum(x)')."
        )
    if kind != "UnresolvedFunction" or node.functionName().lower() not in SUPPORTED:
        raise UnsupportedError(
            f"The aggregate {text!r} is not supported. Supported are {', '.join(SUPPORTED)}, each on its own: "
            "compute expressions of several aggregates in a select after the aggregation."
        )
    if node.isDistinct():
        raise UnsupportedError(f"The aggregate {text!r} is over distinct values, which is not supported.")
    arguments = node.arguments()
    parts = [arguments.apply(position) for position in range(arguments.size())]
    columns = tuple(_column(part) for part in parts if part.getClass().getSimpleName() != "UnresolvedStar")
    return Call(node.functionName().lower(), columns, text)


def sql_of(column: Column) -> str:
    """The column as SQL-like text."""
    text: str = _node_of(column).sql()
    return text


def resolve(
    call: Call, *, argument_types: Sequence[DataType], output_name: str, output_type: DataType, ansi: bool
) -> AggregateFunction:
    """Choose the partial aggregates of a call whose types Spark has worked out."""
    argument_type = argument_types[0] if argument_types else LongType()
    maker = {"count": _count, "sum": _sum, "avg": _avg, "min": _extreme, "max": _extreme}[call.function]
    buffers, finish = maker(call, argument_type, output_type, ansi)
    return AggregateFunction(call.function, call.arguments, output_name, output_type, buffers, finish)


_Parts = tuple[tuple[Buffer, ...], Callable[[Sequence[Column]], Column]]


def _count(_call: Call, _type: DataType, _output: DataType, _ansi: bool) -> _Parts:
    def partial(inputs: Sequence[Column]) -> Column:
        if len(inputs) <= 1:
            return F.count(inputs[0] if inputs else F.lit(1))
        # Spark's count of several columns counts the rows in which none of them is null.
        nulls = [column.isNull() for column in inputs]
        any_null = nulls[0]
        for null in nulls[1:]:
            any_null = any_null | null
        return F.count(F.when(~any_null, F.lit(1)))

    return (Buffer("", partial, LongType(), Merge.SUM),), lambda buffers: buffers[0]


def _sum(call: Call, argument: DataType, output: DataType, _ansi: bool) -> _Parts:
    _require(call, argument, (NumericType, StringType))
    if isinstance(argument, DecimalType):
        total = Buffer("", lambda inputs: F.sum(inputs[0]), output, Merge.SUM, seen=1)
        seen = Buffer(".seen", lambda inputs: F.count(inputs[0]) > 0, BooleanType(), Merge.MAX)
        return (total, seen), lambda buffers: buffers[0]
    return (Buffer("", lambda inputs: F.sum(inputs[0]), output, Merge.SUM),), lambda buffers: buffers[0]


def _avg(call: Call, argument: DataType, output: DataType, ansi: bool) -> _Parts:
    _require(call, argument, (NumericType, StringType))
    count = Buffer(".count", lambda inputs: F.count(inputs[0]), LongType(), Merge.SUM)
    if isinstance(argument, DecimalType):
        total_type = DecimalType(min(38, argument.precision + 10), argument.scale)
        total = Buffer(".sum", lambda inputs: F.sum(inputs[0]), total_type, Merge.SUM, seen=1)
        return (total, count), lambda b: F.when(b[1] != 0, _divide(b[0], b[1].cast("decimal(20,0)"), output, ansi))
    total = Buffer(".sum", lambda inputs: F.sum(inputs[0].cast("double")), DoubleType(), Merge.SUM)
    return (total, count), lambda b: F.when(b[1] != 0, b[0] / b[1].cast("double"))


def _extreme(call: Call, argument: DataType, output: DataType, _ansi: bool) -> _Parts:
    _require(call, argument, _ORDERABLE)
    function = F.min if call.function == "min" else F.max
    merge = Merge.MIN if call.function == "min" else Merge.MAX
    return (Buffer("", lambda inputs: function(inputs[0]), output, merge),), lambda buffers: buffers[0]


def _require(call: Call, argument: DataType, allowed: tuple[type[DataType], ...]) -> None:
    if not isinstance(argument, allowed):
        raise UnsupportedError(
            f"The aggregate {call.text!r} is not supported over {argument.simpleString()}. "
            "Aggregate one of its fields instead, or use transformWithState."
        )


def _node_of(column: Column) -> Any:
    java_column: Any = column._jc
    return java_column.node()


def _divide(total: Column, count: Column, output: DataType, ansi: bool) -> Column:
    """The division that Spark's own average uses: ``total / count`` rounds to fewer digits than the average has."""
    from pyspark.sql.classic.column import Column as ClassicColumn

    jvm = _jvm()
    columns = jvm.org.apache.spark.sql.classic.ExpressionUtils
    left, right = (columns.expression(column._jc) for column in (total, count))
    result = jvm.org.apache.spark.sql.types.DataType.fromJson(output.json())
    quotient = jvm.org.apache.spark.sql.catalyst.expressions.DecimalDivideWithOverflowCheck(
        left, right, result, None, not ansi
    )
    return ClassicColumn(columns.column(quotient))


def _column(node: Any) -> Column:
    from pyspark.sql.classic.column import Column as ClassicColumn

    return ClassicColumn(_jvm().org.apache.spark.sql.Column(node))


def _jvm() -> Any:
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None or context._jvm is None:
        raise UnsupportedError("There is no active Spark context. Create a SparkSession first.")
    return context._jvm
