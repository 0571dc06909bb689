"""A processor that does what its rows tell it to, for the tests of state variables."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from support.process_model import ModelState, fields, run_epochs

KEY = pa.schema([("id", pa.string())])
OUTPUT = fields(id="string", seen="string")
Act = Callable[["Scripted"], Any]


class Scripted(StatefulProcessor):
    """Does for each row what the row's step says, and yields what came of it."""

    def __init__(self, steps: dict[str, Act], value: StructType | None = None) -> None:
        self.steps = steps
        self.fields = value or fields(n="long")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.value = handle.getValueState("v", self.fields)
        self.list = handle.getListState("l", fields(x="integer", y="string"))
        self.map = handle.getMapState("m", fields(k="string"), fields(a="integer", b="string"))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            yield Row(id=key[0], seen=repr(self.steps[row.step](self)))


def run(*epochs: dict[str, str], value: StructType | None = None, **steps: Act) -> tuple[ModelState, list[list[str]]]:
    """Each epoch says for each key which steps it takes; the state, and what each epoch saw for key ``a``."""
    rows = [[{"id": key, "step": step} for key, names in epoch.items() for step in names.split()] for epoch in epochs]
    state, outputs = run_epochs(Scripted(steps, value), rows, key=KEY, output=OUTPUT)
    return state, [[row["seen"] for row in output if row["id"] == "a"] for output in outputs]


def sent(state: ModelState, variable: str, epoch: int = -1) -> list[tuple[Any, ...]]:
    """What was sent for a variable: op, key, sub-key and value."""
    table = state.writes[epoch].get(variable)
    return [] if table is None else [tuple(row.values())[1:] for row in table.to_pylist()]


GET: Act = lambda p: p.value.get()  # noqa: E731
EXISTS: Act = lambda p: p.value.exists()  # noqa: E731
LIST: Act = lambda p: list(p.list.get())  # noqa: E731
ITEMS: Act = lambda p: sorted(p.map.iterator())  # noqa: E731


def set_value(value: Any) -> Act:
    return lambda p: p.value.update((value,))


class Calling(StatefulProcessor):
    """Calls a function for each key, and notes its own life."""

    def __init__(self, handle_rows: Any) -> None:
        self.handle_rows = handle_rows
        self.life: list[str] = []

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.life.append("init")
        self.state = handle.getValueState("count", fields(n="long"))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        self.life.append("rows")
        return self.handle_rows(key, rows, timerValues)

    def close(self) -> None:
        self.life.append("close")
