"""The epoch loop: what happens in each micro-batch, from its first row to its commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import DataFrame

from anabranch.core.errors import FencedError
from anabranch.core.reports import EpochReport
from anabranch.engine.epoch_plan import EpochPlan
from anabranch.engine.late import LateRows, LateSink, without_rows
from anabranch.engine.runner import (
    EpochControl,
    EpochInput,
    EpochRunner,
    Stopwatch,
    complete_missing,
)
from anabranch.engine.segments import Segment, StreamInputs, watermark_delays_ms
from anabranch.engine.spark.frames import run_all_partitions
from anabranch.engine.spark.java import InterruptedBySparkError, jvm_session, wait_for_interrupt
from anabranch.engine.spark.query import SparkStream
from anabranch.engine.spark.sinks import Sink
from anabranch.engine.spark.templates import Templates
from anabranch.engine.spark.ticks import Ticks
from anabranch.engine.stages import EpochContext
from anabranch.engine.tables import TableKeeper
from anabranch.engine.tasks import TaskEpoch, spare_size_checks

logger = logging.getLogger(__name__)

_TURN_INTERVAL_MS = 20
_EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
_OMITS_EMPTY = "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"


class EpochLoop:
    """Runs each micro-batch, as the function of Spark's foreachBatch."""

    def __init__(
        self,
        segments: Sequence[Segment],
        coordinator: EpochControl,
        sink: Sink,
        *,
        complete: bool,
        append: bool = False,
        shuffle_partitions: int,
        stream: SparkStream,
        ticks: Ticks | None = None,
        late: LateRows | None = None,
        tables: TableKeeper | None = None,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        self._segments = segments
        #: What Spark has to read.
        self.stream_inputs = StreamInputs(segments, late)
        self._coordinator = coordinator
        self._sink = sink
        self._complete = complete
        self._append = append
        self._shuffle_partitions = shuffle_partitions
        self._stream = stream
        #: Only if a stage has something to do although no rows come.
        self._ticks = ticks
        #: Only if the user asks for rows that come too late.
        self._late = late
        #: Only if the query has broadcast tables.
        self._tables = tables
        self._templates = Templates()
        #: The rows of the epoch that ran last.
        self._latest: tuple[DataFrame, int] | None = None
        #: The session that was configured last: each query that Spark starts has one of its own.
        self._configured: Any = None
        #: Held while an epoch runs, so that a stop can wait for its end.
        self.running = threading.Lock()
        #: The processing time of epochs, if it is not Spark's.
        self._now_ms = now_ms
        delays_ms = watermark_delays_ms(segments)
        self._runner: EpochRunner[DataFrame] = EpochRunner(coordinator, self, delays_ms=delays_ms)
        #: Changes that the last epoch with rows made to state.
        self._previous_changes = 0
        #: The last error, as it was before Spark wrapped it.
        self.error: Exception | None = None

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        self._wait_for_turn(rows)
        try:
            now_ms = self._stream.batch_time_ms() if self._now_ms is None else self._now_ms()
            given = EpochInput(rows, now_ms, self._stream.watermark_ms(), self._stream.late_watermark_ms())
            self._runner.run(epoch, given)
            self._note_end()
        except Exception as error:
            self.error = error
            raise
        finally:
            self.running.release()

    def _note_end(self) -> None:
        """Notes the end of an epoch. One without rows tells nothing about the next one."""
        had_rows = self._ticks is None or self._stream.has_new_rows()
        if self._ticks is not None:
            self._ticks.note_epoch(had_rows=had_rows)
        if had_rows:
            self._previous_changes = self.reports[-1].changed_rows

    def _wait_for_turn(self, rows: DataFrame) -> None:
        """Takes the lock. A thread that holds it is stopping the query: then Spark interrupts this wait."""
        while not self.running.acquire(blocking=False):
            wait_for_interrupt(rows.sparkSession, _TURN_INTERVAL_MS)
            # Spark interrupts once, and a source may have caught that.
            if self._stream.is_stopped():
                raise InterruptedBySparkError

    def run(self, rows: DataFrame, epoch: TaskEpoch, clock: Stopwatch, *, repeated: bool) -> int | None:
        """Lets all tasks of an epoch run and the sink write; returns the number of late rows if they are written."""
        self._configure(rows)
        epoch.announce(rows.sparkSession)
        if self._tables is not None:
            # Of an epoch that is repeated, it is no longer known which sources had rows.
            may_change = repeated or self._tables.may_change(self._stream)
            self._tables.begin(rows, self._coordinator.accesses(), epoch, may_change=may_change)
            clock.lap("tables")
        plan = self._plan(rows, epoch.epoch)
        late_rows: int | None = None
        try:
            if self._late is not None and epoch.late_watermark_ms is not None:
                plan.keep_input()
            result = plan.build(reads_once=self._sink.reads_once)
            clock.lap("plan")
            self._sink.write(result, epoch.epoch)
            clock.lap("sink")
            complete_missing(self._coordinator, epoch.epoch, lambda missing: plan.complete(missing, epoch))
            clock.lap("complete")
            if self._late is not None:
                late_rows = self._write_late(self._late.sink, plan, epoch)
                clock.lap("late")
        finally:
            plan.release()
        self._latest = rows, epoch.epoch
        return late_rows

    def committed(self, epoch: int) -> None:
        """Notes that an epoch is part of the state, and so are its tables."""
        if self._tables is not None:
            self._tables.committed(epoch)

    @property
    def reports(self) -> Sequence[EpochReport]:
        """Reports of the last epochs, oldest first."""
        return self._runner.reports

    def fenced(self) -> FencedError | None:
        """Returns the error that a newer driver has taken over the job, if it has."""
        return self._coordinator.fenced()

    def wish(self) -> None:
        """Lets an epoch run though no rows come, if any stage has something to do in it."""
        if self._ticks is not None:
            self._ticks.wish()

    def prepare(self) -> None:
        """Plans ahead, after the route has changed between epochs. The caller makes sure that none runs."""
        if self._latest is not None:
            rows, epoch = self._latest
            self._plan(rows, epoch + 1).prepare()

    def _plan(self, rows: DataFrame, epoch: int) -> EpochPlan:
        context = EpochContext(
            epoch=epoch,
            previous_rows=self._stream.previous_rows(epoch),
            previous_changes=self._previous_changes,
            complete=self._complete,
            append=self._append,
            tables=self._tables.current if self._tables is not None else None,
        )
        accesses = self._coordinator.accesses()
        return EpochPlan(self._segments, self.stream_inputs, rows, accesses, context, self._templates, self._late)

    def _write_late(self, sink: LateSink, plan: EpochPlan, epoch: TaskEpoch) -> int:
        """Gives the rows that came too late to their sink, and returns how many there are."""
        late = plan.late_rows(epoch)
        count = run_all_partitions(late) if late is not None else 0
        if late is not None and count:
            sink.write(late, epoch.epoch)
        else:
            sink.write_none(plan.spark, epoch.epoch)
        return count

    def _configure(self, rows: DataFrame) -> None:
        """Configures the query's own session, which Spark cloned for it when the query started.

        Epochs that are repeated after a crash run in queries of their own.
        """
        session = jvm_session(rows.sparkSession)
        if self._configured is not None and self._configured == session:
            return
        self._configured = session
        conf = rows.sparkSession.conf
        # Partitions of a stateful stage are those that the route asked for: Spark must not merge or drop any.
        conf.set("spark.sql.adaptive.enabled", "false")
        # Nor must it leave out the tasks of a stage because it sees, by a join with an empty table, that no rows come.
        excluded = {*filter(None, (conf.get(_EXCLUDED_RULES, None) or "").split(",")), _OMITS_EMPTY}
        conf.set(_EXCLUDED_RULES, ",".join(sorted(excluded)))
        conf.set("spark.sql.shuffle.partitions", str(self._shuffle_partitions))
        match self._segments:
            case [Segment(stage=stage, after=())] if stage is not None:
                spare_size_checks(rows if self._late is None else without_rows(rows), stage.spec)
