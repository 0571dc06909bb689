"""The stage of a vectorised processor, and how it is built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import HASH, OPERATOR, StageSpec, VariableKind, VariableSpec
from anabranch.engine.batches import Batch
from anabranch.engine.late import LateKind
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tables import SharedTable
from anabranch.engine.tasks import place, run_in_tasks
from anabranch.operators.keys import RESERVED, StageName, arrow_schema, check_key_fields, key_name, with_keys
from anabranch.operators.vectorised.task import KEY, VARIABLE, Process, VectorisedTask
from anabranch.wire.routed import StageAccess


@dataclass(frozen=True)
class VectorisedStage:
    """groupBy(keys).processInArrow(function) or processInPandas(function)."""

    spec: StageSpec
    parallelism: int | None
    #: Expressions of the key columns; bound to the stage's input.
    key_columns: tuple[Column, ...]
    key_fields: tuple[StructField, ...]
    process: Process
    output: StructType
    pandas: bool
    #: The broadcast tables that the function takes.
    tables: tuple[str, ...] = ()

    output_delay_ms: ClassVar[int] = 0

    @property
    def clock(self) -> StageClock:
        return StageClock.NONE

    def numbered(self, number: StageNumber, name: str) -> Self:
        return replace(self, spec=self.spec.numbered(number, name))

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        del side, carry
        return with_keys(rows, self.key_columns, self.key_fields)

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        del arriving, complete
        return ()  # the function gets all rows

    def variant(self, context: EpochContext) -> str:
        del context
        return "vectorised"

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        tables: dict[str, SharedTable] = {}
        if context.tables is not None:
            tables = {name: context.tables.shared(rows.sparkSession, name) for name in self.tables}
        return run_in_tasks(place(rows, self._key_names, access), access, self._task(tables), self.output)

    def apply_to_batch(self, rows: DataFrame, batch: Batch) -> DataFrame:
        """The result on all rows at once, without any state before."""
        return batch.run(rows, self._key_names, self._task({}), self.output)

    @property
    def _key_names(self) -> list[str]:
        return [key_name(i) for i in range(len(self.key_fields))]

    def _task(self, tables: Mapping[str, SharedTable]) -> VectorisedTask:
        output = to_arrow_schema(self.output, timezone="UTC")
        return VectorisedTask(self.spec, self.process, output, self.pandas, tables)

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """The state with its key; the hash is ours alone."""
        del variable
        return state.drop(HASH)


def build_vectorised(
    name: StageName,
    rows: DataFrame,
    keys: Sequence[Column],
    process: Process,
    output: StructType | str,
    state: StructType | str,
    *,
    pandas: bool,
    tables: Sequence[str] = (),
) -> tuple[VectorisedStage, DataFrame]:
    """The stage, and an empty DataFrame with the schema of its result."""
    method = "processInPandas" if pandas else "processInArrow"
    if not keys:
        raise UnsupportedError(f"{method} needs a key: groupBy(column, …).{method}(…).")
    if not callable(process):
        raise UnsupportedError(f"{method} needs a function of (keys, rows, state), not a {type(process).__name__}.")
    try:
        cloudpickle.dumps(process)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UnsupportedError(
            f"{method}: the function cannot be sent to tasks: {error}. Make connections and locks inside it."
        ) from error
    key_fields = rows.select(*keys).schema.fields
    check_key_fields(key_fields)
    if KEY in rows.columns:
        raise UnsupportedError(f"The input has a column {KEY!r}, a name that {method} uses itself. Rename it.")
    spark = rows.sparkSession
    sample = spark.createDataFrame([], output)
    fields = spark.createDataFrame([], state).schema.fields
    if not fields or {field.name for field in fields} & RESERVED:
        raise UnsupportedError(f"{method}: the state needs fields, other than {', '.join(sorted(RESERVED))}.")
    spec = StageSpec(
        number=name.number,
        name=name.name,
        key=arrow_schema(key_fields),
        variables=(VariableSpec(VARIABLE, VariableKind.VALUE, arrow_schema(fields)),),
        # The state of both forms is the same.
        traits={OPERATOR: "processInArrow"},
    )
    stage = VectorisedStage(
        spec,
        name.parallelism,
        tuple(keys),
        tuple(key_fields),
        process,
        sample.schema,
        pandas,
        tables=_taken(process, tables),
    )
    return stage, sample


def _taken(process: Process, tables: Sequence[str]) -> tuple[str, ...]:
    """Those of the broadcast tables that the function has a parameter for."""
    try:
        parameters = inspect.signature(process).parameters.values()
    except (TypeError, ValueError):
        return ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(tables)
    names = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    return tuple(name for name in tables if name in names)
