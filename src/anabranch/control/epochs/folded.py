"""How much an epoch has changed, from what each worker says when it has prepared it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from anabranch.core.ids import WorkerId


class ChangeFigures:
    """What workers answered last, put together for the progress report."""

    def __init__(self) -> None:
        self._answers: dict[WorkerId, Mapping[str, Any]] = {}

    def note(self, worker: WorkerId, answer: Mapping[str, Any]) -> None:
        self._answers[worker] = answer

    def report(self, workers: Iterable[WorkerId], bytes_written: int) -> dict[str, Any]:
        """Changes in all; by state variable, how many entries were set and removed; by stage, late rows."""
        answers = [self._answers[worker] for worker in workers if worker in self._answers]
        put: Counter[tuple[int, str]] = Counter()
        removed: Counter[tuple[int, str]] = Counter()
        late: Counter[int] = Counter()
        for answer in answers:
            late.update(dict(answer.get("late", ())))
            for stage, variable, rows_put, rows_removed in answer.get("variables", ()):
                put[stage, variable] += rows_put
                removed[stage, variable] += rows_removed
        return {
            "changedRows": sum(answer["rows"] for answer in answers),
            "changedBytes": bytes_written,
            "changedVariables": [
                {"stage": stage, "variable": variable, "put": rows, "removed": removed[stage, variable]}
                for (stage, variable), rows in sorted(put.items())
            ],
            "droppedRows": [{"stage": stage, "rows": rows} for stage, rows in sorted(late.items()) if rows],
        }
