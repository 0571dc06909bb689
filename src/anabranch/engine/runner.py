"""Runs an epoch until it counts: begin, the work, commit; and all of it again if a worker was lost meanwhile.

The work is that of Spark's side (``loop``). Epochs that are part of the state and not durable yet are remembered
with all that they depend on, because they may have to be run again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from anabranch.core.errors import EpochError, FencedError, LostWorkerError
from anabranch.core.reports import EpochReport
from anabranch.engine.spark.java import InterruptedBySparkError
from anabranch.engine.tasks import TaskEpoch
from anabranch.wire.routed import StageAccess

logger = logging.getLogger(__name__)

#: How often what Spark did not run is run, before the epoch fails.
_MAX_COMPLETION_ROUNDS = 3
_REMEMBERED_EPOCHS = 1000
#: In the report of an error because of a lost worker, wherever it was raised.
LOST_WORKER = LostWorkerError.__name__

Rows = TypeVar("Rows")
RowsRead = TypeVar("RowsRead", contravariant=True)


class EpochControl(Protocol):
    """The control plane, as far as epochs need it."""

    def begin(self, epoch: int) -> int:
        """Begins an epoch on all workers, and returns the number of this run of it."""

    def accesses(self) -> Mapping[int, StageAccess]:
        """Returns how tasks reach the state of each stage: the same object as long as nothing in it changes."""

    def missing(self, epoch: int) -> Mapping[int, frozenset[int]]:
        """Returns the partitions of each stage that have not been sealed yet."""

    def commit(self, epoch: int) -> EpochReport:
        """Makes the epoch durable and part of the state, and returns its report, without times and late rows."""

    def abort(self, epoch: int) -> None:
        """Forgets what was staged. Never raises: it runs while another error is on its way."""

    def recover(self, epoch: int) -> bool:
        """Tells, after an abort, whether a worker has failed, whose part has been given to others.

        The state may be that of an older epoch then: the committed ones after it have to be run again.
        """

    @property
    def worker_count(self) -> int: ...

    def lost_lately(self, changes: int) -> list[str]:
        """Returns the workers whose loss led to the last changes, of which this is the number."""

    def fenced(self) -> FencedError | None:
        """Returns the error that a newer driver has taken over the job, if it has. Never raises."""

    @property
    def committed_epoch(self) -> int:
        """The newest epoch that is part of the state."""

    @property
    def durable_epoch(self) -> int:
        """The newest epoch that the state never goes back behind."""


@dataclass(frozen=True)
class EpochInput(Generic[Rows]):
    """All that the result of an epoch depends on, beside the state."""

    rows: Rows
    #: When Spark planned the epoch: the same however often, and by whichever driver, the epoch is run.
    processing_time_ms: int
    watermark_ms: int | None = None
    #: The watermark of the epoch before.
    late_watermark_ms: int | None = None


class EpochWork(Protocol[RowsRead]):
    """What is done in an epoch between begin and commit."""

    def run(self, rows: RowsRead, epoch: TaskEpoch, clock: Stopwatch, *, repeated: bool) -> int | None:
        """Lets all tasks run and the sink write; returns the number of late rows if they are written.

        ``repeated``: the epoch was committed before.
        """

    def committed(self, epoch: int) -> None:
        """Notes that the epoch is part of the state."""


class EpochRunner(Generic[Rows]):
    """Runs one epoch after the other."""

    def __init__(
        self,
        coordinator: EpochControl,
        work: EpochWork[Rows],
        *,
        delays_ms: Mapping[int, int | None],
    ) -> None:
        self._coordinator = coordinator
        self._work = work
        self._delays_ms = delays_ms
        #: The input of epochs that are not durable: what they did to the state may have to be done again.
        self._volatile: dict[int, EpochInput[Rows]] = {}
        #: Reports of the last epochs, oldest first.
        self.reports: deque[EpochReport] = deque(maxlen=_REMEMBERED_EPOCHS)

    def run(self, epoch: int, given: EpochInput[Rows]) -> None:
        """Runs the epoch, and again if a worker was lost meanwhile: state and input are as they were before."""
        fruitless_runs, durable = 0, self._coordinator.durable_epoch
        while True:
            try:
                for earlier, its_input in sorted(self._volatile.items()):
                    if earlier > self._coordinator.committed_epoch:
                        self._run_once(earlier, its_input)
                self._run_once(epoch, given)
                return
            except Exception as error:
                self._coordinator.abort(epoch)
                if isinstance(error, FencedError | InterruptedBySparkError):
                    raise
                # A newer driver clears away what this one was writing, which then fails in any way at all.
                if (fenced := self._coordinator.fenced()) is not None:
                    raise fenced from error
                # A task may have failed to reach a worker that is well again by now.
                if not self._coordinator.recover(epoch) and LOST_WORKER not in f"{type(error).__name__}: {error}":
                    raise
                # Epochs before this one may have been run again, and be durable now.
                fruitless_runs = 0 if self._coordinator.durable_epoch > durable else fruitless_runs + 1
                durable = self._coordinator.durable_epoch
                if fruitless_runs >= self._fruitless_runs_max:
                    raise self._given_up(epoch, fruitless_runs, error) from error
                logger.warning("epoch %d failed with a lost worker, and runs again", epoch)

    @property
    def _fruitless_runs_max(self) -> int:
        """How often an epoch may fail with lost workers, none becoming durable meanwhile, before the query fails.

        Every worker may have been lost by then, and its replacement too.
        """
        return 2 * self._coordinator.worker_count + 3

    def _given_up(self, epoch: int, runs: int, error: Exception) -> EpochError:
        lost = ", ".join(self._coordinator.lost_lately(runs)) or "which ones is not known"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return EpochError(
            f"Epoch {epoch} was run {runs} times, and each time workers were lost ({lost}); the last error was: "
            f"{reason} If it is the epoch that they do not survive, see their logs for why, such as too little memory. "
            "Then start the query again: it resumes from its checkpoint."
        )

    def _run_once(self, epoch: int, given: EpochInput[Rows]) -> None:
        clock = Stopwatch()
        run = self._coordinator.begin(epoch)
        task_epoch = TaskEpoch(
            epoch=epoch,
            run=run,
            delays_ms=self._delays_ms,
            processing_time_ms=given.processing_time_ms,
            watermark_ms=given.watermark_ms,
            late_watermark_ms=given.late_watermark_ms,
        )
        clock.lap("begin")
        late_rows = self._work.run(given.rows, task_epoch, clock, repeated=epoch in self._volatile)
        report = self._coordinator.commit(epoch)
        clock.lap("commit")
        self._work.committed(epoch)
        self._volatile[epoch] = given
        for durable in [each for each in self._volatile if each <= self._coordinator.durable_epoch]:
            del self._volatile[durable]
        self.reports.append(
            replace(
                report,
                duration_ms=clock.laps_ms,
                watermark_ms=task_epoch.watermark_ms,
                late_rows=UNSET if late_rows is None else late_rows,
            )
        )
        logger.info("epoch %d committed: %s", epoch, clock.laps_ms)


def complete_missing(
    coordinator: EpochControl, epoch: int, complete: Callable[[Mapping[int, frozenset[int]]], None]
) -> None:
    """Runs the partitions that the sink has not read: the state changes of all belong to the epoch."""
    for _ in range(_MAX_COMPLETION_ROUNDS):
        missing = coordinator.missing(epoch)
        if not missing:
            return
        complete(missing)
    raise EpochError(
        f"Epoch {epoch} cannot be completed: Spark did not run {dict(missing)} (stage: partitions). Nothing of it is "
        "committed. Start the query again; if it happens again, report the query's explain()."
    )


class Stopwatch:
    """Measures named laps in milliseconds."""

    def __init__(self) -> None:
        self._last_ns = time.monotonic_ns()
        self.laps_ms: dict[str, int] = {}

    def lap(self, name: str) -> None:
        now_ns = time.monotonic_ns()
        self.laps_ms[name] = (now_ns - self._last_ns) // 1_000_000
        self._last_ns = now_ns
