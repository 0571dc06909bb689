"""The join stage: both streams as one, told apart by a column, joined in tasks against what waits in the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from anabranch.core.ids import StageNumber
from anabranch.core.schemas import HASH, StageSpec
from anabranch.engine.late import LateKind, time_type
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import place, run_in_tasks
from anabranch.operators.join.catalyst import column_of, renamed
from anabranch.operators.join.inputs import SIDE, SideInput, slot_name
from anabranch.operators.join.predicate import Place, Term
from anabranch.operators.join.sides import VARIABLES, JoinType, Side
from anabranch.operators.join.task import JoinTask
from anabranch.operators.keys import arrow_schema, key_name
from anabranch.wire.routed import StageAccess


@dataclass(frozen=True)
class JoinStage:
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
        """How far behind the watermark the event times of joined rows can be: that long a row waits for its match."""
        return max(0, *(-side.eviction.offset_ms for side in self.sides if side.eviction is not None), 0)

    def numbered(self, number: StageNumber, name: str) -> Self:
        return replace(self, spec=self.spec.numbered(number, name))

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        del carry  # all columns are there
        return self.inputs[side].tagged(rows)

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        """Late rows of each side, in the columns of that side."""
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

    def variant(self, context: EpochContext) -> str:
        del context
        return "join"

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        del context
        task = JoinTask(self.spec, self.how, self.sides, self.condition, self._output)
        names = [key_name(i) for i in range(len(self.spec.key))]
        joined = run_in_tasks(place(rows, names, access), access, task, StructType(list(self.column_fields)))
        result = renamed(joined, self.attributes)
        for expressions in self.projections:
            result = result.select(*[column_of(expression) for expression in expressions])
        return result

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """The waiting rows with their key; the hash is ours alone."""
        del variable
        return state.drop(HASH)

    @cached_property
    def _output(self) -> pa.Schema:
        return arrow_schema(self.column_fields)


def _input_column(side: Side, place: Place) -> str:
    return key_name(place.position) if place.key else slot_name(side.slots[place.position])
