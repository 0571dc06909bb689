"""The body of a task of a stateful stage: all rows of its partition in, state exchanged, rows out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from anabranch.core.schemas import HASH, StageSpec
from anabranch.engine.spark import python_worker as pythonworker
from anabranch.engine.task_epoch import TaskEpoch
from anabranch.wire.routed import RoutedState, StageAccess

#: What a stage does with a partition. It must have written to the state, once, when it is exhausted.
Task = Callable[[Sequence[pa.RecordBatch], RoutedState, TaskEpoch], Iterable[pa.RecordBatch]]

_ROWS_MAX = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES_MAX = "spark.sql.execution.arrow.maxBytesPerBatch"
#: The limit at which Spark does not look.
_NO_LIMIT = 2**31 - 1
#: PARTITION and HASH.
_OWN_BYTES = 16


def spare_size_checks(rows: DataFrame, stage: StageSpec) -> None:
    """Let Spark not add up the size of a batch with every row that it adds, where no batch can become too large.

    That takes as long as writing the row does. What tasks get is rows of the input, or what becomes of it in the state.
    """
    kinds: list[pa.DataType] = list(to_arrow_schema(rows.schema, timezone="UTC").types)
    if not all(map(_has_fixed_width, kinds)):
        return
    kinds += [kind for layout in stage.layouts.values() for kind in layout.changes.types]
    if not all(map(_has_fixed_width, kinds)):
        return
    conf = rows.sparkSession.conf
    rows_max, bytes_max = (str(conf.get(name)).removesuffix("b") for name in (_ROWS_MAX, _BYTES_MAX))
    if not (rows_max.isdigit() and bytes_max.isdigit()):
        return  # no limit of rows, or a size as people write it
    row_bytes = _OWN_BYTES + sum(kind.bit_width // 8 + 1 for kind in kinds)
    if 0 < int(rows_max) * row_bytes < int(bytes_max):
        conf.set(_BYTES_MAX, str(_NO_LIMIT))


def _has_fixed_width(kind: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(kind) or pa.types.is_decimal(kind))


def run_in_tasks(rows: DataFrame, access: StageAccess, task: Task, schema: StructType) -> DataFrame:
    """Run `task` on each partition of placed rows. Rows come with PARTITION in front, which the task does not see."""

    def body(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from run_task(access, task, batches)

    return rows.mapInArrow(body, schema)


def run_task(access: StageAccess, task: Task, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Process one partition. State is staged and sealed before the first row goes out, so that a consumer which stops
    early, such as a limit, does not leave changes behind."""
    pythonworker.tune()
    context = TaskContext.get()
    epoch = TaskEpoch.of(context)
    assert context is not None
    received = [batch for batch in batches if batch.num_rows]
    partition = received[0].column(0)[0].as_py() if received else context.partitionId()
    if partition in epoch.done.get(access.stage.number, ()) or partition >= access.parallelism:
        return
    state = access.open(epoch=epoch.epoch, run=epoch.run, partition=partition, attempt=context.taskAttemptId())
    state.note_rows([batch.column(HASH).to_numpy() for batch in received])
    rows = [batch.select(range(1, batch.num_columns)) for batch in received]
    yield from list(task(rows, state, epoch.of_stage(access.stage.number)))
