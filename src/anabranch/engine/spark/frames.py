"""DataFrames beyond their methods: what Spark's plans of them say, and what Spark can do with them inside the JVM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.group import GroupedData

#: Nodes of plans that keep no state on a stream. A join does, if both of its sides are streams.
_STATELESS_NODES = frozenset({
    "CTERelationDef", "CTERelationRef", "CollectMetrics", "EventTimeWatermark", "Expand", "Filter", "Generate", "Join",
    "MapInArrow", "MapInPandas", "Project", "Repartition", "RepartitionByExpression", "ResolvedHint",
    "StreamingRelation", "StreamingRelationV2", "SubqueryAlias", "Union", "UnresolvedHint", "View", "WithCTE",
})  # fmt: skip


def run_all_partitions(rows: DataFrame) -> int:
    """Computes all rows, keeps none, and returns how many there are."""
    return rows._jdf.queryExecution().toRdd().count()  # type: ignore[no-any-return]


def plan_ahead(rows: DataFrame) -> None:
    """Lets Spark plan how to compute the rows, without computing them."""
    rows._jdf.queryExecution().executedPlan()


def as_read(rows: DataFrame) -> DataFrame:
    """Returns the same rows without the plan that they come from, as if they had been read.

    A join gives the columns of its sides ids, and its result has the same ones. Where they are in one plan already,
    Spark would replace them by others.
    """
    jdf: Any = rows._jdf
    session: Any = rows.sparkSession._jsparkSession
    made = session.internalCreateDataFrame(jdf.queryExecution().toRdd(), jdf.schema(), False)
    return DataFrame(made, rows.sparkSession)


def plain(rows: DataFrame) -> DataFrame:
    """Returns the same rows as a DataFrame of Spark's own class, also if the session has been enabled."""
    return ClassicDataFrame(*frame_parts(rows))


def frame_parts(rows: DataFrame) -> tuple[Any, SparkSession]:
    """Returns the arguments that make the same DataFrame again."""
    return rows._jdf, rows.sparkSession


def grouped_parts(grouped: GroupedData) -> tuple[Any, DataFrame]:
    """Returns the arguments that make the same grouped DataFrame again."""
    return grouped._jgd, grouped._df


def estimated_bytes(rows: DataFrame) -> int:
    """Returns how large Spark thinks the rows are."""
    plan: Any = rows._jdf.queryExecution().optimizedPlan()
    return int(str(plan.stats().sizeInBytes()))


def shown(rows: DataFrame, *, row_limit: int, truncate: bool) -> str:
    """Returns the first rows as text, in Spark's own table."""
    return str(rows._jdf.showString(row_limit, 20 if truncate else 0, False))


def count_nodes(rows: DataFrame, names: Collection[str]) -> int:
    """Counts the nodes of these names in the plan of the rows."""
    return sum(str(node.nodeName()) in names for node in _nodes(_analysed(rows)))


def stateful_node(rows: DataFrame) -> str | None:
    """Returns the name of a node of the plan that keeps state on a stream, or may do so; None if there is none."""
    return _stateful_node(_analysed(rows))


def _stateful_node(plan: Any) -> str | None:
    if not plan.isStreaming():
        return None
    children = _children(plan)
    name: str = plan.nodeName()
    if name not in _STATELESS_NODES or (name == "Join" and all(child.isStreaming() for child in children)):
        return name
    return next(filter(None, map(_stateful_node, children)), None)


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    for child in _children(plan):
        yield from _nodes(child)


def _children(plan: Any) -> list[Any]:
    children = plan.children()
    return [children.apply(i) for i in range(children.size())]


def _analysed(rows: DataFrame) -> Any:
    return rows._jdf.queryExecution().analyzed()
