"""State variables that a processor asks for and then deletes, both in init: they take no more part, as in Spark."""

from __future__ import annotations

from typing import Any, NoReturn

from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState

from anabranch.core.schemas import VariableKind

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
    """Spark's own class for the variable; whatever is asked of it is refused."""
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
