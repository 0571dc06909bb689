"""Several pipelines over the same input in one query: an epoch costs nearly the same for one as for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import reduce
from typing import Any

from pyspark.sql import functions as F


def side_by_side(results: Mapping[str, Any]) -> Any:
    """The rows of several results, DataFrames or streams, as text under the name of the result, in one result."""
    named = [
        result.select(F.lit(name).alias("pipeline"), F.to_json(F.struct("*")).alias("row"))
        for name, result in results.items()
    ]
    return reduce(lambda one, other: one.union(other), named)


def rows_of(name: str, rows: list[Any]) -> Counter[str]:
    """Which of the rows are those of one result."""
    return Counter(row.row for row in rows if row.pipeline == name)
