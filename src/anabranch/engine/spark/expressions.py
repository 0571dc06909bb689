"""Spark's plans and expressions, as its analyzer leaves them: reading them, rebuilding them, making columns of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, StructField, _parse_datatype_json_string

from anabranch.engine.spark.frames import count_nodes, grouped_parts
from anabranch.engine.spark.java import is_a, java_class

CATALYST = "org.apache.spark.sql.catalyst"
#: What Spark replaces with another expression before it runs, such as bool_and with min.
_REPLACEABLE = f"{CATALYST}.expressions.RuntimeReplaceable"
#: Spark's mark of a column with a watermark, in the field's metadata; its value is the delay in milliseconds.
WATERMARK = "spark.watermarkDelayMs"
_EXPRESSION_UTILS = "org.apache.spark.sql.classic.ExpressionUtils"
_HYPERLOGLOG = f"{CATALYST}.util.HyperLogLogPlusPlusHelper"
#: An expression of Spark's, in the JVM. An attribute is one, too.
Expression = Any
#: A logical plan of Spark's, in the JVM.
Plan = Any


def analysed(rows: DataFrame) -> Plan:
    """Returns the DataFrame's plan, with all names and types resolved."""
    frame: Any = rows
    return frame._jdf.queryExecution().analyzed()


def attributes_of(rows: DataFrame) -> list[Expression]:
    """Returns Spark's attributes of the columns."""
    return sequence(analysed(rows).output())


def streaming_sources(rows: DataFrame) -> int:
    """Counts the streaming sources in the plan."""
    return sum(bool(leaf.isStreaming()) for leaf in sequence(analysed(rows).collectLeaves()))


def tracks_watermark(rows: DataFrame) -> bool:
    """Tells whether Spark tracks a watermark for any part of the plan, also if its column is gone."""
    return count_nodes(rows, {"EventTimeWatermark"}) > 0


def compared_columns(deduplicated: DataFrame) -> list[int]:
    """Returns the positions of the columns that dropDuplicates compares; Spark has found them by their names."""
    node = analysed(deduplicated)
    positions = {id_of(attribute): i for i, attribute in enumerate(sequence(node.child().output()))}
    return sorted({positions[id_of(key)] for key in sequence(node.keys())})


def grouped_rows(grouped: GroupedData) -> tuple[DataFrame, list[Column]]:
    """Returns the DataFrame that was grouped, and the columns by which it was."""
    java_grouped, rows = grouped_parts(grouped)
    return rows, [column(key) for key in sequence(java_grouped.groupingExprs())]


def check_streaming(rows: DataFrame) -> Plan:
    """Returns the plan, simplified, if Spark allows it on streams in append mode; else Spark's exception is raised.

    Constants are computed, forms of expressions that only stand for others are replaced, and keys have one form of each
    number: 0.0 and -0.0 are equal, and so are all NaN.
    """
    plan = analysed(rows)
    for rule in ("ReplaceExpressions", "RewriteWithExpression", "ConstantFolding", "NormalizeFloatingNumbers"):
        plan = java_class(f"{CATALYST}.optimizer.{rule}").apply(plan)
    append = java_class("org.apache.spark.sql.streaming.OutputMode").Append()
    java_class(f"{CATALYST}.analysis.UnsupportedOperationChecker").checkForStreaming(plan, append)
    return plan


def rows_of_plan(spark: SparkSession, plan: Plan) -> DataFrame:
    """Makes a DataFrame of a plan."""
    session: Any = spark
    return DataFrame(java_class("org.apache.spark.sql.classic.Dataset").ofRows(session._jsparkSession, plan), spark)


def renamed(rows: DataFrame, attributes: Sequence[Expression]) -> DataFrame:
    """Returns the rows with their columns known by these attributes' names, qualifiers and ids, in the same order.

    So what a user could say about the attributes' DataFrame can be said about these rows.
    """
    output = attributes_of(rows)
    if all(own.exprId().equals(attribute.exprId()) for own, attribute in zip(output, attributes, strict=True)):
        return rows
    make_alias, option = java_class(f"{CATALYST}.expressions.Alias"), java_class("scala.Option")
    columns = []
    for own, attribute in zip(output, attributes, strict=True):
        metadata = option.apply(attribute.metadata())
        alias = make_alias(own, attribute.name(), attribute.exprId(), attribute.qualifier(), metadata, scala([]))
        columns.append(column(alias))
    return rows.select(*columns)


def bytes_of(size: str) -> int:
    """Reads a size as Spark writes it, such as 64m."""
    return int(java_class("org.apache.spark.network.util.JavaUtils").byteStringAsBytes(size))


def kind(node: Any) -> str:
    """Returns the name of the node's class."""
    return str(node.getClass().getSimpleName())


def sequence(items: Any) -> list[Any]:
    """Returns a Scala sequence as a list."""
    return [items.apply(position) for position in range(items.size())]


def scala(items: Sequence[Any]) -> Any:
    """Returns a list as an immutable Scala sequence."""
    return java_class("org.apache.spark.api.python.PythonUtils").toSeq(list(items))


def children(node: Any) -> list[Any]:
    """Returns the parts of an expression, or the inputs of a plan's node."""
    return sequence(node.children())


def type_of(expression: Expression) -> DataType:
    """Returns the type of an expression's values."""
    return _parse_datatype_json_string(expression.dataType().json())


def field_of(expression: Expression, name: str) -> StructField:
    """Returns the field that a column with the expression's values has."""
    return StructField(name, type_of(expression), True)


def id_of(attribute: Expression) -> str:
    """Returns what tells an attribute from all others."""
    return str(attribute.exprId().toString())


def has_watermark(expression: Expression) -> bool:
    """Tells whether it is a column under a watermark: Spark marks such columns, windows included."""
    return kind(expression) == "AttributeReference" and bool(expression.metadata().contains(WATERMARK))


def replacement(expression: Expression) -> Expression:
    """Returns what Spark runs instead of an expression that only stands for another, such as min for bool_and."""
    while is_a(expression, _REPLACEABLE):
        expression = expression.replacement()
    return expression


def rebuilt(expression: Expression, replace: Callable[[Expression], Expression | None]) -> Expression:
    """Returns the expression with those parts replaced for which `replace` returns something else."""
    other = replace(expression)
    if other is not None:
        return other
    if is_a(expression, _REPLACEABLE):
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
    """Returns an expression with the parts that it has given names to in their places, as they need types as well."""
    definitions = {found.id().id(): found.child() for found in sequence(expression.defs())}

    def definition(part: Expression) -> Expression | None:
        return definitions.get(part.id().id()) if kind(part) == "CommonExpressionRef" else None

    return rebuilt(expression.child(), definition)


def with_children(expression: Expression, parts: Sequence[Expression]) -> Expression:
    """Returns the expression with other parts."""
    return expression.withNewChildren(scala(parts))


def column(expression: Expression) -> Column:
    """Makes a column of an expression."""
    from pyspark.sql.classic.column import Column as ClassicColumn

    return ClassicColumn(java_class(_EXPRESSION_UTILS).column(expression))


def expression(of: Column) -> Expression:
    """Returns the expression of a column."""
    java_column: Any = of._jc
    return java_class(_EXPRESSION_UTILS).expression(java_column)


def named(name: str) -> Expression:
    """Returns a column by its name, to be found wherever the expression is used."""
    return java_class(f"{CATALYST}.analysis.UnresolvedAttribute").quoted(name)


def aggregate(function: Expression) -> Column:
    """Makes a column of an aggregate function."""
    return column(function.toAggregateExpression())


def sql_of(of: Column) -> str:
    """Returns the column as SQL-like text."""
    java_column: Any = of._jc
    return str(java_column.node().sql())


def sum_of_decimals(values: Column, kind: DecimalType, *, fails: bool) -> Column:
    """Returns the sum of an array's decimals as Spark's own aggregate takes it: null, or an error, if it does not fit.

    A plus of two columns would make room in front, at the cost of digits.
    """
    java_type = java_class("org.apache.spark.sql.types.DataTypes").createDecimalType(kind.precision, kind.scale)
    package = f"{CATALYST}.expressions"

    def add(sum: Column, value: Column) -> Column:
        parts = [expression(part) for part in (sum, value.cast(kind))]
        return column(java_class(f"{package}.DecimalAddNoOverflowCheck")(*parts, java_type))

    total = expression(F.aggregate(values, F.lit(0).cast(kind), add))
    return column(java_class(f"{package}.CheckOverflowInSum")(total, java_type, not fails, None))


def hyperloglog_bias(raw: Column, deviation: float) -> Column:
    """Returns the bias of a raw estimate by Spark's own table, which is code and not an expression."""
    helper = java_class(_HYPERLOGLOG)(deviation)
    object_type = java_class("org.apache.spark.sql.types.ObjectType")
    target = java_class(f"{CATALYST}.expressions.Literal")(helper, object_type(helper.getClass()))
    # Of an expression that is not analysed yet, such as a literal, Spark says that its type is void.
    double = java_class("org.apache.spark.sql.types.DataTypes").DoubleType
    invoke = java_class(f"{CATALYST}.expressions.objects.Invoke")
    arguments = scala([expression(raw)])
    return column(invoke(target, "estimateBias", double, arguments, scala([]), True, True, True))


def hyperloglog_threshold(bits: int) -> float:
    """Returns the linear count up to which Spark takes that for its estimate, with 2 to the `bits` registers."""
    return float(java_class(_HYPERLOGLOG).THRESHOLDS()[bits - 4])
