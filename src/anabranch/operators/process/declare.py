"""Finds out, when a query is built, which state variables a processor has; refuses what cannot be run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.operators.keys import RESERVED
from anabranch.operators.process.handles import BaseHandle, local_value_state
from anabranch.operators.process.program import TimeMode
from anabranch.operators.process.state_variables import LocalListState, LocalMapState
from anabranch.operators.process.timers import TIMERS, TIMERS_SPEC, LocalTimers
from anabranch.operators.process.tuples import TupleCodec
from anabranch.operators.process.variable import EXPIRY, Cursor, StateRequest, with_expiry

_OUTPUT_MODES = ("append", "update", "complete")
_RESERVED = RESERVED | {EXPIRY}
_NOT_IN_INIT = "Timers belong to keys: use them in handleInputRows, handleExpiredTimer or handleInitialState"


def checked_time_mode(time_mode: str) -> TimeMode:
    """Reads Spark's name of a time mode, in upper or lower case."""
    for mode in TimeMode:
        if isinstance(time_mode, str) and time_mode.lower() == mode.value.lower():
            return mode
    raise UnsupportedError(f"timeMode {time_mode!r} is unknown. Use 'none', 'processingTime' or 'eventTime'.")


def check_output_mode(output_mode: str) -> None:
    if not isinstance(output_mode, str) or output_mode.lower() not in _OUTPUT_MODES:
        raise UnsupportedError(f"outputMode {output_mode!r} is unknown. Use one of {', '.join(_OUTPUT_MODES)}.")


@dataclass(frozen=True)
class Declaration:
    """What ``init`` says about state."""

    #: The stage that runs the processor, with its state variables.
    spec: StageSpec
    #: Those that it has, as it asked for them.
    asked: Mapping[str, StateRequest]


def declare_state(
    processor: StatefulProcessor,
    key: pa.Schema,
    number: StageNumber,
    name: str,
    time_mode: TimeMode = TimeMode.NONE,
    tables: Collection[str] = (),
) -> Declaration:
    """Returns the state variables that ``init`` asks for, of a copy of the processor: the user's stays as it is."""
    _refuse_names(f"Stage {name}: its key", key)
    try:
        copy: StatefulProcessor = cloudpickle.loads(cloudpickle.dumps(processor))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UnsupportedError(
            f"Stage {name}: {type(processor).__name__} cannot be sent to tasks: {error}. "
            "Create connections, locks and the like in init, not in the constructor."
        ) from error
    handle = _RecordingHandle(name, time_mode, tables)
    copy.init(handle)
    copy.close()
    timers = () if time_mode is TimeMode.NONE else (TIMERS_SPEC,)
    variables = (*handle.variables.values(), *timers)
    spec = StageSpec(number, name, key, variables, deleted=tuple(sorted(handle.deleted)))
    return Declaration(spec, handle.asked)


class _RecordingHandle(BaseHandle):
    """Writes down which state variables are asked for. What it hands out has no key to work on."""

    def __init__(self, stage: str, time_mode: TimeMode, tables: Collection[str]) -> None:
        super().__init__(stage, time_mode)
        self._tables = tables
        self.variables: dict[str, VariableSpec] = {}
        self.asked: dict[str, StateRequest] = {}
        self.deleted: set[str] = set()

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        value = self._fields(stateName, schema)
        variable = self._record(VariableSpec(stateName, VariableKind.VALUE, value), ttlDurationMs, schema)
        return local_value_state(variable, Cursor())

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListState:
        value = self._fields(stateName, schema)
        variable = self._record(VariableSpec(stateName, VariableKind.LIST, value), ttlDurationMs, schema)
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
        spec = VariableSpec(stateName, VariableKind.MAP, value, map_key)
        variable = self._record(spec, ttlDurationMs, userKeySchema, valueSchema)
        return LocalMapState(variable, Cursor())

    def deleteIfExists(self, stateName: str) -> None:
        self.variables.pop(stateName, None)
        self.asked.pop(stateName, None)
        self.deleted.add(stateName)

    def getBroadcast(self, name: str) -> Mapping[Any, Any]:
        if name not in self._tables:
            raise self.unknown_table(name, self._tables)
        return MappingProxyType({})

    def timers(self, method: str) -> LocalTimers:
        if self.time_mode is TimeMode.NONE:
            return super().timers(method)
        raise self.unsupported(f"{method} in init", _NOT_IN_INIT)

    def _record(self, variable: VariableSpec, ttl_duration_ms: int | None, *schemas: StructType | str) -> VariableSpec:
        ttl_ms = self.checked_ttl(variable.name, ttl_duration_ms)
        if variable.name in self.deleted:
            what = f"deleteIfExists({variable.name!r}) of a state variable that init asks for later"
            raise self.unsupported(what, "Use a new name for what starts empty")
        if variable.name == TIMERS:
            raise self.unsupported(f"a state variable named {TIMERS}, as timers are", "Use another name")
        if not variable.name.strip() or variable.name != variable.name.strip():
            raise self.unsupported(
                f"the name {variable.name!r} of a state variable", "Use a name without spaces around it"
            )
        if variable.name in self.variables:
            raise self.unsupported(f"a second state variable {variable.name}", "Give each a name of its own")
        self.variables[variable.name] = variable if ttl_ms is None else with_expiry(variable)
        self.asked[variable.name] = StateRequest(variable.kind, schemas, ttl_ms)
        return variable

    def _fields(self, name: str, schema: StructType | str) -> pa.Schema:
        """Returns the declared fields in Arrow's types, all nullable: rows that remove an entry have no value."""
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
