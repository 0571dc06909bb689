"""The three plans of a query as text: what the user wrote, what Spark and the workers run, and who owns what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.core.routes import Route
from anabranch.engine.stages import StatefulStage
from anabranch.operators.aggregate.stage import AggregateStage
from anabranch.operators.dedup import DedupStage
from anabranch.operators.join.stage import JoinStage
from anabranch.operators.process.frames import FrameRunner
from anabranch.operators.process.groupstate import GroupRunner
from anabranch.operators.process.stage import ProcessStage
from anabranch.operators.session import SessionStage
from anabranch.plan.pipeline import Pipeline


def explain_logical(pipeline: Pipeline, sink: str | None) -> list[str]:
    lines = ["== Logical plan =="]
    for stage in pipeline.stages:
        mark = "*" if stage.stateful else " "
        name = "" if stage.name == f"stage{stage.number}" else f" {stage.name!r}"
        if stage.state_number not in (None, stage.number):
            name += f" (its state is that of stage {stage.state_number})"
        parallelism = f" parallelism={stage.parallelism}" if stage.parallelism else ""
        after = f" after {' and '.join(map(str, stage.follows))}" if stage.follows else ""
        lines.append(f"{mark}{stage.number}{name}{after}{parallelism}: {' -> '.join(stage.operations) or '-'}")
    if sink is not None:
        lines.append(f" {len(pipeline.stages)} 'sink': {sink}")
    lives = (
        "key and state live in the state workers" if pipeline.source.isStreaming else "a batch, which keeps no state"
    )
    lines.append(f"(* stateful: {lives})")
    return lines


def explain_physical(
    pipeline: Pipeline, *, parallelism: Mapping[int, int], workers: int, store: str, key_groups: int
) -> list[str]:
    """Shows the stages, with the parallelism of each stateful stage that is in force now."""
    lines = ["== Physical plan ==", "Spark, before the first stateful stage: one streaming DataFrame"]
    for segment in pipeline.segments:
        if segment.stage is None:
            lines += [f"Spark: {segment.union}", *(f"  then {operation}" for operation in segment.after)]
            continue
        spec = segment.stage.spec
        partitions = parallelism[spec.number]
        keys = ", ".join(f"{field.name}: {field.type}" for field in spec.key)
        lines.append(f"Stage {spec.number} {spec.name!r}: repartitionById({partitions}) by key group of [{keys}]")
        for variable in spec.variables:
            layout = spec.layouts[variable.name]
            fields = ", ".join(f"{field.name}: {field.type}" for field in [*layout.subkey, *layout.value])
            lines.append(f"  state {variable.name!r} ({variable.kind}) [{fields}]")
        lines += [f"  then {operation}" for operation in segment.after]
        if not segment.one_to_one:
            lines.append("  (output materialised: the operations after it may read it more than once)")
    count = "1 worker" if workers == 1 else f"{workers} workers"
    lines.append(f"State: {count}, store {store}, {key_groups} key groups")
    return lines


def explain_routes(route: Route | None, addresses: Sequence[tuple[str, str]]) -> list[str]:
    lines = ["== Routes =="]
    if route is None:
        return [*lines, "none yet: the query has not been started"]
    lines.append(f"version {route.version}, from epoch {route.first_epoch}")
    for worker, address in addresses:
        lines.append(f"  {worker} at {address}: {len(route.groups_of(worker))} key groups")  # type: ignore[arg-type]
    return lines


def operator_name(stage: StatefulStage) -> str:
    """Returns Spark's name of the operator; that of the stage if Spark has no such operator."""
    match stage:
        case AggregateStage():
            return "stateStoreSave"
        case SessionStage():
            return "sessionWindowStateStoreSaveExec"
        case DedupStage():
            return "dedupe" if stage.task.delay_ms is None else "dedupeWithinWatermark"
        case JoinStage():
            return "symmetricHashJoin"
        case ProcessStage():
            if stage.runner is GroupRunner:
                return "applyInPandasWithState"
            return (
                "transformWithStateInPandasExec" if stage.runner is FrameRunner else "transformWithStateInPySparkExec"
            )
    return stage.spec.name
