"""What a task has to know about the epoch that it runs in.

It travels as a local property of Spark's, beside the task and not inside its function: so the function, and with it
Spark's plan, is the same in every epoch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark import TaskContext
from pyspark.sql import SparkSession

from anabranch.core.errors import EpochError

_PROPERTY = "anabranch.epoch"
#: Where Spark's watermarks begin: no stage has one that is earlier, however far it is behind.
FIRST_WATERMARK_MS = 0


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
    #: By stage, the partitions that an earlier try of this run has sealed, and whose output nobody needs again.
    done: Mapping[int, frozenset[int]] = field(default_factory=dict)
    #: By stage, how far behind the watermarks are that it goes by; None if they never move.
    delays_ms: Mapping[int, int | None] = field(default_factory=dict)

    def announce(self, spark: SparkSession) -> None:
        """To all tasks that this thread lets Spark start from now on."""
        document = dataclasses.asdict(self) | {"done": [[s, sorted(p)] for s, p in self.done.items()]}
        document["delays_ms"] = list(self.delays_ms.items())
        spark.sparkContext.setLocalProperty(_PROPERTY, json.dumps(document))

    @staticmethod
    def of(context: TaskContext | None) -> TaskEpoch:
        """As it was announced to a task."""
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
        """As the stage sees it, with its own watermarks."""
        delay_ms = self.delays_ms.get(stage, 0)

        def behind(watermark_ms: int | None) -> int | None:
            if watermark_ms is None or delay_ms is None:
                return None if watermark_ms is None else FIRST_WATERMARK_MS
            return max(watermark_ms - delay_ms, FIRST_WATERMARK_MS)

        return dataclasses.replace(
            self, watermark_ms=behind(self.watermark_ms), late_watermark_ms=behind(self.late_watermark_ms)
        )
