"""Building an aggregate stage from the user's keys and columns, with Spark itself as the judge of names and types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import ByteType, StructField, StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import MEANING, OPERATOR, StageSpec, VariableKind, VariableSpec
from anabranch.engine.spark import expressions
from anabranch.engine.spark.expressions import Expression, sql_of
from anabranch.operators.aggregate.call import Buffer, Parts
from anabranch.operators.aggregate.functions import AggregateFunction, take_apart
from anabranch.operators.aggregate.stage import ALL, VARIABLE, AggregateStage
from anabranch.operators.keys import RESERVED, arrow_schema, check_key_fields, key_name, unique_names
from anabranch.operators.stage import StageName, watermarked


def build_aggregate(
    name: StageName, rows: DataFrame, keys: Sequence[Column], aggregates: Sequence[Column]
) -> tuple[AggregateStage, DataFrame]:
    """Makes the stage, and an empty DataFrame with the schema of its result."""
    aggregated = rows.groupBy(*keys).agg(*aggregates)
    result: StructType = aggregated.schema
    key_fields = result.fields[: len(keys)] or [StructField(ALL, ByteType(), False)]
    check_key_fields(key_fields)
    spark = rows.sparkSession
    functions = _Results(rows, aggregated, len(keys)).taken_apart(result.fields[len(keys) :], aggregates)
    stage = AggregateStage(
        spec=StageSpec(
            number=name.number,
            name=name.name,
            key=arrow_schema(key_fields),
            variables=(VariableSpec(VARIABLE, VariableKind.VALUE, _buffer_schema(functions)),),
            traits={OPERATOR: "aggregation"},
        ),
        parallelism=name.parallelism,
        key_fields=tuple(key_fields),
        functions=tuple(functions),
        ansi=spark.conf.get("spark.sql.ansi.enabled") == "true",
        key_columns=tuple(keys),
        event_time=next(iter(watermarked(key_fields)), None),
    )
    return stage, spark.createDataFrame([], result)


class _Results:
    """The columns of an aggregation as Spark has analysed them: expressions of aggregates and keys."""

    def __init__(self, rows: DataFrame, aggregated: DataFrame, keys: int) -> None:
        plan = expressions.analysed(aggregated)
        self._is_plain = expressions.kind(plan) == "Aggregate"
        if self._is_plain:
            self._keys = expressions.sequence(plan.groupingExpressions())[:keys]
            self._expressions = expressions.sequence(plan.aggregateExpressions())[keys:]
        output = expressions.attributes_of(rows)
        names = [attribute.name().lower() for attribute in output]
        self._ids = {attribute.exprId().id() for attribute in output}
        #: Two columns of one name can be told apart only by the DataFrame that they come from.
        self._ambiguous = {name for name in names if names.count(name) > 1}

    def taken_apart(self, fields: Sequence[StructField], columns: Sequence[Column]) -> list[AggregateFunction]:
        if not self._is_plain or len(self._expressions) != len(fields):
            texts = ", ".join(sql_of(column) for column in columns)
            raise UnsupportedError(
                f"agg({texts}) is more than expressions of aggregates and keys. Compute what uses other columns of the "
                "result, window functions or generators in a select after the aggregation."
            )
        return [self._function(*pair) for pair in zip(fields, self._expressions, strict=True)]

    def _function(self, field: StructField, expression: Expression) -> AggregateFunction:
        while expressions.kind(expression) == "Alias":
            expression = expression.child()
        found: dict[int, Expression] = {}

        def find(node: Expression) -> Expression | None:
            if expressions.kind(node) != "AggregateExpression":
                return None
            found.setdefault(node.resultId().id(), node)
            return node

        expressions.rebuilt(expression, find)
        if not found:
            raise UnsupportedError(
                f"The column {field.name!r} has no aggregate. Add it in a select after the aggregation."
            )
        single = expressions.kind(expression) == "AggregateExpression"
        taken = {number: take_apart(node, self._unbound) for number, node in found.items()}
        buffers: list[Buffer] = []
        arguments: list[Column] = []
        for number, (_, parts) in taken.items():
            inputs = slice(len(arguments), len(arguments) + len(parts.arguments))
            arguments += parts.arguments
            for buffer in parts.buffers:
                suffix = buffer.suffix if single else f".{found[number].sql()}{buffer.suffix}"
                buffers.append(replace(buffer, suffix=suffix, partial=_Inputs(buffer.partial, inputs)))
        parts_by_number = {number: parts for number, (_, parts) in taken.items()}
        (first, *_) = parts_by_number.values()
        return AggregateFunction(
            meanings=tuple(name for name, parts in taken.values() for _ in parts.buffers),
            arguments=tuple(arguments),
            output_name=field.name,
            output_type=field.dataType,
            buffers=tuple(buffers),
            finish=first.finish if single else _Finish(expression, self._keys, parts_by_number),
            plain=single and first.plain,
        )

    def _unbound(self, expression: Expression) -> Expression:
        """Returns the expression with columns by name, because every epoch's rows are another DataFrame."""

        def by_name(part: Expression) -> Expression | None:
            if expressions.kind(part) != "AttributeReference":
                return None
            if part.exprId().id() not in self._ids:
                raise UnsupportedError(
                    f"An aggregate uses {part.name()!r}, which is a key that groupBy computes. Add it as a column "
                    "before, with withColumn."
                )
            return part if part.name().lower() in self._ambiguous else expressions.named(part.name())

        return expressions.rebuilt(expression, by_name)


@dataclass(frozen=True)
class _Inputs:
    """A partial aggregate of some of the inputs of a column of the result."""

    partial: Callable[[Sequence[Column]], Column]
    inputs: slice

    def __call__(self, inputs: Sequence[Column]) -> Column:
        return self.partial(inputs[self.inputs])


@dataclass(frozen=True)
class _Finish:
    """An expression of several aggregates, as a function of their buffers."""

    expression: Expression
    keys: Sequence[Expression]
    #: In the order of the buffers, by the id of the aggregate.
    parts: Mapping[int, Parts]

    def __call__(self, buffers: Sequence[Column]) -> Column:
        left = list(buffers)
        results = {number: parts.finish([left.pop(0) for _ in parts.buffers]) for number, parts in self.parts.items()}

        def replaced(node: Expression) -> Expression | None:
            if expressions.kind(node) == "AggregateExpression":
                return expressions.expression(results[node.resultId().id()])
            for number, key in enumerate(self.keys):
                if node.semanticEquals(key):
                    return expressions.named(key_name(number))
            return None

        return expressions.column(expressions.rebuilt(self.expression, replaced))


def _buffer_schema(functions: Sequence[AggregateFunction]) -> pa.Schema:
    """Returns the columns of the state: each names the function that it belongs to, lest it be taken for another's."""
    named = [
        (function, buffer, meaning)
        for function in functions
        for buffer, meaning in zip(function.buffers, function.meanings, strict=True)
    ]
    names = unique_names([function.output_name + buffer.suffix for function, buffer, _ in named], RESERVED)
    columns: list[pa.Field] = []
    for name, (function, buffer, meaning) in zip(names, named, strict=True):
        (column,) = _arrow_schema(StructField(name, buffer.type), function)
        column = column.with_nullable(buffer.nullable)
        columns.append(column.with_metadata({MEANING: meaning.encode()}))
    return pa.schema(columns)


def _arrow_schema(field: StructField, function: AggregateFunction) -> pa.Schema:
    try:
        return arrow_schema([field])
    except PySparkTypeError as error:
        raise UnsupportedError(
            f"The aggregate {function.output_name!r} would keep {field.dataType.simpleString()} in the state, which is "
            "not supported. Cast it to a number, or to a string, before."
        ) from error
