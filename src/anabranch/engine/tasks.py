"""The body of a task of a stateful stage: all rows of its partition in, state exchanged, rows out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.engine import pythonworker
from anabranch.engine.taskepoch import TaskEpoch
from anabranch.wire.routed import RoutedState, StageAccess

#: What a stage does with a partition. It must have written to the state, once, when it is exhausted.
Task = Callable[[Sequence[pa.RecordBatch], RoutedState, TaskEpoch], Iterable[pa.RecordBatch]]


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
    rows = [batch.select(range(1, batch.num_columns)) for batch in received]
    yield from list(task(rows, state, epoch))
