"""Plans that are analysed once and run in every epoch, each time on that epoch's rows.

Spark needs several milliseconds for each DataFrame method, to analyse the plan so far. An epoch's plan is that of the
epoch before, but for its leaf: so all that is above the leaf is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from anabranch.engine.spark.java import is_a, java_class
from anabranch.engine.tables import EpochTables
from anabranch.wire.routed import StageAccess

#: Those that always have one child, and take another one as such.
_UNARY_NODE = "org.apache.spark.sql.catalyst.plans.logical.UnaryNode"
_DATASET = "org.apache.spark.sql.classic.Dataset"


@dataclass(frozen=True)
class Template:
    """The analysed plan of a DataFrame on top of a leaf."""

    #: Spark's attributes of the leaf, which the plan refers to by their ids.
    attributes: Any
    #: From the node above the leaf to the plan's root.
    nodes: tuple[Any, ...]
    #: Spark's function from a session and a plan to a DataFrame.
    from_plan: Any

    @classmethod
    def of(cls, rows: DataFrame, result: DataFrame) -> Template | None:
        """Returns the template of a result; None if that is not a chain of operations on the rows alone."""
        leaf = _plan(rows)
        nodes = []
        node = _plan(result)
        while not node.equals(leaf):
            children = node.children()
            if children.size() != 1 or not is_a(node, _UNARY_NODE):
                return None
            nodes.append(node)
            node = children.head()
        from_plan = java_class(_DATASET).ofRows
        return cls(leaf.output(), tuple(reversed(nodes)), from_plan)

    def on(self, rows: DataFrame) -> DataFrame | None:
        """Returns the result for other rows; None if Spark gave their attributes other ids."""
        plan = _plan(rows)
        if not plan.output().equals(self.attributes):
            return None
        for node in self.nodes:
            plan = node.withNewChildInternal(plan)
        # It is the plan that was analysed and checked, on a leaf with the same columns.
        plan.setAnalyzed()
        spark = rows.sparkSession
        return DataFrame(self.from_plan(spark._jsparkSession, plan), spark)


class Templates:
    """Keeps the templates of a query, by the variants of its stages.

    They hold as long as tasks reach the state in the same way and read the same broadcast tables.
    """

    def __init__(self) -> None:
        self._accesses: Mapping[int, StageAccess] = {}
        self._tables: EpochTables | None = None
        self._templates: dict[tuple[str, ...], Template] = {}

    def apply(
        self,
        accesses: Mapping[int, StageAccess],
        tables: EpochTables | None,
        variants: tuple[str, ...],
        rows: DataFrame,
    ) -> DataFrame | None:
        """Returns the result for these rows, if there is a template for it."""
        if accesses is not self._accesses or tables is not self._tables:
            self._accesses, self._tables = accesses, tables
            self._templates.clear()
        template = self._templates.get(variants)
        return template.on(rows) if template is not None else None

    def remember(self, variants: tuple[str, ...], rows: DataFrame, result: DataFrame) -> None:
        """Keeps the plan of a result, for the accesses that were last asked for."""
        template = Template.of(rows, result)
        if template is not None:
            self._templates[variants] = template


def _plan(rows: DataFrame) -> Any:
    return rows._jdf.queryExecution().analyzed()
