"""Progress reports: Spark's own, with the state operators that Spark does not know of, and an ``anabranch`` part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryProgress

from anabranch.core.answers import HeldVariable
from anabranch.core.reports import EpochReport, as_json
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
        epoch: EpochReport | None,
        *,
        held: Sequence[HeldVariable],
        parallelism: Mapping[int, int],
    ) -> StreamingQueryProgress:
        """Completes a report of Spark's with that of the same epoch, and with the size of the state.

        `held` are the rows and bytes of each state variable, in any number of parts.
        """
        document["sources"] = [source for source in document["sources"] if not _is_of_ticks(source)]
        # As Spark lists them: the last one first.
        stages = reversed(self._stages)
        document["stateOperators"] = [self._operator(stage, epoch, held, parallelism) for stage in stages]
        document["anabranch"] = {} if epoch is None else as_json(epoch)
        progress = StreamingQueryProgress.fromJson(document)
        progress["anabranch"] = document["anabranch"]
        return progress

    def _operator(
        self,
        stage: StatefulStage,
        epoch: EpochReport | None,
        held: Sequence[HeldVariable],
        parallelism: Mapping[int, int],
    ) -> dict[str, Any]:
        number = stage.spec.number
        own = [size for size in held if size.stage == number and size.variable != TIMERS]
        changed = [] if epoch is None else epoch.changed_variables
        changed = [each for each in changed if each.stage == number and each.variable != TIMERS]
        dropped = [] if epoch is None else epoch.dropped_rows
        return {
            "operatorName": operator_name(stage),
            "numRowsTotal": sum(size.rows for size in own),
            "numRowsUpdated": sum(each.put for each in changed),
            "numRowsRemoved": sum(each.removed for each in changed),
            "allUpdatesTimeMs": 0,
            "allRemovalsTimeMs": 0,
            "commitTimeMs": 0 if epoch is None else epoch.duration_ms.get("commit", 0),
            "memoryUsedBytes": sum(size.bytes for size in own),
            "numRowsDroppedByWatermark": sum(each.rows for each in dropped if each.stage == number),
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
