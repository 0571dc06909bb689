"""Finds out, when a query is built, which state variables a processor has; refuses what cannot be run."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessor,
    ValueState,
)
from pyspark.sql.types import StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import GROUP, HASH, INDEX, OP, POSITION, StageSpec, VariableKind, VariableSpec
from anabranch.operators.process.handles import BaseHandle, local_value_state
from anabranch.operators.process.list_state import LocalListState
from anabranch.operators.process.map_state import LocalMapState
from anabranch.operators.process.tuples import TupleCodec
from anabranch.operators.process.variable import Cursor

_OUTPUT_MODES = ("append", "update", "complete")
_TIME_MODES = ("none", "processingtime", "eventtime")
_RESERVED = {HASH, GROUP, OP, POSITION, INDEX}


def check_arguments(*, output_mode: str, time_mode: str, initial_state: object | None, event_time_column: str) -> None:
    """Refuses what transformWithState takes in Spark and Anabranch does not do, or nobody does."""
    if output_mode.lower() not in _OUTPUT_MODES:
        raise UnsupportedError(f"outputMode {output_mode!r} is unknown. Use one of {', '.join(_OUTPUT_MODES)}.")
    if time_mode.lower() not in _TIME_MODES:
        raise UnsupportedError(f"timeMode {time_mode!r} is unknown. Use 'none'.")
    if time_mode.lower() != "none":
        raise UnsupportedError(
            f"timeMode {time_mode!r} is not supported yet, as timers are not. "
            "Use timeMode 'none', and keep deadlines in a state variable."
        )
    if initial_state is not None:
        raise UnsupportedError(
            "initialState is not supported yet. Leave it out, and let the first rows of each key carry what it held."
        )
    if event_time_column:
        raise UnsupportedError(
            f"eventTimeColumnName {event_time_column!r} is not supported yet. "
            "Leave it out, and set the watermark on the stream after this stage."
        )


def declare_state(
    processor: StatefulProcessor,
    key: pa.Schema,
    number: StageNumber,
    name: str,
) -> StageSpec:
    """The stage that runs a processor, with the state variables that its ``init`` asks for.

    A copy of the processor is asked, so that the user's own stays as it is.
    """
    _refuse_names(f"Stage {name}: its key", key)
    try:
        copy: StatefulProcessor = cloudpickle.loads(cloudpickle.dumps(processor))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UnsupportedError(
            f"Stage {name}: {type(processor).__name__} cannot be sent to tasks: {error}. "
            "Create connections, locks and the like in init, not in the constructor."
        ) from error
    handle = _RecordingHandle(name)
    copy.init(handle)
    copy.close()
    return StageSpec(number, name, key, tuple(handle.variables.values()))


class _RecordingHandle(BaseHandle):
    """Writes down which state variables are asked for. What it hands out has no key to work on."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.variables: dict[str, VariableSpec] = {}

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        value = self._fields(stateName, schema)
        variable = self._record(VariableSpec(stateName, VariableKind.VALUE, value), ttlDurationMs)
        return local_value_state(variable, Cursor())

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListState:
        value = self._fields(stateName, schema)
        variable = self._record(VariableSpec(stateName, VariableKind.LIST, value), ttlDurationMs)
        return LocalListState(variable, Cursor())

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        map_key = self._fields(stateName, userKeySchema)
        value = self._fields(stateName, valueSchema)
        variable = self._record(VariableSpec(stateName, VariableKind.MAP, value, map_key), ttlDurationMs)
        return LocalMapState(variable, Cursor())

    def _record(self, variable: VariableSpec, ttl_duration_ms: int | None) -> VariableSpec:
        self.refuse_ttl(variable.name, ttl_duration_ms)
        if not variable.name.strip() or variable.name != variable.name.strip():
            raise self.unsupported(
                f"the name {variable.name!r} of a state variable", "Use a name without spaces around it"
            )
        if variable.name in self.variables:
            raise self.unsupported(f"a second state variable {variable.name}", "Give each a name of its own")
        self.variables[variable.name] = variable
        return variable

    def _fields(self, name: str, schema: StructType | str) -> pa.Schema:
        """The declared fields in Arrow's types, all nullable: rows that remove an entry have no value."""
        where = f"Stage {self.stage}: state variable {name}"
        struct: Any = StructType.fromDDL(schema) if isinstance(schema, str) else schema
        if not isinstance(struct, StructType) or not struct.fields:
            raise UnsupportedError(
                f"{where}: its schema is {schema!r}. Pass a StructType, or a string such as 'count BIGINT'."
            )
        try:
            arrow = to_arrow_schema(struct, timezone="UTC", error_on_duplicated_field_names_in_struct=True)
            fields = pa.schema([pa.field(field.name, field.type) for field in arrow])
            _refuse_names(where, fields)
            TupleCodec(fields, name)
        except (PySparkException, TypeError) as error:
            raise UnsupportedError(
                f"{where}: {struct.simpleString()} cannot be stored: {error}. "
                "Store the value in other types, such as a string or a struct."
            ) from error
        return fields


def _refuse_names(where: str, fields: pa.Schema) -> None:
    taken = _RESERVED & set(fields.names)
    if taken:
        raise UnsupportedError(
            f"{where} has a field named {', '.join(sorted(taken))}, a name that Anabranch uses itself. Rename it."
        )
    if len(set(fields.names)) != len(fields.names):
        raise UnsupportedError(f"{where} has two fields of one name: {', '.join(fields.names)}. Rename one of them.")
