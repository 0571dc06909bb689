"""Building a join stage from Spark's own plan of the join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    AtomicType,
    DataType,
    DayTimeIntervalType,
    DoubleType,
    FractionalType,
    IntegralType,
    NumericType,
    StringType,
    StructField,
    StructType,
)
from pyspark.sql.types import DecimalType as Decimal

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import JOIN_TYPE, OPERATOR, StageSpec, VariableKind, VariableSpec
from anabranch.engine.spark.expressions import (
    attributes_of,
    children,
    column,
    field_of,
    has_watermark,
    id_of,
    kind,
    type_of,
)
from anabranch.engine.spark.join_plan import JoinPlan, analysed_join
from anabranch.operators.join.predicate import LEFT, RIGHT, ColumnPlace, Constant, FunctionCall, Operand, Term
from anabranch.operators.join.sides import VARIABLES, Eviction, JoinType, RowTime, Side
from anabranch.operators.join.stage import JoinStage, SideInput
from anabranch.operators.keys import RESERVED, arrow_schema, check_key_fields, nullable_field, unique_names
from anabranch.operators.stage import StageName

_MATCHED = "matched"


def build_join(name: StageName, joined: DataFrame) -> tuple[JoinStage, tuple[DataFrame, DataFrame]]:
    """Makes the stage of Spark's join of two streaming DataFrames, and returns these as they are in Spark's plan."""
    spark = joined.sparkSession
    plan = analysed_join(joined, [each.value for each in JoinType])
    key_names = unique_names([_name_of(key, f"key{i}") for i, key in enumerate(plan.keys[LEFT])], RESERVED)
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
            traits={OPERATOR: "join", JOIN_TYPE: plan.how},
        ),
        parallelism=name.parallelism,
        how=JoinType(plan.how),
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
    places: dict[str, ColumnPlace] = field(default_factory=dict)
    #: What a row has to satisfy by itself; other rows are dropped before the join.
    filters: list[Any] = field(default_factory=list)
    #: What a row has to satisfy by itself to have a match; other rows go out alone.
    hopes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A column that is part of the key is not held a second time.
        keys = {id_of(key): i for i, key in enumerate(self.plan.keys[self.side]) if kind(key) == "AttributeReference"}
        for attribute in self.plan.attributes[self.side]:
            known = keys.get(id_of(attribute))
            self.places[id_of(attribute)] = self._held(attribute) if known is None else ColumnPlace(True, known)
        if not self.values:
            self._held(self.plan.attributes[self.side][0])

    def operand(self, expression: Any) -> Operand:
        """Returns the column that holds the value of an expression of this side."""
        if kind(expression) == "AttributeReference" and id_of(expression) in self.places:
            return Operand(self.side, self.places[id_of(expression)])
        for position, held in enumerate(self.values):
            if held.semanticEquals(expression):
                return Operand(self.side, ColumnPlace(False, position))
        return Operand(self.side, self._held(expression))

    def time_of(self, place: ColumnPlace, kind: DataType) -> RowTime:
        return RowTime(place, "end" if isinstance(kind, StructType) else "")

    def _held(self, expression: Any) -> ColumnPlace:
        self.values.append(expression)
        return ColumnPlace(False, len(self.values) - 1)

    @property
    def keeps_unmatched(self) -> bool:
        return JoinType(self.plan.how).keeps_unmatched(self.side)


@dataclass
class _Slots:
    """The columns that both sides share on their way to the tasks: a column of each, of the same type."""

    types: list[DataType] = field(default_factory=list)

    def assign(self, kinds: Sequence[DataType]) -> list[int]:
        free = list(range(len(self.types)))
        assigned = []
        for wanted in kinds:
            slot = next((slot for slot in free if self.types[slot] == wanted), None)
            if slot is None:
                self.types.append(wanted)
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
        sides = plan.sides_of(conjunct)
        if len(sides) == 1 and conjunct.deterministic():
            (side,) = sides
            (drafts[side].hopes if drafts[side].keeps_unmatched else drafts[side].filters).append(conjunct)
        else:
            terms.append(translator.term(conjunct))
    return reduce(lambda one, other: FunctionCall("and", (one, other)), terms) if terms else None


def _side(plan: JoinPlan, draft: _SideDraft, slots: _Slots) -> Side:
    kinds = [_kind(value) for value in draft.values]
    if draft.hopes:
        kinds.append(_kind(draft.hopes[0]))
    assigned = slots.assign(kinds)
    marked = next((attribute for attribute in plan.attributes[draft.side] if has_watermark(attribute)), None)
    return Side(
        columns=tuple(draft.places[id_of(attribute)] for attribute in plan.attributes[draft.side]),
        slots=tuple(assigned[: len(draft.values)]),
        can_match=assigned[-1] if draft.hopes else None,
        unmatched_go_out=draft.keeps_unmatched,
        event_time=None if marked is None else draft.time_of(draft.places[id_of(marked)], type_of(marked)),
        eviction=_eviction(plan, draft, marked),
    )


def _eviction(plan: JoinPlan, draft: _SideDraft, marked: Any) -> Eviction | None:
    """Returns when rows are over: by the time in the key, if that has a watermark on either side, else by their own."""
    offset_ms = plan.offsets_ms[draft.side]
    if offset_ms is None:
        return None
    for keys in plan.keys:
        for position, key in enumerate(keys):
            if has_watermark(key):
                on_both = has_watermark(plan.keys[LEFT][position]) and has_watermark(plan.keys[RIGHT][position])
                time = draft.time_of(ColumnPlace(True, position), type_of(key))
                return Eviction(time, offset_ms, harmful=not on_both)
    return Eviction(draft.time_of(draft.places[id_of(marked)], type_of(marked)), offset_ms, harmful=False)


def _variable(draft: _SideDraft) -> VariableSpec:
    names = [_name_of(value, f"computed{i}") for i, value in enumerate(draft.values)]
    names = unique_names([*names, _MATCHED] if draft.keeps_unmatched else names, RESERVED)
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
    """Returns the attributes of the joined rows."""
    left, right = plan.attributes
    return left if JoinType(plan.how) is JoinType.LEFT_SEMI else [*left, *right]


def _fields(attributes: Sequence[Any]) -> tuple[StructField, ...]:
    return tuple(field_of(attribute, str(attribute.name())) for attribute in attributes)


def _kind(expression: Any) -> DataType:
    return nullable_field(StructField("_", type_of(expression))).dataType


def _name_of(expression: Any, otherwise: str) -> str:
    return str(expression.name()) if kind(expression) == "AttributeReference" else otherwise


_LOGIC = {"And": "and", "Or": "or", "Not": "not"}
_NULLS = {"IsNull": "is_null", "IsNotNull": "is_not_null"}
_COMPARISONS = {
    "EqualTo": "equal",
    "EqualNullSafe": "equal_null_safe",
    "LessThan": "less",
    "LessThanOrEqual": "less_equal",
    "GreaterThan": "greater",
    "GreaterThanOrEqual": "greater_equal",
}
_ARITHMETIC = {"Add": "add", "Subtract": "subtract", "Multiply": "multiply", "UnaryMinus": "negate", "Abs": "abs"}

#: Makes a column of one side out of an expression that uses no other, and says where tasks find it.
OperandOf = Callable[[int, Any], Operand]


class Translator:
    """Translates conditions of one join."""

    def __init__(self, spark: SparkSession, plan: JoinPlan, operand_of: OperandOf) -> None:
        self._spark = spark
        self._plan = plan
        self._operand_of = operand_of

    def term(self, expression: Any) -> Term:
        if not expression.deterministic():
            raise _refusal(expression, "gives another value each time")
        sides = self._plan.sides_of(expression)
        if not sides:
            return self._constant(expression)
        if len(sides) == 1:
            (side,) = sides
            return self._operand_of(side, expression)
        return self._of_both_sides(expression)

    def _of_both_sides(self, expression: Any) -> Term:
        name, parts = kind(expression), children(expression)
        if name in _LOGIC:
            return self._call(_LOGIC[name], parts)
        if name in _NULLS:
            return self._call(_NULLS[name], parts)
        if name in _COMPARISONS:
            _check_comparable(expression, type_of(parts[0]))
            return self._call(_COMPARISONS[name], parts)
        if name == "Coalesce":
            return self._call("coalesce", parts)
        if name in _ARITHMETIC and _is_plain_number(type_of(expression)):
            return self._call(_ARITHMETIC[name], parts, option=_fails_on_overflow(expression))
        if name == "SubtractTimestamps" and isinstance(type_of(expression), DayTimeIntervalType):
            with_zone = type_of(parts[0]).typeName() == "timestamp"
            zone = self._spark.conf.get("spark.sql.session.timeZone") if with_zone else None
            return self._call("subtract_timestamps", parts, option=zone)
        if name == "Cast" and _widens(type_of(parts[0]), type_of(expression)):
            return self._call("cast", parts, option=to_arrow_type(type_of(expression), timezone="UTC"))
        raise _refusal(expression, f"combines columns of both streams with {expression.prettyName()}")

    def _call(self, function: str, children: list[Any], option: Any = None) -> FunctionCall:
        return FunctionCall(function, tuple(self.term(child) for child in children), option)

    def _constant(self, expression: Any) -> Constant:
        # Spark computes a row without a source in the driver.
        row = self._spark.sql("SELECT 1").select(column(expression)).first()
        assert row is not None
        return Constant(pa.scalar(row[0], to_arrow_type(type_of(expression), timezone="UTC")))


def _refusal(expression: Any, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"The join condition {expression.sql()} {why}, which is not supported. Compare an expression of one stream "
        "with one of the other, as in left.x <= right.y + 1, or filter the joined rows (inner joins only)."
    )


def _check_comparable(expression: Any, kind: DataType) -> None:
    if isinstance(kind, StringType) and not kind.isUTF8BinaryCollation():
        raise _refusal(expression, f"compares strings under the collation {kind.collation}")
    if not isinstance(kind, AtomicType):
        raise _refusal(expression, f"compares values of type {kind.simpleString()}")


def _is_plain_number(kind: DataType) -> bool:
    return isinstance(kind, NumericType) and not isinstance(kind, Decimal)


def _fails_on_overflow(expression: Any) -> bool:
    """As Spark's own arithmetic, under its ANSI mode, for whole numbers."""
    if isinstance(type_of(expression), FractionalType):
        return False
    return bool(expression.failOnError())


def _widens(given: DataType, wanted: DataType) -> bool:
    """Tells whether every value of one number type is the same in the other."""
    if isinstance(given, IntegralType) and isinstance(wanted, IntegralType):
        sizes = {"byte": 1, "short": 2, "integer": 4, "long": 8}
        return sizes[given.typeName()] <= sizes[wanted.typeName()]
    return _is_plain_number(given) and isinstance(wanted, DoubleType)
