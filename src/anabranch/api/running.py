"""One run of a query on Spark and its workers. A query that is rescaled by restarts has several of them."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.api.failures import is_of_another_query
from anabranch.api.progress import StateOperators
from anabranch.control.coordinator import Coordinator
from anabranch.core.answers import HeldVariable
from anabranch.core.errors import AnabranchError
from anabranch.engine.loop import EpochLoop
from anabranch.engine.spark.java import JvmCallError

logger = logging.getLogger(__name__)

#: Those that last, and the newest of those that have ended: Spark reports to listeners some time later.
_runs: dict[str, Running] = {}
_ended: deque[str] = deque()
_ENDED_MAX = 4
#: How often Spark's query is started again because a driver that was replaced wrote into its logs, which it does once.
_CONFLICTS_MAX = 3


class Running:
    """Its workers are taken down when it ends, whichever way it ends."""

    def __init__(
        self,
        query: StreamingQuery,
        loop: EpochLoop,
        coordinator: Coordinator,
        operators: StateOperators,
        release: Callable[[], None],
        restart: Callable[[], StreamingQuery],
    ) -> None:
        #: Spark's query: another one after each conflict with a driver that this one has replaced.
        self.query = query
        self.loop = loop
        self.coordinator = coordinator
        self._operators = operators
        self._release = release
        self._restart = restart
        self._conflicts = 0
        #: Reports of Spark's queries that ended in a conflict.
        self._earlier: list[StreamingQueryProgress] = []
        #: What the workers held when somebody asked last: rows and bytes of each state variable.
        self._held: list[HeldVariable] = []
        self._looked_at: int | None = None
        self._releasing = threading.Lock()
        self._is_stopping = False
        self.is_released = False
        _runs[str(query.runId)] = self

    def stop(self, timeout_s: float) -> None:
        """Stop after the epoch that is running, and take down the workers."""
        with self._releasing:
            self._is_stopping = True
        # Interrupting an epoch is safe, but makes Spark log pages of stack traces.
        waited = self.loop.running.acquire(timeout=timeout_s)
        try:
            self.query.stop()
        finally:
            if waited:
                self.loop.running.release()
            self.let_go()

    def let_go(self) -> None:
        """Take down the workers."""
        with self._releasing:
            if self.is_released:
                return
            self._look_at_state()
            self.is_released = True
            self._release()
            _forget(str(self.query.runId))

    def goes_on(self, query: StreamingQuery) -> bool:
        """Whether there is another query of Spark's in the place of one that has ended.

        A driver that has been replaced may write into Spark's logs before it notices. Then Spark ends the query of the
        newer one. All that was written fits what it would have done itself, so another query goes on from there.
        """
        with self._releasing:
            if query is not self.query:
                return True
            if self._is_stopping or self.is_released or self._conflicts == _CONFLICTS_MAX:
                return False
            try:
                error = query.exception()
                if error is None or not is_of_another_query(error) or self.loop.fenced() is not None:
                    return False
                logger.warning("a driver that was replaced wrote into Spark's logs; Spark's query is started again")
                earlier = self.progress()
                self.query = self._restart()
            except JvmCallError as failure:
                logger.warning("Spark's query cannot be started again: %s", failure)
                return False
            self._conflicts += 1
            self._earlier = earlier
            _runs[str(self.query.runId)] = self
            _forget(str(query.runId))
            return True

    def stop_while_idle(self) -> bool:
        """Stop Spark's query, unless an epoch runs."""
        if not self.loop.running.acquire(blocking=False):
            return False
        try:
            self.query.stop()
        finally:
            self.loop.running.release()
        return True

    def change_while_idle(self) -> None:
        """A stream without new rows has no epochs, and workers come and go all the same."""
        if not self.loop.running.acquire(blocking=False):
            return
        try:
            if self.coordinator.change_while_idle():
                self.loop.prepare()
                # At once: the more has come when the next epoch begins, the less that one waits.
                self.coordinator.cluster.on_beat()
        except AnabranchError as error:
            logger.warning("a change among the workers waits for the next epoch: %s", error)
        except JvmCallError as error:
            logger.info("the next epoch is planned when it comes: %s", error)
        finally:
            self.loop.running.release()

    def progress(self) -> list[StreamingQueryProgress]:
        """Spark's progress reports, each with the state operators and an ``anabranch`` part about the epoch."""
        return [*self._earlier, *self.completed(self.query.recentProgress)]

    def last_progress(self) -> StreamingQueryProgress | None:
        progress = self.query.lastProgress
        return None if progress is None else self.completed([progress])[0]

    def completed(self, reports: Iterable[StreamingQueryProgress]) -> list[StreamingQueryProgress]:
        """Spark's reports with what it does not know of. How large the state is, is as of now."""
        self._look_at_state()
        epochs = {report.epoch: report for report in tuple(self.loop.reports)}  # copied at once: epochs go on
        parallelism = {int(stage): number for stage, number in self.coordinator.parallelism.items()}
        completed = []
        for report in reports:
            document: dict[str, Any] = json.loads(report.json)
            epoch = epochs.get(document["batchId"])
            completed.append(self._operators.reported(document, epoch, held=self._held, parallelism=parallelism))
        return completed

    def _look_at_state(self) -> None:
        """Ask the workers how much they hold, once an epoch; not while state moves, when that takes long to tell."""
        epoch = self.coordinator.committed_epoch
        if self.is_released or epoch == self._looked_at or self.coordinator.cluster.migrations.is_under_way:
            return
        try:
            described = self.coordinator.describe(wait=False)
        except AnabranchError as error:
            logger.debug("the size of the state is not known: %s", error)
            return
        self._looked_at = epoch
        self._held = [size for worker in described for size in worker.variables or ()]


def _forget(run_id: str) -> None:
    """The run has ended: others that end after it take its place."""
    _ended.append(run_id)
    while len(_ended) > _ENDED_MAX:
        _runs.pop(_ended.popleft(), None)


def run_of(run_id: str) -> Running | None:
    """The run of a query of ours that has this id, while it lasts and for a while after that."""
    return _runs.get(run_id)
