"""One aggregate as Spark has analysed it, and what an aggregate stage needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructType

from anabranch.core.errors import UnsupportedError
from anabranch.engine.spark import expressions
from anabranch.engine.spark.expressions import Expression
from anabranch.operators.aggregate.merge import How

Columns = Sequence[Column]


@dataclass(frozen=True)
class Buffer:
    """One column of partial aggregate: how Spark computes it from an epoch's rows, and how two of them merge."""

    suffix: str
    partial: Callable[[Columns], Column]
    type: DataType
    merge: How
    #: How many buffers further on is the one that tells whether any value was seen: a sum of decimals that is null
    #: although it has seen some has overflowed, and stays null. 0: a null means that there was no value yet.
    seen: int = 0
    #: Whether it can be null: what cannot cannot be added to a state that has none.
    nullable: bool = True


@dataclass(frozen=True)
class Parts:
    """An aggregate taken apart."""

    #: What it aggregates, over the rows of the stage.
    arguments: tuple[Column, ...]
    buffers: tuple[Buffer, ...]
    #: From the merged buffers to the result.
    finish: Callable[[Columns], Column]
    #: Whether its one buffer is the result.
    plain: bool = False


@dataclass(frozen=True)
class Call:
    """An aggregate function with its arguments, as the analyzer has left them."""

    function: Expression
    #: The name that Spark shows.
    name: str
    distinct: bool
    #: The values that it aggregates; of a function with constant parameters only the first arguments.
    values: tuple[Column, ...]
    types: tuple[DataType, ...]
    output: DataType
    #: The condition of a FILTER clause.
    condition: Column | None
    text: str

    @property
    def arguments(self) -> tuple[Column, ...]:
        """The values, null where the FILTER clause leaves a row out: for functions that ignore nulls."""
        if self.condition is None:
            return self.values
        return tuple(F.when(self.condition, value) for value in self.values)

    def again(self, inputs: Columns) -> Column:
        """Returns the same function, with the same parameters, of other values."""
        parts = expressions.children(self.function)
        parts[: len(inputs)] = [expressions.expression(column) for column in inputs]
        return expressions.aggregate(expressions.with_children(self.function, parts))

    def parameter(self, position: int) -> Expression:
        """Returns a constant argument."""
        return expressions.children(self.function)[position]

    def evaluated(self, buffers: Columns) -> Column:
        """Returns what Spark makes of its own buffers of a declarative aggregate."""
        attributes = expressions.sequence(self.function.aggBufferAttributes())
        values = {
            attribute.exprId().id(): expressions.expression(buffer)
            for attribute, buffer in zip(attributes, buffers, strict=True)
        }

        def value_of(part: Expression) -> Expression | None:
            return values.get(part.exprId().id()) if expressions.kind(part) == "AttributeReference" else None

        return expressions.column(expressions.rebuilt(self.function.evaluateExpression(), value_of))

    def simple(self, how: How, *, nullable: bool = True) -> Parts:
        """Returns an aggregate whose result is all that it needs to go on."""
        buffer = Buffer("", self.again, self.output, how, nullable=nullable)
        return Parts(self.arguments, (buffer,), lambda buffers: buffers[0], plain=True)

    def require_binary_collation(self) -> None:
        """Values that are compared by their bytes must be equal by their bytes only."""
        for found in self.types:
            if _is_collated(found):
                raise UnsupportedError(
                    f"The aggregate {self.text!r} compares strings with a collation, which is not supported. Aggregate "
                    "a normalised form, for example F.lower(column).cast('string')."
                )


def _is_collated(found: DataType) -> bool:
    if isinstance(found, StringType):
        return not found.isUTF8BinaryCollation()
    if isinstance(found, StructType):
        return any(_is_collated(field.dataType) for field in found.fields)
    if isinstance(found, ArrayType):
        return _is_collated(found.elementType)
    return isinstance(found, MapType) and (_is_collated(found.keyType) or _is_collated(found.valueType))
