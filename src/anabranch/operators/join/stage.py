"""The join stage: both streams as one, told apart by a column, joined in tasks against what waits in the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField, StructType

from anabranch.core.schemas import StageSpec
from anabranch.engine.late import LateKind, time_type
from anabranch.engine.spark.expressions import column, renamed
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import place, run_in_tasks
from anabranch.operators.join.predicate import ColumnPlace, Term
from anabranch.operators.join.sides import VARIABLES, JoinType, Side
from anabranch.operators.join.task import JoinTask
from anabranch.operators.keys import arrow_schema, key_name, key_names
from anabranch.operators.stage import KeyedStage
from anabranch.wire.routed import StageAccess

#: The column by which rows of the two sides are told apart.
SIDE = "_side"


@dataclass(frozen=True)
class JoinStage(KeyedStage):
    """left.join(right, on, how) of two streams."""

    spec: StageSpec
    parallelism: int | None
    how: JoinType
    sides: tuple[Side, Side]
    #: What pairs with equal keys have to satisfy besides.
    condition: Term | None
    #: Spark's types of the columns of the result: the left ones, then the right ones.
    column_fields: tuple[StructField, ...]
    #: Spark's attributes of the same columns.
    attributes: tuple[Any, ...]
    #: What Spark makes of these columns, if the join is by names; each level a list of expressions.
    projections: tuple[tuple[Any, ...], ...]
    inputs: tuple[SideInput, ...]
    #: The columns of each side, as the user knows them.
    side_fields: tuple[tuple[StructField, ...], tuple[StructField, ...]]

    @property
    def clock(self) -> StageClock:
        return StageClock.NONE if all(side.eviction is None for side in self.sides) else StageClock.EVENT_TIME

    @property
    def output_delay_ms(self) -> int:
        """How far behind the watermark the event times of joined rows can be: so long does a row wait for its match."""
        return max(0, *(-side.eviction.offset_ms for side in self.sides if side.eviction is not None), 0)

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        del carry  # all columns are there
        return self.inputs[side].tagged(rows)

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        """Returns the late rows of each side, in the columns of that side."""
        del arriving, complete
        kinds = []
        for number, (side, fields) in enumerate(zip(self.sides, self.side_fields, strict=True)):
            if side.event_time is None:
                continue
            names = [_input_column(side, place) for place in side.columns]
            time = _input_column(side, side.event_time.place)
            kind = time_type(fields[names.index(time)].dataType, side.event_time.field)
            columns = tuple((field, name, "") for field, name in zip(fields, names, strict=True))
            kinds.append(LateKind(time, side.event_time.field, kind, columns, (VARIABLES[number], SIDE, number)))
        return tuple(kinds)

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        del context
        task = JoinTask(self.spec, self.how, self.sides, self.condition, self._output)
        placed = place(rows, key_names(len(self.spec.key)), access)
        joined = run_in_tasks(placed, access, task, StructType(list(self.column_fields)))
        result = renamed(joined, self.attributes)
        for expressions in self.projections:
            result = result.select(*[column(expression) for expression in expressions])
        return result

    @cached_property
    def _output(self) -> pa.Schema:
        return arrow_schema(self.column_fields)


def _input_column(side: Side, place: ColumnPlace) -> str:
    return key_name(place.position) if place.key else slot_name(side.slots[place.position])


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
        """Returns the rows in the columns that both sides have on their way to the tasks."""
        rows = renamed(rows, self.attributes)
        keys = [column(key) for key in self.keys]
        for condition in self.filters:
            rows = rows.filter(column(condition))
        if self.only_with_keys:
            rows = rows.filter(reduce(Column.__and__, [key.isNotNull() for key in keys]))
        held = {slot: column(value) for slot, value in self.held.items()}
        if self.can_match is not None:
            held[self.can_match] = reduce(Column.__and__, [column(hope) for hope in self.hopes])
        return rows.select(
            *[key.alias(key_name(i)) for i, key in enumerate(keys)],
            F.lit(self.side).cast("byte").alias(SIDE),
            *[held.get(i, F.lit(None).cast(kind)).alias(slot_name(i)) for i, kind in enumerate(self.kinds)],
        )


def slot_name(slot: int) -> str:
    """Returns the name of a column that both sides share on their way to the tasks."""
    return f"_slot{slot}"
