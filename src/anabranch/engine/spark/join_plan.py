"""Spark's own analysis of a join: which columns are equal, what else must hold, and when rows are over.

Spark resolves the names, in each way in which a user can give them, checks what it does not allow, and finds out from
the condition how long rows can wait for a match. All of it is read from the plan that Spark makes of the join.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark.expressions import (
    CATALYST,
    Expression,
    Plan,
    analysed,
    check_streaming,
    has_watermark,
    id_of,
    kind,
    rows_of_plan,
    sequence,
)
from anabranch.engine.spark.java import java_class

_JOIN_HELPER = "org.apache.spark.sql.execution.streaming.operators.stateful.join.StreamingSymmetricHashJoinHelper"
#: Some watermark, far enough from zero: Spark moves it by the time that rows of a side can wait.
_SOME_WATERMARK_MS = 10**13


@dataclass(frozen=True)
class JoinPlan:
    """A join of two streams as Spark sees it. What there is of each side stands in a pair, the left one first."""

    #: Spark's name of the join type.
    how: str
    #: The rows of the sides.
    inputs: tuple[DataFrame, DataFrame]
    #: The attributes that each side puts into the result.
    attributes: tuple[list[Expression], list[Expression]]
    #: What must be equal, in the same order on both sides.
    keys: tuple[list[Expression], list[Expression]]
    #: What must hold besides, in parts that all have to.
    conjuncts: list[Expression]
    #: How far the watermark is moved to tell which rows of a side are over; None if rows wait for ever.
    offsets_ms: tuple[int | None, int | None]
    #: What Spark makes of the joined rows, if the join was by names: a projection for each level, innermost first.
    projections: list[list[Expression]]

    def sides_of(self, expression: Expression) -> frozenset[int]:
        """Returns the sides whose columns an expression uses: 0 is the left one."""
        references = expression.references()
        if references.isEmpty():
            return frozenset()
        for side, rows in enumerate(self.inputs):
            if references.subsetOf(analysed(rows).outputSet()):
                return frozenset({side})
        return frozenset({0, 1})


def analysed_join(joined: DataFrame, types: Collection[str]) -> JoinPlan:
    """Reads the plan of ``left.join(right, …)``, of two streaming DataFrames; refuses joins of other types."""
    spark = joined.sparkSession
    try:
        plan = check_streaming(joined)
    except PySparkException as error:
        raise _refused(error) from None
    original, _ = _join_node(analysed(joined))
    node, projections = _join_node(plan)
    found = java_class(f"{CATALYST}.planning.ExtractEquiJoinKeys").unapply(node)
    if not found.isDefined():
        raise UnsupportedError(
            "A join of two streams needs at least one equality between a column of each, as in "
            "left.join(right, left.k == right.k)."
        )
    parts = found.get()
    how = str(parts._1().toString())
    if how not in types:
        raise UnsupportedError(f"A {how} join of two streams is not supported. Use inner, outer or left semi.")
    outputs = node.left().output(), node.right().output()
    for output in outputs:
        _check_one_event_time(sequence(output))
    some = java_class("scala.Option").apply(_SOME_WATERMARK_MS)
    try:
        moved = java_class(_JOIN_HELPER).getStateWatermark(*outputs, parts._2(), parts._3(), parts._4(), some, False)
    except PySparkException as error:
        raise _refused(error) from None
    return JoinPlan(
        how=how,
        inputs=(rows_of_plan(spark, node.left()), rows_of_plan(spark, node.right())),
        attributes=(sequence(original.left().output()), sequence(original.right().output())),
        keys=(sequence(parts._2()), sequence(parts._3())),
        conjuncts=list(_conjuncts(parts._4().get())) if parts._4().isDefined() else [],
        offsets_ms=(_offset_ms(moved._1()), _offset_ms(moved._2())),
        projections=projections,
    )


def _join_node(plan: Plan) -> tuple[Plan, list[list[Expression]]]:
    projections: list[list[Expression]] = []
    while plan.nodeName() != "Join":
        if plan.nodeName() != "Project":
            raise UnsupportedError(f"The join cannot be run: Spark put a {plan.nodeName()} around it.")
        projections.insert(0, sequence(plan.projectList()))
        plan = plan.child()
    return plan, projections


def _offset_ms(moved: Any) -> int | None:
    return int(moved.get()) - _SOME_WATERMARK_MS if moved.isDefined() else None


def _check_one_event_time(attributes: Sequence[Expression]) -> None:
    marked = {id_of(attribute): repr(str(attribute.name())) for attribute in attributes if has_watermark(attribute)}
    if len(marked) > 1:
        raise UnsupportedError(
            f"The columns {', '.join(marked.values())} of one side of the join all have a watermark, so it is not "
            "clear which rows are late: Spark does not allow it either. Select one of them before the join, or cast "
            "the others to timestamp again, for example F.col('x').cast('string').cast('timestamp')."
        )


def _conjuncts(expression: Expression) -> Iterator[Expression]:
    if kind(expression) == "And":
        yield from _conjuncts(expression.left())
        yield from _conjuncts(expression.right())
    else:
        yield expression


def _refused(error: PySparkException) -> UnsupportedError:
    reason = str(error).splitlines()[0].rstrip(";")
    return UnsupportedError(
        f"Spark does not allow this join: {reason}. Set withWatermark on both streams and bound the "
        "difference of their times in the condition, or use an inner join."
    )
