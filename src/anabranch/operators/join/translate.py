"""From Spark's expressions to terms that tasks can evaluate on pairs of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    AtomicType,
    DataType,
    DayTimeIntervalType,
    DoubleType,
    FractionalType,
    IntegralType,
    NumericType,
    StringType,
)
from pyspark.sql.types import DecimalType as Decimal

from anabranch.core.errors import UnsupportedError
from anabranch.operators.join.catalyst import JoinPlan, column_of, items, kind_of, sides_of, type_of
from anabranch.operators.join.predicate import Call, Constant, Operand, Term

_LOGIC = {"And": "and", "Or": "or", "Not": "not"}
_NULLS = {"IsNull": "is_null", "IsNotNull": "is_not_null"}
_COMPARISONS = {
    "EqualTo": "equal",
    "EqualNullSafe": "equal_null_safe",
    "LessThan": "less",
    "LessThanOrEqual": "less_equal",
    "GreaterThan": "greater",
    "GreaterThanOrEqual": "greater_equal",
}
_ARITHMETIC = {"Add": "add", "Subtract": "subtract", "Multiply": "multiply", "UnaryMinus": "negate", "Abs": "abs"}

#: Makes a column of one side out of an expression that uses no other, and says where tasks find it.
OperandOf = Callable[[int, Any], Operand]


class Translator:
    """Translates conditions of one join."""

    def __init__(self, spark: SparkSession, plan: JoinPlan, operand_of: OperandOf) -> None:
        self._spark = spark
        self._plan = plan
        self._operand_of = operand_of

    def term(self, expression: Any) -> Term:
        if not expression.deterministic():
            raise _refusal(expression, "gives another value each time")
        sides = sides_of(expression, self._plan)
        if not sides:
            return self._constant(expression)
        if len(sides) == 1:
            (side,) = sides
            return self._operand_of(side, expression)
        return self._of_both_sides(expression)

    def _of_both_sides(self, expression: Any) -> Term:
        kind = kind_of(expression)
        children = items(expression.children())
        if kind in _LOGIC:
            return self._call(_LOGIC[kind], children)
        if kind in _NULLS:
            return self._call(_NULLS[kind], children)
        if kind in _COMPARISONS:
            _check_comparable(expression, type_of(children[0]))
            return self._call(_COMPARISONS[kind], children)
        if kind == "Coalesce":
            return self._call("coalesce", children)
        if kind in _ARITHMETIC and _is_plain_number(type_of(expression)):
            return self._call(_ARITHMETIC[kind], children, option=_fails_on_overflow(expression))
        if kind == "SubtractTimestamps" and isinstance(type_of(expression), DayTimeIntervalType):
            with_zone = type_of(children[0]).typeName() == "timestamp"
            zone = self._spark.conf.get("spark.sql.session.timeZone") if with_zone else None
            return self._call("subtract_timestamps", children, option=zone)
        if kind == "Cast" and _widens(type_of(children[0]), type_of(expression)):
            return self._call("cast", children, option=to_arrow_type(type_of(expression), timezone="UTC"))
        raise _refusal(expression, f"combines columns of both streams with {expression.prettyName()}")

    def _call(self, function: str, children: list[Any], option: Any = None) -> Call:
        return Call(function, tuple(self.term(child) for child in children), option)

    def _constant(self, expression: Any) -> Constant:
        kind = type_of(expression)
        # Spark computes a row without a source in the driver.
        row = self._spark.sql("SELECT 1").select(column_of(expression)).first()
        assert row is not None
        return Constant(pa.scalar(row[0], to_arrow_type(kind, timezone="UTC")))


def _refusal(expression: Any, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"The join condition {expression.sql()} {why}, which is not supported. Compare an expression of one stream "
        "with one of the other, as in left.x <= right.y + 1, or filter the joined rows (inner joins only)."
    )


def _check_comparable(expression: Any, kind: DataType) -> None:
    if isinstance(kind, StringType) and not kind.isUTF8BinaryCollation():
        raise _refusal(expression, f"compares strings under the collation {kind.collation}")
    if not isinstance(kind, AtomicType):
        raise _refusal(expression, f"compares values of type {kind.simpleString()}")


def _is_plain_number(kind: DataType) -> bool:
    return isinstance(kind, NumericType) and not isinstance(kind, Decimal)


def _fails_on_overflow(expression: Any) -> bool:
    """As Spark's own arithmetic, under its ANSI mode, for whole numbers."""
    if isinstance(type_of(expression), FractionalType):
        return False
    return bool(expression.failOnError())


def _widens(given: DataType, wanted: DataType) -> bool:
    """Whether every value of one number type is the same in the other."""
    if isinstance(given, IntegralType) and isinstance(wanted, IntegralType):
        sizes = {"byte": 1, "short": 2, "integer": 4, "long": 8}
        return sizes[given.typeName()] <= sizes[wanted.typeName()]
    return _is_plain_number(given) and isinstance(wanted, DoubleType)
