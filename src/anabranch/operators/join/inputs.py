"""How the rows of both sides of a join become rows of one kind, told apart by a column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from anabranch.operators.join.catalyst import column_of, renamed
from anabranch.operators.keys import key_name

#: The column by which rows of the two sides are told apart.
SIDE = "_side"


@dataclass(frozen=True)
class SideInput:
    """One side, up to the tasks. Expressions and attributes are Spark's own objects."""

    side: int
    #: Of its rows; the expressions are made of them.
    attributes: tuple[Any, ...]
    keys: tuple[Any, ...]
    #: What a row has to satisfy by itself; other rows are dropped.
    filters: tuple[Any, ...]
    #: Whether rows are dropped that have a null in their key.
    only_with_keys: bool
    #: By slot, what the state holds besides the key.
    held: Mapping[int, Any]
    #: The slot that tells whether a row can have a match, which it has if all hopes are true.
    can_match: int | None
    hopes: tuple[Any, ...]
    #: The types of the slots that both sides share.
    kinds: tuple[DataType, ...]

    def tagged(self, rows: DataFrame) -> DataFrame:
        """The rows, in the columns that both sides have on their way to the tasks."""
        rows = renamed(rows, self.attributes)
        keys = [column_of(key) for key in self.keys]
        for condition in self.filters:
            rows = rows.filter(column_of(condition))
        if self.only_with_keys:
            rows = rows.filter(reduce(Column.__and__, [key.isNotNull() for key in keys]))
        held = {slot: column_of(value) for slot, value in self.held.items()}
        if self.can_match is not None:
            held[self.can_match] = reduce(Column.__and__, [column_of(hope) for hope in self.hopes])
        return rows.select(
            *[key.alias(key_name(i)) for i, key in enumerate(keys)],
            F.lit(self.side).cast("byte").alias(SIDE),
            *[held.get(i, F.lit(None).cast(kind)).alias(slot_name(i)) for i, kind in enumerate(self.kinds)],
        )


def slot_name(slot: int) -> str:
    """A column that both sides share on their way to the tasks."""
    return f"_slot{slot}"
