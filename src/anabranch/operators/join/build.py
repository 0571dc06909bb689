"""Building a join stage from Spark's own plan of the join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, StructField, StructType

from anabranch.core.schemas import JOIN_TYPE, OPERATOR, StageSpec, VariableKind, VariableSpec
from anabranch.operators.join.catalyst import (
    JoinPlan,
    analyse,
    attributes_of,
    field_of,
    has_watermark,
    kind_of,
    sides_of,
    type_of,
)
from anabranch.operators.join.inputs import SideInput
from anabranch.operators.join.predicate import LEFT, RIGHT, Call, Operand, Place, Term
from anabranch.operators.join.sides import VARIABLES, Eviction, JoinType, RowTime, Side
from anabranch.operators.join.stage import JoinStage
from anabranch.operators.join.translate import Translator
from anabranch.operators.keys import RESERVED, StageName, arrow_schema, check_key_fields, nullable_field

_MATCHED = "matched"


def build_join(name: StageName, joined: DataFrame) -> tuple[JoinStage, tuple[DataFrame, DataFrame]]:
    """The stage for Spark's join of two streaming DataFrames, and these two as they are in Spark's plan of it."""
    spark = joined.sparkSession
    plan = analyse(joined)
    key_names = _unique([_name_of(key, f"key{i}") for i, key in enumerate(plan.keys[LEFT])], RESERVED)
    key_fields = [field_of(key, name) for key, name in zip(plan.keys[LEFT], key_names, strict=True)]
    check_key_fields(key_fields)
    drafts = _SideDraft(plan, LEFT), _SideDraft(plan, RIGHT)
    condition = _condition(spark, plan, drafts)
    slots = _Slots()
    sides = tuple(_side(plan, draft, slots) for draft in drafts)
    fields = [nullable_field(field_of(attribute, f"_c{i}")) for i, attribute in enumerate(_output(plan))]
    stage = JoinStage(
        spec=StageSpec(
            name.number,
            name.name,
            arrow_schema(key_fields),
            tuple(map(_variable, drafts)),
            traits={OPERATOR: "join", JOIN_TYPE: plan.how.value},
        ),
        parallelism=name.parallelism,
        how=plan.how,
        sides=(sides[LEFT], sides[RIGHT]),
        condition=condition,
        column_fields=tuple(fields),
        attributes=tuple(_output(plan)),
        projections=tuple(map(tuple, plan.projections)),
        inputs=tuple(_input(plan, draft, side, slots) for draft, side in zip(drafts, sides, strict=True)),
        side_fields=(_fields(plan.attributes[LEFT]), _fields(plan.attributes[RIGHT])),
    )
    return stage, plan.inputs


@dataclass
class _SideDraft:
    """One side while its columns are collected."""

    plan: JoinPlan
    side: int
    #: Expressions of the columns that the state holds besides the key.
    values: list[Any] = field(default_factory=list)
    #: Where the user's columns are, by the id of Spark's attribute.
    places: dict[str, Place] = field(default_factory=dict)
    #: What a row has to satisfy by itself; other rows are dropped before the join.
    filters: list[Any] = field(default_factory=list)
    #: What a row has to satisfy by itself to have a match; other rows go out alone.
    hopes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A column that is part of the key is not held a second time.
        keys = {_id(key): i for i, key in enumerate(self.plan.keys[self.side]) if kind_of(key) == "AttributeReference"}
        for attribute in self.plan.attributes[self.side]:
            known = keys.get(_id(attribute))
            self.places[_id(attribute)] = self._held(attribute) if known is None else Place(True, known)
        if not self.values:
            self._held(self.plan.attributes[self.side][0])

    def operand(self, expression: Any) -> Operand:
        """The column that holds the value of an expression of this side."""
        if kind_of(expression) == "AttributeReference" and _id(expression) in self.places:
            return Operand(self.side, self.places[_id(expression)])
        for position, held in enumerate(self.values):
            if held.semanticEquals(expression):
                return Operand(self.side, Place(False, position))
        return Operand(self.side, self._held(expression))

    def time_of(self, place: Place, kind: DataType) -> RowTime:
        return RowTime(place, "end" if isinstance(kind, StructType) else "")

    def _held(self, expression: Any) -> Place:
        self.values.append(expression)
        return Place(False, len(self.values) - 1)

    @property
    def keeps_unmatched(self) -> bool:
        return self.plan.how.keeps_unmatched(self.side)


@dataclass
class _Slots:
    """The columns that both sides share on their way to the tasks: a column of each, of the same type."""

    types: list[DataType] = field(default_factory=list)

    def assign(self, kinds: Sequence[DataType]) -> list[int]:
        free = list(range(len(self.types)))
        assigned = []
        for kind in kinds:
            slot = next((slot for slot in free if self.types[slot] == kind), None)
            if slot is None:
                self.types.append(kind)
                slot = len(self.types) - 1
            else:
                free.remove(slot)
            assigned.append(slot)
        return assigned


def _condition(spark: SparkSession, plan: JoinPlan, drafts: tuple[_SideDraft, _SideDraft]) -> Term | None:
    """Puts aside what one side has to satisfy by itself; what is left concerns pairs."""
    translator = Translator(spark, plan, lambda side, expression: drafts[side].operand(expression))
    terms: list[Term] = []
    for conjunct in plan.conjuncts:
        sides = sides_of(conjunct, plan)
        if len(sides) == 1 and conjunct.deterministic():
            (side,) = sides
            (drafts[side].hopes if drafts[side].keeps_unmatched else drafts[side].filters).append(conjunct)
        else:
            terms.append(translator.term(conjunct))
    return reduce(lambda one, other: Call("and", (one, other)), terms) if terms else None


def _side(plan: JoinPlan, draft: _SideDraft, slots: _Slots) -> Side:
    kinds = [_kind(value) for value in draft.values]
    if draft.hopes:
        kinds.append(_kind(draft.hopes[0]))
    assigned = slots.assign(kinds)
    marked = next((attribute for attribute in plan.attributes[draft.side] if has_watermark(attribute)), None)
    return Side(
        columns=tuple(draft.places[_id(attribute)] for attribute in plan.attributes[draft.side]),
        slots=tuple(assigned[: len(draft.values)]),
        can_match=assigned[-1] if draft.hopes else None,
        unmatched_go_out=draft.keeps_unmatched,
        event_time=None if marked is None else draft.time_of(draft.places[_id(marked)], type_of(marked)),
        eviction=_eviction(plan, draft, marked),
    )


def _eviction(plan: JoinPlan, draft: _SideDraft, marked: Any) -> Eviction | None:
    """When rows are over: by the time in the key, if that is under a watermark on either side, else by their own."""
    offset_ms = plan.offsets_ms[draft.side]
    if offset_ms is None:
        return None
    for keys in plan.keys:
        for position, key in enumerate(keys):
            if has_watermark(key):
                on_both = has_watermark(plan.keys[LEFT][position]) and has_watermark(plan.keys[RIGHT][position])
                time = draft.time_of(Place(True, position), type_of(key))
                return Eviction(time, offset_ms, harmful=not on_both)
    return Eviction(draft.time_of(draft.places[_id(marked)], type_of(marked)), offset_ms, harmful=False)


def _variable(draft: _SideDraft) -> VariableSpec:
    names = [_name_of(value, f"computed{i}") for i, value in enumerate(draft.values)]
    names = _unique([*names, _MATCHED] if draft.keeps_unmatched else names, RESERVED)
    columns = list(arrow_schema([field_of(value, name) for value, name in zip(draft.values, names, strict=False)]))
    if draft.keeps_unmatched:
        columns.append(pa.field(names[-1], pa.bool_()))
    return VariableSpec(VARIABLES[draft.side], VariableKind.LIST, pa.schema(columns))


def _input(plan: JoinPlan, draft: _SideDraft, side: Side, slots: _Slots) -> SideInput:
    return SideInput(
        side=draft.side,
        attributes=tuple(attributes_of(plan.inputs[draft.side])),
        keys=tuple(plan.keys[draft.side]),
        filters=tuple(draft.filters),
        only_with_keys=not draft.keeps_unmatched,
        held=dict(zip(side.slots, draft.values, strict=True)),
        can_match=side.can_match,
        hopes=tuple(draft.hopes),
        kinds=tuple(slots.types),
    )


def _output(plan: JoinPlan) -> list[Any]:
    """The attributes of the joined rows."""
    left, right = plan.attributes
    return left if plan.how is JoinType.LEFT_SEMI else [*left, *right]


def _fields(attributes: Sequence[Any]) -> tuple[StructField, ...]:
    return tuple(field_of(attribute, str(attribute.name())) for attribute in attributes)


def _kind(expression: Any) -> DataType:
    return nullable_field(StructField("_", type_of(expression))).dataType


def _id(attribute: Any) -> str:
    return str(attribute.exprId().toString())


def _name_of(expression: Any, otherwise: str) -> str:
    return str(expression.name()) if kind_of(expression) == "AttributeReference" else otherwise


def _unique(names: Sequence[str], taken: frozenset[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in taken or candidate in found:
            number += 1
            candidate = f"{name}.{number}"
        found.append(candidate)
    return found
