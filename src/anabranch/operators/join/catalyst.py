"""Spark's own analysis of a join: which columns are equal, what else must hold, and when rows are over.

Spark resolves the names, whichever way the user gave them, checks what it does not allow, and finds out from the
condition how long rows can wait for a match. All of it is read from the plan that Spark makes of the join.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import DataType, StructField, _parse_datatype_json_string

from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark.java import java_class
from anabranch.operators.join.predicate import LEFT, RIGHT
from anabranch.operators.join.sides import JoinType
from anabranch.operators.keys import WATERMARK

_CATALYST = "org.apache.spark.sql.catalyst"
_JOIN_HELPER = "org.apache.spark.sql.execution.streaming.operators.stateful.join.StreamingSymmetricHashJoinHelper"
#: Some watermark, far enough from zero: Spark moves it by the time that rows of a side can wait.
_SOME_WATERMARK_MS = 10**13


@dataclass(frozen=True)
class JoinPlan:
    """A join of two streams as Spark sees it. Expressions and attributes are Spark's own objects."""

    how: JoinType
    #: The inputs, by side.
    inputs: tuple[DataFrame, DataFrame]
    #: The attributes that each side puts into the result.
    attributes: tuple[list[Any], list[Any]]
    #: What must be equal, by side, in the same order.
    keys: tuple[list[Any], list[Any]]
    #: What must hold besides, in parts that all have to.
    conjuncts: list[Any]
    #: By side, how far the watermark is moved to tell which rows are over; None if rows wait for ever.
    offsets_ms: tuple[int | None, int | None]
    #: What Spark makes of the joined rows, if the join was by names: a projection for each level, innermost first.
    projections: list[list[Any]]


def analyse(joined: DataFrame) -> JoinPlan:
    """Read the plan of ``left.join(right, …)``, of two streaming DataFrames."""
    spark = joined.sparkSession
    try:
        plan = check_streaming(joined)
    except PySparkException as error:
        raise _refused(error) from None
    original, _ = _join_node(joined._jdf.queryExecution().analyzed())
    node, projections = _join_node(plan)
    found = java_class(f"{_CATALYST}.planning.ExtractEquiJoinKeys").unapply(node)
    if not found.isDefined():
        raise UnsupportedError(
            "A join of two streams needs at least one equality between a column of each, as in "
            "left.join(right, left.k == right.k)."
        )
    parts = found.get()
    how = str(parts._1().toString())
    if how not in {kind.value for kind in JoinType}:
        raise UnsupportedError(f"A {how} join of two streams is not supported. Use inner, outer or left semi.")
    outputs = node.left().output(), node.right().output()
    for output in outputs:
        _check_one_event_time(items(output))
    helper = java_class(_JOIN_HELPER)
    some = java_class("scala.Option").apply(_SOME_WATERMARK_MS)
    try:
        moved = helper.getStateWatermark(*outputs, parts._2(), parts._3(), parts._4(), some, False)
    except PySparkException as error:
        raise _refused(error) from None
    from_plan = java_class("org.apache.spark.sql.classic.Dataset").ofRows
    left, right = (DataFrame(from_plan(spark._jsparkSession, side), spark) for side in (node.left(), node.right()))
    return JoinPlan(
        how=JoinType(how),
        inputs=(left, right),
        attributes=(items(original.left().output()), items(original.right().output())),
        keys=(items(parts._2()), items(parts._3())),
        conjuncts=list(_conjuncts(parts._4().get())) if parts._4().isDefined() else [],
        offsets_ms=tuple(  # type: ignore[arg-type]
            int(side.get()) - _SOME_WATERMARK_MS if side.isDefined() else None for side in (moved._1(), moved._2())
        ),
        projections=projections,
    )


def check_streaming(rows: DataFrame) -> Any:
    """The plan, simplified, if Spark allows it on streams in append mode; else an exception of Spark's."""
    plan = _simplified(rows._jdf.queryExecution().analyzed())
    append = java_class("org.apache.spark.sql.streaming.OutputMode").Append()
    java_class(f"{_CATALYST}.analysis.UnsupportedOperationChecker").checkForStreaming(plan, append)
    return plan


def items(sequence: Any) -> list[Any]:
    """The elements of a Scala sequence."""
    return [sequence.apply(i) for i in range(sequence.size())]


def kind_of(node: Any) -> str:
    """The name of an expression's class."""
    return str(node.getClass().getSimpleName())


def column_of(expression: Any) -> Column:
    return Column(java_class("org.apache.spark.sql.classic.ExpressionUtils").column(expression))


def type_of(expression: Any) -> DataType:
    return _parse_datatype_json_string(expression.dataType().json())


def field_of(expression: Any, name: str) -> StructField:
    return StructField(name, type_of(expression), True)


def has_watermark(expression: Any) -> bool:
    """Whether it is a column under a watermark: Spark marks such columns, windows included."""
    return kind_of(expression) == "AttributeReference" and bool(expression.metadata().contains(WATERMARK))


def sides_of(expression: Any, plan: JoinPlan) -> frozenset[int]:
    """The sides whose columns it uses."""
    references = expression.references()
    if references.isEmpty():
        return frozenset()
    for side in (LEFT, RIGHT):
        if references.subsetOf(_analysed(plan.inputs[side]).outputSet()):
            return frozenset({side})
    return frozenset({LEFT, RIGHT})


def renamed(rows: DataFrame, attributes: Sequence[Any]) -> DataFrame:
    """The rows with their columns known by these attributes' names, qualifiers and ids, in the same order.

    So whatever a user could say about the columns of Spark's join can be said about them.
    """
    make_alias = java_class(f"{_CATALYST}.expressions.Alias")
    nothing = java_class("org.apache.spark.api.python.PythonUtils").toSeq([])
    option = java_class("scala.Option")
    output = attributes_of(rows)
    if all(column.exprId().equals(attribute.exprId()) for column, attribute in zip(output, attributes, strict=True)):
        return rows
    columns = []
    for column, attribute in zip(output, attributes, strict=True):
        metadata = option.apply(attribute.metadata())
        alias = make_alias(column, attribute.name(), attribute.exprId(), attribute.qualifier(), metadata, nothing)
        columns.append(column_of(alias))
    return rows.select(*columns)


def attributes_of(rows: DataFrame) -> list[Any]:
    """Spark's attributes of the columns."""
    return items(_analysed(rows).output())


def _analysed(rows: DataFrame) -> Any:
    return rows._jdf.queryExecution().analyzed()


def _simplified(plan: Any) -> Any:
    """The plan with constants computed, without forms of expressions that only stand for others, and with keys of
    which one number has one form: 0.0 and -0.0 are equal, and so are all NaN."""
    for rule in ("ReplaceExpressions", "RewriteWithExpression", "ConstantFolding", "NormalizeFloatingNumbers"):
        plan = java_class(f"{_CATALYST}.optimizer.{rule}").apply(plan)
    return plan


def _join_node(plan: Any) -> tuple[Any, list[list[Any]]]:
    projections: list[list[Any]] = []
    while plan.nodeName() != "Join":
        if plan.nodeName() != "Project":
            raise UnsupportedError(f"The join cannot be run: Spark put a {plan.nodeName()} around it.")
        projections.insert(0, items(plan.projectList()))
        plan = plan.child()
    return plan, projections


def _check_one_event_time(attributes: Sequence[Any]) -> None:
    marked = {str(each.exprId().toString()): repr(str(each.name())) for each in attributes if has_watermark(each)}
    if len(marked) > 1:
        raise UnsupportedError(
            f"The columns {', '.join(marked.values())} of one side of the join all have a watermark, so it is not "
            "clear which rows are late: Spark does not allow it either. Select one of them before the join, or cast "
            "the others to timestamp again, for example F.col('x').cast('string').cast('timestamp')."
        )


def _conjuncts(expression: Any) -> Iterator[Any]:
    if kind_of(expression) == "And":
        yield from _conjuncts(expression.left())
        yield from _conjuncts(expression.right())
    else:
        yield expression


def _refused(error: PySparkException) -> UnsupportedError:
    return UnsupportedError(
        f"Spark does not allow this join: {_first_line(error)}. Set withWatermark on both streams and bound the "
        "difference of their times in the condition, or use an inner join."
    )


def _first_line(error: PySparkException) -> str:
    return str(error).splitlines()[0].rstrip(";")
