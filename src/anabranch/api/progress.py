"""Progress reports: Spark's own, with the state operators that Spark does not know of, and an ``anabranch`` part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryProgress

from anabranch.core.schemas import VariableKind
from anabranch.engine.spark.ticks import TICK
from anabranch.engine.stages import StatefulStage
from anabranch.operators.process.stage import ProcessStage
from anabranch.operators.process.timers import TIMERS
from anabranch.operators.process.variable import has_expiry
from anabranch.plan.explain import operator_name

_KIND_METRICS = {
    VariableKind.VALUE: "numValueState",
    VariableKind.LIST: "numListState",
    VariableKind.MAP: "numMapState",
}


class StateOperators:
    """What reports say about the stateful stages of a query."""

    def __init__(self, stages: Sequence[StatefulStage]) -> None:
        self._stages = stages

    def reported(
        self,
        document: dict[str, Any],
        figures: Mapping[str, Any],
        *,
        held: Sequence[Mapping[str, Any]],
        parallelism: Mapping[int, int],
    ) -> StreamingQueryProgress:
        """A report of Spark's about an epoch, completed.

        `figures` are those of the epoch, `held` the rows and bytes of each state variable, in any number of parts.
        """
        document["sources"] = [source for source in document["sources"] if not _is_of_ticks(source)]
        # As Spark lists them: the last one first.
        stages = reversed(self._stages)
        document["stateOperators"] = [self._operator(stage, figures, held, parallelism) for stage in stages]
        document["anabranch"] = dict(figures)
        progress = StreamingQueryProgress.fromJson(document)
        progress["anabranch"] = document["anabranch"]
        return progress

    def _operator(
        self,
        stage: StatefulStage,
        figures: Mapping[str, Any],
        held: Sequence[Mapping[str, Any]],
        parallelism: Mapping[int, int],
    ) -> dict[str, Any]:
        number = stage.spec.number
        changed = figures.get("changedVariables", ())

        def total(entries: Iterable[Mapping[str, Any]], field: str) -> int:
            return sum(e[field] for e in entries if e["stage"] == number and e["variable"] != TIMERS)

        return {
            "operatorName": operator_name(stage),
            "numRowsTotal": total(held, "rows"),
            "numRowsUpdated": total(changed, "put"),
            "numRowsRemoved": total(changed, "removed"),
            "allUpdatesTimeMs": 0,
            "allRemovalsTimeMs": 0,
            "commitTimeMs": figures.get("durationMs", {}).get("commit", 0),
            "memoryUsedBytes": total(held, "bytes"),
            "numRowsDroppedByWatermark": sum(e["rows"] for e in figures.get("droppedRows", ()) if e["stage"] == number),
            "numShufflePartitions": parallelism.get(number, 0),
            "numStateStoreInstances": parallelism.get(number, 0),
            "customMetrics": _variable_metrics(stage) if isinstance(stage, ProcessStage) else {},
        }


def _is_of_ticks(source: Mapping[str, Any]) -> bool:
    """Whether a source is that of the epochs without rows, which the user has not asked for."""
    offset = source.get("endOffset")
    return isinstance(offset, dict) and set(offset) == {TICK}


def _variable_metrics(stage: ProcessStage) -> dict[str, int]:
    """How many state variables there are of each kind, under Spark's names."""
    metrics = {f"{name}{suffix}": 0 for name in _KIND_METRICS.values() for suffix in ("Vars", "WithTTLVars")}
    for variable in stage.spec.variables:
        if variable.name != TIMERS:
            suffix = "WithTTLVars" if has_expiry(variable) else "Vars"
            metrics[_KIND_METRICS[variable.kind] + suffix] += 1
    return {**metrics, "numDeletedStateVars": stage.program.deleted_variables}
