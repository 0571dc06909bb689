"""The handle that a processor gets in a task: Spark's StatefulProcessorHandle over the task's local copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessorHandle,
    ValueState,
)

from anabranch.core.errors import UnsupportedError
from anabranch.core.schemas import VariableKind, VariableSpec
from anabranch.operators.process.list_state import LocalListState
from anabranch.operators.process.map_state import LocalMapState
from anabranch.operators.process.tuples import TupleCodec
from anabranch.operators.process.value_state import LocalMutableValueState, LocalValueState
from anabranch.operators.process.variable import Cursor, LocalVariable

Local = TypeVar("Local", LocalValueState, LocalListState, LocalMapState)


class BaseHandle(StatefulProcessorHandle):
    """Refuses what Anabranch does not do, at build time and in tasks alike."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def registerTimer(self, expiryTimestampMs: int) -> None:  # noqa: ARG002
        raise self.unsupported("registerTimer", _NO_TIMERS)

    def deleteTimer(self, expiryTimestampMs: int) -> None:  # noqa: ARG002
        raise self.unsupported("deleteTimer", _NO_TIMERS)

    def listTimers(self) -> Iterator[int]:
        raise self.unsupported("listTimers", _NO_TIMERS)

    def deleteIfExists(self, stateName: str) -> None:
        advice = "Leave the state variable out of init instead, and start from a new checkpoint"
        raise self.unsupported(f"deleteIfExists({stateName!r})", advice)

    def refuse_ttl(self, name: str, ttl_duration_ms: int | None) -> None:
        if ttl_duration_ms is not None:
            advice = "Leave ttlDurationMs out, and clear state that is no longer needed in handleInputRows"
            raise self.unsupported(f"ttlDurationMs of the state variable {name}", advice)

    def unsupported(self, what: str, advice: str) -> UnsupportedError:
        return UnsupportedError(f"Stage {self.stage}: {what} is not supported yet. {advice}.")


class LocalHandle(BaseHandle):
    """Hands out the declared state variables, each bound to the current key."""

    def __init__(self, stage: str, variables: Mapping[str, VariableSpec]) -> None:
        super().__init__(stage)
        self.cursor = Cursor()
        #: The state variables that the processor has asked for.
        self.variables: dict[str, LocalVariable] = {}
        self._declared = variables
        self._open = True

    # The schemas were read when the query was built; in a task, nothing can parse a string of them.

    def getValueState(
        self,
        stateName: str,
        schema: Any,  # noqa: ARG002
        ttlDurationMs: int | None = None,
    ) -> ValueState:
        self.refuse_ttl(stateName, ttlDurationMs)
        return self._bind(stateName, VariableKind.VALUE, local_value_state)

    def getListState(
        self,
        stateName: str,
        schema: Any,  # noqa: ARG002
        ttlDurationMs: int | None = None,
    ) -> ListState:
        self.refuse_ttl(stateName, ttlDurationMs)
        return self._bind(stateName, VariableKind.LIST, LocalListState)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Any,  # noqa: ARG002
        valueSchema: Any,  # noqa: ARG002
        ttlDurationMs: int | None = None,
    ) -> MapState:
        self.refuse_ttl(stateName, ttlDurationMs)
        return self._bind(stateName, VariableKind.MAP, LocalMapState)

    def close(self) -> None:
        """From now on, no state variable can be asked for: init is over."""
        self._open = False

    def _bind(self, name: str, kind: VariableKind, create: Callable[[VariableSpec, Cursor], Local]) -> Local:
        if not self._open:
            raise PySparkRuntimeError(
                f"Stage {self.stage}: the state variable {name} was asked for after init. "
                "Ask for state variables in init only."
            )
        if name in self.variables:
            raise PySparkRuntimeError(
                f"Stage {self.stage}: the state variable {name} already exists. Give each a name of its own."
            )
        declared = self._declared.get(name)
        if declared is None or declared.kind is not kind:
            raise PySparkRuntimeError(
                f"Stage {self.stage}: {kind} state variable {name} was not declared when the query was built. "
                "Let init ask for the same state variables wherever it runs."
            )
        local = create(declared, self.cursor)
        self.variables[name] = local
        return local


def local_value_state(variable: VariableSpec, cursor: Cursor) -> LocalValueState:
    """The state variable that suits its fields: copies are made only of what user code could change."""
    mutable = TupleCodec(variable.value, variable.name).copy is not None
    return (LocalMutableValueState if mutable else LocalValueState)(variable, cursor)


_NO_TIMERS = (
    "Timers need a time mode other than none; keep the deadline in a state variable and check it in handleInputRows"
)
