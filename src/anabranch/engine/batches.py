"""Runs a stateful stage on a batch: all rows of a key at once, without state before or after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, StageSpec
from anabranch.engine.spark import python_worker
from anabranch.engine.spark.frames import estimated_bytes
from anabranch.engine.stages import EpochContext
from anabranch.engine.tasks import TaskEpoch
from anabranch.wire.routed import Answers

#: What a stage's plan may depend on: a batch is the first epoch, and the only one.
ONLY_EPOCH = EpochContext(epoch=0, previous_rows=None, previous_changes=0, complete=False)
#: What Spark tells user code where there is no watermark: batches have none.
_NO_WATERMARK_MS = -1
#: Of a partition, as Spark estimates it: less than what Spark itself puts into one.
_FEW_BYTES = 32 * 2**20


class NoState:
    """Stands for the state of a batch: tasks find nothing in it, and their changes are dropped."""

    def __init__(self, stage: StageSpec) -> None:
        self._stage = stage

    def read(self, keys: pa.Table) -> Mapping[str, pa.Table]:
        del keys
        return {name: layout.answers.empty_table() for name, layout in self._stage.layouts.items()}

    def ask(
        self,
        keys: pa.Table,
        *,
        rest: bool = False,
        expiries: Sequence[Expiry] = (),
        due: Expiry | None = None,
    ) -> Answers:
        del rest, due
        expired = {each.variable: self._stage.layouts[each.variable].rows.empty_table() for each in expiries}
        return Answers(found=dict(self.read(keys)), rest={}, expired=expired)

    def note_late(self, rows: int) -> None:
        """Does nothing: there is no watermark."""

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        """Drops the changes: a task reads once, before it writes."""


#: What a stage does with the rows of a partition: as in an epoch.
BatchTask = Callable[[Sequence[pa.RecordBatch], NoState, TaskEpoch], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class Batch:
    """Runs the tasks of one stage on a batch."""

    stage: StageSpec
    #: The number of partitions; None to leave it to Spark, which goes by the size of the rows.
    parallelism: int | None
    processing_time_ms: int

    def run(self, rows: DataFrame, key_names: Sequence[str], task: BatchTask, schema: StructType) -> DataFrame:
        """Returns the result of `task` on each partition of projected rows; those of a key are in one."""
        hashed = rows.select(F.xxhash64(*key_names).alias(HASH), "*")
        partitions = self.parallelism or _partitions_of_few(rows)
        placed = hashed.repartition(HASH) if partitions is None else hashed.repartition(partitions, HASH)
        stage = self.stage
        only = TaskEpoch(epoch=0, run=0, processing_time_ms=self.processing_time_ms, watermark_ms=_NO_WATERMARK_MS)

        def body(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            python_worker.tune()
            yield from task([batch for batch in batches if batch.num_rows], NoState(stage), only)

        return placed.mapInArrow(body, schema)


def _partitions_of_few(rows: DataFrame) -> int | None:
    """Returns one partition for each core for few rows, of which Spark would make fewer; None for many."""
    cores = rows.sparkSession.sparkContext.defaultParallelism
    return cores if estimated_bytes(rows) <= cores * _FEW_BYTES else None
