"""The epoch loop: what happens in each micro-batch, from its first row to its commit."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame

from anabranch.core.errors import EpochError, FencedError
from anabranch.engine.epochrun import EpochRun, run_all_partitions
from anabranch.engine.feeds import Feeds
from anabranch.engine.late import LateRows, LateSink, without_rows
from anabranch.engine.segments import Segment, watermark_delays_ms
from anabranch.engine.sinks import Sink
from anabranch.engine.stages import EpochContext
from anabranch.engine.tables import TableKeeper
from anabranch.engine.taskepoch import TaskEpoch
from anabranch.engine.tasks import spare_size_checks
from anabranch.engine.templates import Templates
from anabranch.engine.ticks import Ticks
from anabranch.wire.routed import StageAccess

logger = logging.getLogger(__name__)

#: How often what Spark did not run is run, before the epoch fails.
_MAX_COMPLETION_ROUNDS = 3
#: How often an epoch is run because workers are lost, before the query fails.
_MAX_RUNS = 5
_REMEMBERED_EPOCHS = 1000
#: In the report of an error, wherever it was raised.
_LOST = "LostWorkerError"
_TURN_INTERVAL_MS = 20
_EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
_OMITS_EMPTY = "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"
#: Of an epoch, and of the one before it.
_Watermarks = tuple[int | None, int | None]


class Coordinator(Protocol):
    """The control plane, as far as the loop needs it."""

    def begin(self, epoch: int) -> int:
        """Start an epoch on all workers; the number of this run of it."""

    def accesses(self) -> Mapping[int, StageAccess]:
        """How tasks reach the state of each stage: the same object as long as nothing in it changes."""

    def missing(self, epoch: int) -> Mapping[int, frozenset[int]]:
        """The partitions of each stage that have not been sealed yet."""

    def commit(self, epoch: int) -> Mapping[str, Any]:
        """Make the epoch durable and part of the state; figures for the progress report."""

    def abort(self, epoch: int) -> None:
        """Forget what was staged. Never raises: it runs while another error is on its way."""

    def recover(self, epoch: int) -> bool:
        """After an abort: whether the failure was that of a worker, whose part has been given to others.

        The state may be that of an older epoch then: the committed ones after it have to be run again.
        """

    def fenced(self) -> FencedError | None:
        """That a newer driver has taken over the job, if it has. Never raises."""

    @property
    def committed_epoch(self) -> int:
        """The newest epoch that is part of the state."""

    @property
    def durable_epoch(self) -> int:
        """The newest epoch that the state never goes back behind."""


class StreamFacts(Protocol):
    """What Spark knows about the streaming query."""

    def watermark_ms(self) -> int | None:
        """The event time up to which input is complete; None without a watermark."""

    def late_watermark_ms(self) -> int | None:
        """The watermark of the epoch before."""

    def previous_rows(self, epoch: int) -> int | None:
        """How many rows the last epoch with any read, before this one; None if that is not known."""

    def is_stopped(self) -> bool:
        """Whether Spark has been told to stop the query."""

    def has_new_rows(self) -> bool:
        """Whether the epoch that runs has any input, as far as can be told."""

    def has_rows_of(self, first: int, count: int) -> bool:
        """Whether any of these sources has input in the epoch that runs, as far as can be told."""


class EpochLoop:
    """Runs as the function of Spark's foreachBatch."""

    def __init__(
        self,
        segments: Sequence[Segment],
        coordinator: Coordinator,
        sink: Sink,
        *,
        complete: bool,
        append: bool = False,
        shuffle_partitions: int,
        stream: StreamFacts,
        ticks: Ticks | None = None,
        late: LateRows | None = None,
        tables: TableKeeper | None = None,
    ) -> None:
        self._segments = segments
        #: What Spark has to read.
        self.feeds = Feeds(segments, late)
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
        #: Rows and watermarks of epochs that are not durable: what they did to the state may have to be done again.
        self._volatile: dict[int, tuple[DataFrame, _Watermarks]] = {}
        #: The rows of the epoch that ran last.
        self._latest: tuple[DataFrame, int] | None = None
        self._configured = False
        #: Held while an epoch runs, so that a stop can wait for its end.
        self.running = threading.Lock()
        #: Figures of the last epochs, by epoch.
        self.reports: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=_REMEMBERED_EPOCHS)
        #: Changes that the last epoch with rows made to state.
        self._previous_changes = 0
        #: The processing time of epochs.
        self.now_ms: Callable[[], int] = wall_clock_ms
        #: The last error, as it was before Spark wrapped it.
        self.error: Exception | None = None

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        self._wait_for_turn(rows)
        try:
            self._run_until_it_counts(rows, epoch)
            self._note_end()
        except Exception as error:
            self.error = error
            raise
        finally:
            self.running.release()

    def _note_end(self) -> None:
        """An epoch is over. One without rows tells nothing about the next one."""
        had_rows = self._ticks is None or self._stream.has_new_rows()
        if self._ticks is not None:
            self._ticks.note_epoch(had_rows=had_rows)
        if had_rows:
            self._previous_changes = self.reports[-1][1].get("changedRows", 0)

    def _run_until_it_counts(self, rows: DataFrame, epoch: int) -> None:
        """Run the epoch, and again if a worker was lost meanwhile: state and input are as they were before."""
        for left in reversed(range(_MAX_RUNS)):
            try:
                for earlier, (its_rows, its_watermarks) in sorted(self._volatile.items()):
                    if earlier > self._coordinator.committed_epoch:
                        self._run(its_rows, earlier, its_watermarks)
                self._run(rows, epoch, (self._stream.watermark_ms(), self._stream.late_watermark_ms()))
                return
            except Exception as error:
                self._coordinator.abort(epoch)
                if isinstance(error, FencedError | _InterruptedBySparkError):
                    raise
                # A newer driver clears away what this one was writing, which then fails in any way at all.
                if (fenced := self._coordinator.fenced()) is not None:
                    raise fenced from error
                # A task may have failed to reach a worker that is well again by now.
                if not left or not (self._coordinator.recover(epoch) or _LOST in f"{type(error).__name__}: {error}"):
                    raise
                logger.warning("epoch %d failed with a lost worker, and runs again", epoch)

    def _wait_for_turn(self, rows: DataFrame) -> None:
        """Take the lock. Whoever holds it is stopping the query, which ends with Spark interrupting this wait."""
        jvm: Any = rows.sparkSession._jvm
        while not self.running.acquire(blocking=False):
            # In the JVM, in the very thread that Spark interrupts: a wait on this side would keep Spark from stopping.
            try:
                jvm.java.lang.Thread.sleep(_TURN_INTERVAL_MS)
            except Py4JJavaError:
                raise _InterruptedBySparkError from None
            # Spark interrupts once, and a source may have caught that.
            if self._stream.is_stopped():
                raise _InterruptedBySparkError

    def _run(self, rows: DataFrame, epoch: int, watermarks: _Watermarks) -> None:
        clock = _Stopwatch()
        self._configure(rows)
        number = self._coordinator.begin(epoch)
        task_epoch = TaskEpoch(
            epoch=epoch,
            run=number,
            delays_ms=watermark_delays_ms(self._segments),
            processing_time_ms=self.now_ms(),
            watermark_ms=watermarks[0],
            late_watermark_ms=watermarks[1],
        )
        task_epoch.announce(rows.sparkSession)
        clock.lap("begin")
        if self._tables is not None:
            # Of an epoch that is repeated, nobody knows any more which sources had rows.
            repeated = epoch in self._volatile
            accesses = self._coordinator.accesses()
            self._tables.begin(rows, accesses, task_epoch, may_change=repeated or self._tables.may_change(self._stream))
            clock.lap("tables")
        run = self._epoch_run(rows, epoch)
        late_rows: dict[str, int] = {}
        try:
            if self._late is not None and task_epoch.late_watermark_ms is not None:
                run.keep_input()
            result = run.build(reads_once=self._sink.reads_once)
            clock.lap("plan")
            self._sink.write(result, epoch)
            clock.lap("sink")
            self._complete_what_is_missing(run, task_epoch)
            clock.lap("complete")
            if self._late is not None:
                late_rows["lateRows"] = self._write_late(self._late.sink, run, task_epoch)
                clock.lap("late")
        finally:
            run.release()
        figures = self._coordinator.commit(epoch)
        clock.lap("commit")
        if self._tables is not None:
            self._tables.committed(epoch)
        self._latest = rows, epoch
        self._volatile[epoch] = rows, watermarks
        for durable in [each for each in self._volatile if each <= self._coordinator.durable_epoch]:
            del self._volatile[durable]
        times = {"durationMs": clock.laps_ms, "watermarkMs": task_epoch.watermark_ms}
        self.reports.append((epoch, {**figures, **late_rows, **times}))
        logger.info("epoch %d committed: %s", epoch, clock.laps_ms)

    def fenced(self) -> FencedError | None:
        """That a newer driver has taken over the job, if it has."""
        return self._coordinator.fenced()

    def wish(self) -> None:
        """Let an epoch run though no rows come, if any stage has something to do in it."""
        if self._ticks is not None:
            self._ticks.wish()

    def prepare(self) -> None:
        """Plan ahead, after the route has changed between epochs. The caller makes sure that none runs."""
        if self._latest is not None:
            rows, epoch = self._latest
            self._epoch_run(rows, epoch + 1).prepare()

    def _epoch_run(self, rows: DataFrame, epoch: int) -> EpochRun:
        accesses, context = self._coordinator.accesses(), self._context(epoch)
        return EpochRun(self._segments, self.feeds, rows, accesses, context, self._templates, self._late)

    def _write_late(self, sink: LateSink, run: EpochRun, epoch: TaskEpoch) -> int:
        """Give the rows that came too late to their sink; how many there are."""
        late = run.late_rows(epoch)
        count = run_all_partitions(late) if late is not None else 0
        if late is not None and count:
            sink.write(late, epoch.epoch)
        else:
            sink.write_none(run.spark, epoch.epoch)
        return count

    def _context(self, epoch: int) -> EpochContext:
        return EpochContext(
            epoch=epoch,
            previous_rows=self._stream.previous_rows(epoch),
            previous_changes=self._previous_changes,
            complete=self._complete,
            append=self._append,
            tables=self._tables.current if self._tables is not None else None,
        )

    def _complete_what_is_missing(self, run: EpochRun, epoch: TaskEpoch) -> None:
        """A sink may read only some of the rows, but every partition's state changes belong to the epoch."""
        for _ in range(_MAX_COMPLETION_ROUNDS):
            missing = self._coordinator.missing(epoch.epoch)
            if not missing:
                return
            run.complete(missing, epoch)
        raise EpochError(
            f"Epoch {epoch.epoch} cannot be completed: Spark did not run {dict(missing)} (stage: partitions). Nothing "
            "of it is committed. Start the query again; if it happens again, report the query's explain()."
        )

    def _configure(self, rows: DataFrame) -> None:
        """Settings of the query's own session, which Spark cloned for it when the query started."""
        if self._configured:
            return
        self._configured = True
        conf = rows.sparkSession.conf
        # Partitions of a stateful stage are those that the route asked for: Spark must not merge or drop any.
        conf.set("spark.sql.adaptive.enabled", "false")
        # Nor must it leave out the tasks of a stage because it sees, by a join with an empty table, that no rows come.
        conf.set(_EXCLUDED_RULES, ",".join(filter(None, [conf.get(_EXCLUDED_RULES, None), _OMITS_EMPTY])))
        conf.set("spark.sql.shuffle.partitions", str(self._shuffle_partitions))
        match self._segments:
            case [Segment(stage=stage, after=())] if stage is not None:
                spare_size_checks(rows if self._late is None else without_rows(rows), stage.spec)


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class _InterruptedBySparkError(Exception):
    """Spark has interrupted the wait for a turn, to stop the query.

    Spark tells a stop from a failure by this very text. The original error has it too, but with a stack trace so long
    that Spark's search for the text overflows its own stack.
    """

    def __init__(self) -> None:
        super().__init__(
            "py4j.protocol.Py4JJavaError: An error occurred while calling sleep.\n: java.lang.InterruptedException"
        )


class _Stopwatch:
    """Named laps in milliseconds."""

    def __init__(self) -> None:
        self._last_ns = time.monotonic_ns()
        self.laps_ms: dict[str, int] = {}

    def lap(self, name: str) -> None:
        now_ns = time.monotonic_ns()
        self.laps_ms[name] = (now_ns - self._last_ns) // 1_000_000
        self._last_ns = now_ns
