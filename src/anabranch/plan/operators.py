"""What Spark calls the operators that run here instead of there, as its progress reports name them."""

from __future__ import annotations

from anabranch.engine.stages import StatefulStage
from anabranch.operators.aggregate.stage import AggregateStage
from anabranch.operators.dedup.stage import DedupStage
from anabranch.operators.groupstate.run import run_groups
from anabranch.operators.join.stage import JoinStage
from anabranch.operators.process.frames import run_frames
from anabranch.operators.process.stage import ProcessStage
from anabranch.operators.session.stage import SessionStage


def operator_name(stage: StatefulStage) -> str:
    """Spark's name of the operator; that of the stage if Spark has no such operator."""
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
            if stage.run is run_groups:
                return "applyInPandasWithState"
            return "transformWithStateInPandasExec" if stage.run is run_frames else "transformWithStateInPySparkExec"
    return stage.spec.name
