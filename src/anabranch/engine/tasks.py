"""The body of a task of a stateful stage: all rows of its partition in, state exchanged, rows out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.core.errors import EpochError
from anabranch.wire.routed import RoutedState, StageAccess

#: What a stage does with a partition. It must have written to the state, once, when it is exhausted.
Task = Callable[[Sequence[pa.RecordBatch], RoutedState], Iterable[pa.RecordBatch]]


def run_in_tasks(rows: DataFrame, access: StageAccess, task: Task, schema: StructType) -> DataFrame:
    """Run `task` on each partition of placed rows. Rows come with PARTITION in front, which the task does not see."""

    def body(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from run_task(access, task, batches)

    return rows.mapInArrow(body, schema)


def run_task(access: StageAccess, task: Task, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Process one partition. State is staged and sealed before the first row goes out, so that a consumer which stops
    early, such as a limit, does not leave changes behind."""
    _spare_the_collector()
    context = TaskContext.get()
    if context is None:
        raise EpochError("A stateful stage ran outside a Spark task. Use writeStream to run the query.")
    received = [batch for batch in batches if batch.num_rows]
    partition = received[0].column(0)[0].as_py() if received else context.partitionId()
    if partition in access.done or partition >= access.parallelism:
        return
    state = access.open(partition=partition, attempt=context.taskAttemptId())
    rows = [batch.select(range(1, batch.num_columns)) for batch in received]
    yield from list(task(rows, state))


def _spare_the_collector() -> None:
    """Exempt what the process's imports made from garbage collection, once.

    Spark collects garbage after every task of a Python process. Looking through the objects of PySpark, pandas and
    Arrow takes some 40 ms each time, longer than a task of a small epoch.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
