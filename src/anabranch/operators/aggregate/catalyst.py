"""Spark's own expressions, as its analyzer leaves them: reading, rebuilding, and turning them into columns and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import DataType, _parse_datatype_json_string

from anabranch.engine.spark.java import is_a, java_class

_EXPRESSIONS = "org.apache.spark.sql.classic.ExpressionUtils"
#: What Spark replaces with another expression before it runs, such as bool_and with min.
REPLACEABLE = "org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable"
#: An expression of Spark's, in the JVM.
Expression = Any


def analysed(rows: DataFrame) -> Any:
    """The DataFrame's plan, with all names and types resolved."""
    frame: Any = rows
    return frame._jdf.queryExecution().analyzed()


def kind(node: Any) -> str:
    """The name of the node's class."""
    name: str = node.getClass().getSimpleName()
    return name


def sequence(items: Any) -> list[Any]:
    """A Scala sequence as a list."""
    return [items.apply(position) for position in range(items.size())]


def children(expression: Expression) -> list[Expression]:
    return sequence(expression.children())


def type_of(expression: Expression) -> DataType:
    return _parse_datatype_json_string(expression.dataType().json())


def rebuilt(expression: Expression, replace: Callable[[Expression], Expression | None]) -> Expression:
    """The expression with those parts replaced for which `replace` has something else."""
    other = replace(expression)
    if other is not None:
        return other
    if is_a(expression, REPLACEABLE):
        # Spark works out its replacement when it is made, which needs the types of all parts: so not of new ones.
        return rebuilt(expression.replacement(), replace)
    if kind(expression) == "With":
        return rebuilt(_inlined(expression), replace)
    before = children(expression)
    after = [rebuilt(child, replace) for child in before]
    if all(a is b for a, b in zip(before, after, strict=True)):
        return expression
    return with_children(expression, after)


def _inlined(expression: Expression) -> Expression:
    """An expression with the parts that it has given names to in their places, as they need types as well."""
    definitions = {found.id().id(): found.child() for found in sequence(expression.defs())}

    def definition(part: Expression) -> Expression | None:
        return definitions.get(part.id().id()) if kind(part) == "CommonExpressionRef" else None

    return rebuilt(expression.child(), definition)


def with_children(expression: Expression, parts: Sequence[Expression]) -> Expression:
    return expression.withNewChildren(scala(parts))


def scala(items: Sequence[Any]) -> Any:
    """A list as an immutable Scala sequence."""
    return java_class("org.apache.spark.api.python.PythonUtils").toSeq(list(items))


def column(expression: Expression) -> Column:
    from pyspark.sql.classic.column import Column as ClassicColumn

    return ClassicColumn(java_class(_EXPRESSIONS).column(expression))


def expression(of: Column) -> Expression:
    java_column: Any = of._jc
    return java_class(_EXPRESSIONS).expression(java_column)


def named(name: str) -> Expression:
    """A column by its name, to be found wherever the expression is used."""
    return java_class("org.apache.spark.sql.catalyst.analysis.UnresolvedAttribute").quoted(name)


def aggregate(function: Expression) -> Column:
    """An aggregate function as a column."""
    return column(function.toAggregateExpression())


def sql_of(of: Column) -> str:
    """The column as SQL-like text."""
    java_column: Any = of._jc
    text: str = java_column.node().sql()
    return text
