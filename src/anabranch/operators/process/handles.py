"""The handle that a processor gets in a task: Spark's StatefulProcessorHandle over the task's local copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessorHandle,
    ValueState,
)

from anabranch.core.errors import EpochError, UnsupportedError
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.engine.tables import TableRows
from anabranch.operators.process.program import TimeMode
from anabranch.operators.process.state_variables import (
    LocalListState,
    LocalMapState,
    LocalMutableValueState,
    LocalValueState,
)
from anabranch.operators.process.timers import TIMERS, LocalTimers
from anabranch.operators.process.tuples import TupleCodec, rows_by_key
from anabranch.operators.process.variable import Cursor, LocalVariable, StateRequest, has_expiry, without_expiry

Local = TypeVar("Local", LocalValueState, LocalListState, LocalMapState)


class BaseHandle(StatefulProcessorHandle):
    """Refuses what makes no sense, at build time and in tasks alike."""

    def __init__(self, stage: str, time_mode: TimeMode) -> None:
        self.stage = stage
        self.time_mode = time_mode

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self.timers("registerTimer").register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self.timers("deleteTimer").delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        return iter(self.timers("listTimers").all())

    def timers(self, method: str) -> LocalTimers:
        """Returns the timers of the current key; refused in a time mode that has none."""
        raise self.unsupported(
            f"{method} with timeMode 'none'", "Use timeMode 'processingTime', or 'eventTime' with a watermark"
        )

    def getBroadcast(self, name: str) -> Mapping[Any, Any]:
        """Returns a broadcast table as of the epoch: its rows by their key, or by a tuple for a key of several columns.

        It can be read only. Ask for it in init, which runs anew in every task of every epoch.
        """
        raise self.unknown_table(name, ())

    def unknown_table(self, name: str, known: Iterable[str]) -> UnsupportedError:
        listed = ", ".join(known)
        return UnsupportedError(
            f"Stage {self.stage}: there is no broadcast table {name!r}"
            f"{f', but {listed}' if listed else ''}. Add it before the stage: withBroadcast({name}=table)."
        )

    def checked_ttl(self, name: str, ttl_duration_ms: int | None) -> int | None:
        """Returns the time to live of a state variable's entries; None, or 0, as in Spark, for ever."""
        if not ttl_duration_ms:
            return None
        if self.time_mode is not TimeMode.PROCESSING_TIME:
            what = f"ttlDurationMs of the state variable {name} with timeMode {self.time_mode.value!r}"
            raise self.unsupported(what, "Time to live goes by the time of day: use timeMode 'processingTime'")
        if not isinstance(ttl_duration_ms, int) or ttl_duration_ms < 0:
            what = f"ttlDurationMs {ttl_duration_ms!r} of the state variable {name}"
            raise self.unsupported(what, "Pass a positive number of milliseconds")
        return ttl_duration_ms

    def unsupported(self, what: str, advice: str) -> UnsupportedError:
        return UnsupportedError(f"Stage {self.stage}: {what} is not supported. {advice}.")


class LocalHandle(BaseHandle):
    """Hands out the declared state variables, each bound to the current key."""

    def __init__(
        self,
        spec: StageSpec,
        time_mode: TimeMode,
        tables: Mapping[str, TableRows] | None = None,
        declared: Mapping[str, StateRequest] | None = None,
    ) -> None:
        super().__init__(spec.name, time_mode)
        self._tables = tables or {}
        self.cursor = Cursor()
        #: The state variables that the processor has asked for, and its timers.
        self.variables: dict[str, LocalVariable] = {}
        #: How long the entries of state variables live, for those with a limit.
        self.ttls_ms: dict[str, int] = {}
        self._timers: LocalTimers | None = None
        if time_mode is not TimeMode.NONE:
            self._timers = self.variables[TIMERS] = LocalTimers(self.cursor)
            # Called for every key: straight to the timers.
            self.registerTimer = self._timers.register  # type: ignore[method-assign]
            self.deleteTimer = self._timers.delete  # type: ignore[method-assign]
        self._declared = {variable.name: variable for variable in spec.variables if variable.name != TIMERS}
        self._open = True
        #: What init asked for when the query was built, and what it asks for here.
        self._asked_before = declared
        self._asked: dict[str, StateRequest] = {}

    # The schemas were read when the query was built; in a task, nothing can parse a string of them.

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ValueState:
        return self._bind(stateName, VariableKind.VALUE, local_value_state, ttlDurationMs, schema)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ListState:
        return self._bind(stateName, VariableKind.LIST, LocalListState, ttlDurationMs, schema)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> MapState:
        return self._bind(stateName, VariableKind.MAP, LocalMapState, ttlDurationMs, userKeySchema, valueSchema)

    def deleteIfExists(self, stateName: str) -> None:
        """Does nothing more in a task: the variable is not declared, which lets go of its state."""
        if not self._open:
            raise PySparkRuntimeError(
                f"Stage {self.stage}: deleteIfExists({stateName!r}) was called after init. Call it in init only."
            )
        self._asked.pop(stateName, None)

    def getBroadcast(self, name: str) -> Mapping[Any, Any]:
        if name not in self._tables:
            raise self.unknown_table(name, self._tables)
        return self._tables[name].rows(rows_by_key)

    def timers(self, method: str) -> LocalTimers:
        return self._timers if self._timers is not None else super().timers(method)

    def close(self) -> None:
        """Ends init: from now on, no state variable can be asked for."""
        self._open = False
        for name in {**self._declared, **self._asked}:
            now, before = self._asked.get(name), (self._asked_before or {}).get(name)
            if self._asked_before is None and name in self.variables:
                before = now  # all that is known of it is its kind, and that fits
            if now is None or before is None or name not in self.variables or not now.same_as(before):
                raise self._changed(name, before, now)

    def _changed(self, name: str, before: StateRequest | None, now: StateRequest | None) -> EpochError:
        """Makes the error that init asks for something else in a task than it did when the query was built."""
        if now is None:
            what = "was declared when the query was built, and init does not ask for it in a task"
        elif before is None:
            what = f"was not declared when the query was built, and init asks for {now} in a task"
        else:
            what = f"was declared as {before} when the query was built, and init asks for {now} in a task"
        return EpochError(
            f"Stage {self.stage}: the state variable {name} {what}. Let init ask for the same state variables, with "
            "the same schemas and times to live, wherever it runs: they may depend on the processor's attributes, not "
            "on the time, the machine or its environment."
        )

    def _bind(
        self,
        name: str,
        kind: VariableKind,
        create: Callable[[VariableSpec, Cursor], Local],
        ttl_duration_ms: int | None,
        *schemas: Any,
    ) -> Local:
        if not self._open:
            raise PySparkRuntimeError(
                f"Stage {self.stage}: the state variable {name} was asked for after init. "
                "Ask for state variables in init only."
            )
        if name in self.variables:
            raise PySparkRuntimeError(
                f"Stage {self.stage}: the state variable {name} already exists. Give each a name of its own."
            )
        ttl_ms = self.checked_ttl(name, ttl_duration_ms)
        self._asked[name] = StateRequest(kind, schemas, ttl_ms)
        declared = self._declared.get(name)
        if declared is None or declared.kind is not kind or has_expiry(declared) != (ttl_ms is not None):
            # Deleted in init as well, if all is right.
            return deleted_state(name, kind)  # type: ignore[no-any-return]
        local = create(without_expiry(declared), self.cursor)
        self.variables[name] = local
        if ttl_ms is not None:
            self.ttls_ms[name] = ttl_ms
        return local


def local_value_state(variable: VariableSpec, cursor: Cursor) -> LocalValueState:
    """Returns the state variable that suits its fields: copies are made only of what user code could change."""
    mutable = TupleCodec(variable.value, variable.name).copy is not None
    return (LocalMutableValueState if mutable else LocalValueState)(variable, cursor)


_CLASSES: dict[VariableKind, Any] = {
    VariableKind.VALUE: ValueState,
    VariableKind.LIST: ListState,
    VariableKind.MAP: MapState,
}
#: What Spark says it failed to do. Of lists, it says so of values.
_TEXTS = {
    "exists": "checking {kind} state exists",
    "get": "getting {kind} state",
    "update": "updating {kind} state",
    "put": "updating {kind} state",
    "append_value": "updating {kind} state",
    "append_list": "updating {kind} state",
    "clear": "clearing {kind} state",
    "contains_key": "checking if {kind} state contains key",
    "update_value": "updating {kind} state value",
    "remove_key": "removing key from {kind} state",
}


def deleted_state(name: str, kind: VariableKind) -> Any:
    """Makes an object of Spark's own class for the variable, which refuses every request."""
    return _CLASSES[kind](_Refusal(name, "map" if kind is VariableKind.MAP else "value"), name)


class _Refusal:
    """In place of the client by which Spark's state variables reach the state."""

    def __init__(self, name: str, kind: str) -> None:
        self._name = name
        self._kind = kind

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        what = _TEXTS.get(method, "using {kind} state").format(kind=self._kind)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise PySparkRuntimeError(
                f"Error {what}: the state variable {self._name} was deleted in init. Use another."
            )

        return refuse
