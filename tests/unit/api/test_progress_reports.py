"""Progress reports of Spark's, completed with what it does not know of."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from anabranch.api.progress import StateOperators
from anabranch.core.answers import HeldVariable, VariableChanges
from anabranch.core.ids import StageNumber
from anabranch.core.reports import as_json
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.operators.process.frames import FrameRunner
from anabranch.operators.process.groupstate import GroupRunner
from anabranch.operators.process.program import Program
from anabranch.operators.process.rows import RowRunner
from anabranch.operators.process.stage import ProcessStage
from anabranch.operators.process.timers import TIMERS_SPEC
from anabranch.operators.process.variable import with_expiry
from support.epoch_reports import epoch_report

FIELDS = pa.schema([("n", pa.int64())])
TICK_SOURCE = {"description": "a source of ours", "startOffset": {"tick": 1}, "endOffset": {"tick": 2}}
FILE_SOURCE = {"description": "FileStreamSource[input]", "startOffset": None, "endOffset": {"logOffset": 0}}
RATES = {"latestOffset": None, "numInputRows": 3, "inputRowsPerSecond": 1.0, "processedRowsPerSecond": 1.0}
ID = "78923ec2-8f4d-4266-876e-1f50cf3c283b"


class Nothing(StatefulProcessor):
    def init(self, handle: Any) -> None:
        del handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        del key, rows, timerValues
        return iter(())


def stage(number: int, runner: Any, *variables: VariableSpec) -> ProcessStage:
    spec = StageSpec(StageNumber(number), f"stage{number}", pa.schema([("k", pa.string())]), variables)
    program = Program(spec, Nothing(), StructType(), deleted_variables=number)
    return ProcessStage(None, (), (), program, runner)


def document(*sources: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": ID, "runId": ID, "name": "q", "timestamp": "2024-01-01T00:00:00.000Z", "batchId": 7, "batchDuration": 12,
        "numInputRows": 3, "stateOperators": [], "sources": [{**source, **RATES} for source in sources],
        "sink": {"description": "ForeachBatchSink", "numOutputRows": -1},
    }  # fmt: skip


def test_each_stage_is_an_operator_the_last_one_first() -> None:
    first = stage(
        1,
        FrameRunner,
        VariableSpec("v", VariableKind.VALUE, FIELDS),
        with_expiry(VariableSpec("l", VariableKind.LIST, FIELDS)),
        TIMERS_SPEC,
    )
    second = stage(2, RowRunner, VariableSpec("m", VariableKind.MAP, FIELDS, FIELDS))
    third = stage(3, GroupRunner, VariableSpec("state", VariableKind.VALUE, FIELDS))
    changed = [
        VariableChanges(stage=1, variable="v", put=2, removed=1),
        VariableChanges(stage=1, variable="l", put=3, removed=0),
        VariableChanges(stage=1, variable=TIMERS_SPEC.name, put=100, removed=100),
        VariableChanges(stage=2, variable="m", put=4, removed=0),
    ]
    # Of two workers.
    held = [HeldVariable(stage=1, variable="v", rows=rows, bytes=10) for rows in (5, 6)]
    held.append(HeldVariable(stage=1, variable=TIMERS_SPEC.name, rows=1000, bytes=1000))
    report = StateOperators([first, second, third]).reported(
        document(FILE_SOURCE, TICK_SOURCE),
        epoch_report(7, changed_variables=changed, duration_ms={"commit": 9}),
        held=held,
        parallelism={1: 4, 2: 8},
    )
    names = [operator.operatorName for operator in report.stateOperators]
    assert names == [
        "applyInPandasWithState",
        "transformWithStateInPySparkExec",
        "transformWithStateInPandasExec",
    ]
    _, maps, values = report.stateOperators
    assert (values.numRowsTotal, values.memoryUsedBytes) == (11, 20)
    assert (values.numRowsUpdated, values.numRowsRemoved, values.commitTimeMs) == (5, 1, 9)
    assert (values.numShufflePartitions, maps.numShufflePartitions) == (4, 8)
    counted = {name: number for name, number in values.customMetrics.items() if number}
    assert counted == {"numValueStateVars": 1, "numListStateWithTTLVars": 1, "numDeletedStateVars": 1}
    assert maps.customMetrics["numMapStateVars"] == 1
    assert [source.description for source in report.sources] == ["FileStreamSource[input]"]


def test_a_report_is_spark_s_with_a_part_of_ours() -> None:
    epoch = epoch_report(7)
    report = StateOperators([]).reported(document(FILE_SOURCE), epoch, held=[], parallelism={})
    assert (report.name, report["id"], str(report.runId), report.batchId) == ("q", ID, ID, 7)
    assert report["anabranch"] == as_json(epoch)
    assert json.loads(report.json)["anabranch"]["durationMs"] == {"sink": 7}
