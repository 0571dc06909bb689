"""One run of a query on Spark and its workers. A query that is rescaled by restarts has several of them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.control.coordinator import Coordinator
from anabranch.core.errors import AnabranchError
from anabranch.engine.loop import EpochLoop

logger = logging.getLogger(__name__)


class Running:
    """Its workers are taken down when it ends, whichever way it ends."""

    def __init__(
        self, query: StreamingQuery, loop: EpochLoop, coordinator: Coordinator, release: Callable[[], None]
    ) -> None:
        self.query = query
        self.loop = loop
        self.coordinator = coordinator
        self._release = release
        self._releasing = threading.Lock()
        self.is_released = False

    def stop(self, timeout_s: float) -> None:
        """Stop after the epoch that is running, and take down the workers."""
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
            self.is_released = True
            self._release()

    def change_while_idle(self) -> None:
        """A stream without new rows has no epochs, and workers come and go all the same."""
        if not self.loop.running.acquire(blocking=False):
            return
        try:
            if self.coordinator.change_while_idle():
                self.loop.prepare()
        except AnabranchError as error:
            logger.warning("a change among the workers waits for the next epoch: %s", error)
        except Py4JError as error:
            logger.info("the next epoch is planned when it comes: %s", error)
        finally:
            self.loop.running.release()

    def progress(self) -> list[dict[str, Any]]:
        """Spark's progress reports, each with an ``anabranch`` part about the epoch."""
        reports = dict(self.loop.reports)
        return [self._with_report(progress, reports) for progress in self.query.recentProgress]

    def last_progress(self) -> dict[str, Any] | None:
        progress = self.query.lastProgress
        return None if progress is None else self._with_report(progress, dict(self.loop.reports))

    def _with_report(self, progress: Any, reports: dict[int, Any]) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(progress.json)
        document["anabranch"] = reports.get(document["batchId"], {})
        return document
