"""Tasks of a stateful stage: what they know of the epoch, which rows each gets, and the body that they run.

The facts of the epoch travel as a local property of Spark's, beside the task and not inside its function: so the
function, and with it Spark's plan, is the same in every epoch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from anabranch.core.errors import EpochError
from anabranch.core.schemas import HASH, StageSpec
from anabranch.engine.spark import python_worker
from anabranch.engine.spark.java import jvm_number
from anabranch.wire.routed import RoutedState, StageAccess

_PROPERTY = "anabranch.epoch"
#: Where Spark's watermarks begin: no stage has one that is earlier, however far it is behind.
FIRST_WATERMARK_MS = 0
#: The partition of a row's key group. Tasks read it from their rows: Spark's own partition id is that of the task,
#: which is another number once a later operation unites or coalesces partitions.
PARTITION = "_partition"
_ROWS_MAX = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES_MAX = "spark.sql.execution.arrow.maxBytesPerBatch"
#: The limit at which Spark does not look.
_NO_LIMIT = 2**31 - 1
#: PARTITION and HASH.
_OWN_BYTES = 16


@dataclass(frozen=True)
class TaskEpoch:
    """The facts of one run of an epoch."""

    epoch: int
    run: int
    processing_time_ms: int
    #: The event time up to which input is complete; None without a watermark.
    watermark_ms: int | None = None
    #: The watermark of the epoch before: rows that are not after it are late. What the watermark has passed since then
    #: still takes rows, and is over with this epoch.
    late_watermark_ms: int | None = None
    #: By stage, the partitions that an earlier try of this run has sealed, and whose output is not needed again.
    done: Mapping[int, frozenset[int]] = field(default_factory=dict)
    #: By stage, how far behind the watermarks are that it goes by; None if they never move.
    delays_ms: Mapping[int, int | None] = field(default_factory=dict)

    def announce(self, spark: SparkSession) -> None:
        """Tells the facts to all tasks that this thread lets Spark start from now on."""
        document = dataclasses.asdict(self) | {"done": [[s, sorted(p)] for s, p in self.done.items()]}
        document["delays_ms"] = list(self.delays_ms.items())
        spark.sparkContext.setLocalProperty(_PROPERTY, json.dumps(document))

    @staticmethod
    def of(context: TaskContext | None) -> TaskEpoch:
        """Returns the facts as they were announced to a task."""
        text = context.getLocalProperty(_PROPERTY) if context is not None else None
        if not text:
            raise EpochError(
                "A stateful stage ran outside its epoch. Its rows can be used in the function of foreachBatch, in the "
                "thread that it is called in, and until it returns: write them there, or collect them."
            )
        document = json.loads(text)
        done = {int(stage): frozenset(partitions) for stage, partitions in document.pop("done")}
        delays_ms = dict(document.pop("delays_ms"))
        return TaskEpoch(**document, done=done, delays_ms=delays_ms)

    def of_stage(self, stage: int) -> TaskEpoch:
        """Returns the facts as a stage sees them, with its own watermarks."""
        delay_ms = self.delays_ms.get(stage, 0)

        def behind(watermark_ms: int | None) -> int | None:
            if watermark_ms is None or delay_ms is None:
                return None if watermark_ms is None else FIRST_WATERMARK_MS
            return max(watermark_ms - delay_ms, FIRST_WATERMARK_MS)

        return dataclasses.replace(
            self, watermark_ms=behind(self.watermark_ms), late_watermark_ms=behind(self.late_watermark_ms)
        )


#: What a stage does with a partition. It must have written to the state, once, when it is exhausted.
Task = Callable[[Sequence[pa.RecordBatch], RoutedState, TaskEpoch], Iterable[pa.RecordBatch]]


def place(rows: DataFrame, key_names: Sequence[str], access: StageAccess) -> DataFrame:
    """Puts PARTITION and HASH in front, and moves every row to the partition that its key group is assigned to."""
    table = ",".join(map(str, access.partitions.tolist()))
    columns = _placement(jvm_number(rows.sparkSession), tuple(key_names), table, access.key_groups)
    return rows.select(*columns, "*").repartitionById(access.parallelism, PARTITION)


@lru_cache(maxsize=64)
def _placement(jvm: int, key_names: tuple[str, ...], table: str, key_groups: int) -> tuple[Column, Column]:
    """Returns partition and hash. Kept from epoch to epoch, as making a column takes several round trips to the JVM."""
    del jvm
    hashed = F.xxhash64(*key_names)
    # Spark folds the split and the cast into one array literal, so a row costs one look-up.
    partitions = F.split(F.lit(table), ",").cast("array<int>")
    partition = F.get(partitions, F.pmod(hashed, F.lit(key_groups)).cast("int"))
    return partition.alias(PARTITION), hashed.alias(HASH)


def run_in_tasks(rows: DataFrame, access: StageAccess, task: Task, schema: StructType) -> DataFrame:
    """Runs `task` on each partition of placed rows, which come with PARTITION in front; the task does not see it."""

    def body(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from run_task(access, task, batches)

    return rows.mapInArrow(body, schema)


def run_task(access: StageAccess, task: Task, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Processes one partition.

    State is staged and sealed before the first row goes out, so that a consumer which stops early, such as a limit,
    does not leave changes behind.
    """
    python_worker.tune()
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


def spare_size_checks(rows: DataFrame, stage: StageSpec) -> None:
    """Spares Spark adding up the size of a batch with every row, where no batch can become too large.

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
