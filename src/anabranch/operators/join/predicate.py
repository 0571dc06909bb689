"""A join's condition on pairs of rows, evaluated in columns with Spark's rules for nulls and NaN.

Spark has computed what needs one side only, as a column of that side: the rest are comparisons of
such columns, simple arithmetic between them, and logic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: The two sides of a join, as numbers.
LEFT, RIGHT = 0, 1


@dataclass(frozen=True)
class ColumnPlace:
    """Where a column of a side is held: in the join's key, or among the side's values."""

    key: bool
    position: int


@dataclass(frozen=True)
class Operand:
    """A column of one side."""

    side: int
    place: ColumnPlace


@dataclass(frozen=True)
class Constant:
    """A value that is the same for all pairs."""

    value: pa.Scalar


@dataclass(frozen=True)
class FunctionCall:
    """A function of other terms; `option` is what the function needs to know besides."""

    function: str
    arguments: tuple[Term, ...]
    option: Any = None


Term = Operand | Constant | FunctionCall
#: Gives the values of an operand for the pairs in question.
Columns = Callable[[Operand], pa.Array]
#: An array or a scalar of Arrow's.
Value = Any


def holds(term: Term, columns: Columns) -> pa.Array | pa.Scalar:
    """Tells for each pair whether the condition is true; null is not."""
    return pc.fill_null(_value(term, columns), False)


def _value(term: Term, columns: Columns) -> Value:
    if isinstance(term, Operand):
        return columns(term)
    if isinstance(term, Constant):
        return term.value
    values = [_value(argument, columns) for argument in term.arguments]
    return FUNCTIONS[term.function](values, term.option)


def _comparison(plain: Callable[[Value, Value], Value], with_nan: Callable[[Value, Value], Value]) -> Any:
    """Compares as Spark does: NaN equals NaN, and is greater than any other number."""

    def compare(values: list[Value], option: Any) -> Value:
        del option
        first, second = values
        result = plain(first, second)
        if not pa.types.is_floating(first.type):
            return result
        return pc.or_(result, with_nan(pc.is_nan(first), pc.is_nan(second)))

    return compare


def _equal_null_safe(values: list[Value], option: Any) -> Value:
    equal = pc.fill_null(FUNCTIONS["equal"](values, option), False)
    first, second = values
    return pc.or_(equal, pc.and_(pc.is_null(first), pc.is_null(second)))


def _arithmetic(name: str) -> Any:
    """Makes a function of which the option tells whether an overflow is an error, as with ANSI, or wraps around."""
    checked, wrapping = getattr(pc, f"{name}_checked"), getattr(pc, name)

    def calculate(values: list[Value], option: Any) -> Value:
        return (checked if option else wrapping)(*values)

    return calculate


def _subtract_timestamps(values: list[Value], option: Any) -> Value:
    """Returns the time between two clocks on the wall, in the session's time zone, which is what Spark takes it for."""
    if option is None:
        return pc.subtract(*values)
    local = [pc.local_timestamp(value.cast(pa.timestamp("us", option))) for value in values]
    return pc.subtract(*local)


FUNCTIONS: dict[str, Callable[[list[Value], Any], Value]] = {
    "and": lambda values, _: pc.and_kleene(*values),
    "or": lambda values, _: pc.or_kleene(*values),
    "not": lambda values, _: pc.invert(values[0]),
    "is_null": lambda values, _: pc.is_null(values[0]),
    "is_not_null": lambda values, _: pc.is_valid(values[0]),
    "coalesce": lambda values, _: pc.coalesce(*values),
    "equal": _comparison(pc.equal, lambda first, second: pc.and_(first, second)),
    "less": _comparison(pc.less, lambda first, second: pc.and_(pc.invert(first), second)),
    "less_equal": _comparison(pc.less_equal, lambda first, second: pc.or_(second, pc.and_(first, second))),
    "greater": _comparison(pc.greater, lambda first, second: pc.and_(first, pc.invert(second))),
    "greater_equal": _comparison(pc.greater_equal, lambda first, second: pc.or_(first, pc.and_(first, second))),
    "equal_null_safe": _equal_null_safe,
    "add": _arithmetic("add"),
    "subtract": _arithmetic("subtract"),
    "multiply": _arithmetic("multiply"),
    "negate": _arithmetic("negate"),
    "abs": _arithmetic("abs"),
    "subtract_timestamps": _subtract_timestamps,
    "cast": lambda values, option: values[0].cast(option),
}
