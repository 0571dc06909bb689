"""The handle of a running query: what PySpark's StreamingQuery offers, and a look into workers and state."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.control.coordinator import Coordinator
from anabranch.core import errors
from anabranch.core.errors import AnabranchError, UnsupportedError
from anabranch.core.settings import Settings
from anabranch.engine.loop import EpochLoop
from anabranch.engine.stages import StatefulStage
from anabranch.plan.explain import explain_logical, explain_physical, explain_routes
from anabranch.plan.pipeline import Pipeline

_WATCH_INTERVAL_S = 0.5
#: How an error of ours that a task raised begins within Spark's report of it, and what comes after its message.
_TASK_ERROR = re.compile(r"anabranch\.core\.errors\.(\w+): ")
_END_OF_MESSAGE = re.compile(r"\s+SQLSTATE: |\n\tat |\n=== |\n\nDuring handling of |\n\nThe above exception was ")


class StreamQuery:
    """A running query. Its workers are taken down when it ends, whichever way it ends."""

    def __init__(
        self,
        query: StreamingQuery,
        pipeline: Pipeline,
        loop: EpochLoop,
        coordinator: Coordinator,
        *,
        settings: Settings,
        sink: str,
        default_parallelism: int,
        release: Callable[[], None],
    ) -> None:
        self._query = query
        self._pipeline = pipeline
        self._loop = loop
        self._coordinator = coordinator
        self._settings = settings
        self._sink = sink
        self._default_parallelism = default_parallelism
        self._release = release
        self._released = threading.Lock()
        self._is_released = False
        threading.Thread(target=self._watch, name="anabranch-watch", daemon=True).start()

    # --------------------------------------------------------------------------------- as in StreamingQuery

    @property
    def id(self) -> str:
        return str(self._query.id)

    @property
    def runId(self) -> str:
        return str(self._query.runId)

    @property
    def name(self) -> str | None:
        return self._query.name

    @property
    def isActive(self) -> bool:
        return bool(self._query.isActive)

    @property
    def status(self) -> dict[str, Any]:
        """Spark's status, with an ``anabranch`` part: the workers, and what was done about lost ones."""
        return {**self._query.status, "anabranch": dict(self._coordinator.status())}

    @property
    def recentProgress(self) -> list[dict[str, Any]]:
        """Spark's progress reports, each with an ``anabranch`` part about the epoch."""
        reports = dict(self._loop.reports)
        return [self._with_report(progress, reports) for progress in self._query.recentProgress]

    @property
    def lastProgress(self) -> dict[str, Any] | None:
        progress = self._query.lastProgress
        return None if progress is None else self._with_report(progress, dict(self._loop.reports))

    def awaitTermination(self, timeout: int | None = None) -> bool | None:
        """Wait until the query ends; with a timeout in seconds, say whether it has. Raises if the query failed."""
        try:
            return self._query.awaitTermination(timeout)
        except StreamingQueryException as error:
            raise self._explained(error) from error
        finally:
            if not self._query.isActive:
                self._let_go()

    def processAllAvailable(self) -> None:
        """Wait until all input that is there has been processed."""
        try:
            self._query.processAllAvailable()
        except StreamingQueryException as error:
            raise self._explained(error) from error

    def stop(self) -> None:
        """Stop after the epoch that is running, and take down the workers."""
        # Interrupting an epoch is safe, but makes Spark log pages of stack traces.
        waited = self._loop.running.acquire(timeout=self._settings.request_timeout_s)
        try:
            self._query.stop()
        finally:
            if waited:
                self._loop.running.release()
            self._let_go()

    def exception(self) -> Exception | None:
        """The error that ended the query, or None."""
        error = self._query.exception()
        return None if error is None else self._explained(error)

    def explain(self, extended: bool = False) -> None:
        """Print the logical plan, the physical plan and the routes; extended: also Spark's plan of the last epoch."""
        lines = explain_logical(self._pipeline, self._sink)
        lines += explain_physical(self._pipeline, self._settings, self._default_parallelism)
        addresses = [(member.worker, member.address) for member in self._coordinator.members]
        lines += explain_routes(self._coordinator.route, addresses)
        print("\n".join(lines))
        if extended:
            self._query.explain(True)

    # ------------------------------------------------------------------------------------- beyond Spark's

    def workers(self) -> list[dict[str, Any]]:
        """For each worker its id, address, pid, key groups, and rows and bytes of state."""
        self._need_workers()
        return self._coordinator.describe()

    def state(self, stage: str | int, variable: str | None = None) -> DataFrame:
        """The state of a stage as of the last committed epoch, as a DataFrame with the user's own columns."""
        self._need_workers()
        found = self._stage(stage)
        name = self._variable(found, variable)
        _, rows = self._coordinator.scan(found.spec, name)
        spark = self._session()
        return found.present(name, spark.createDataFrame(rows))

    def savepoint(self, path: str) -> int:
        """Save the job in a place of its own, a path or URL, and return the epoch that it was saved as of.

        The query goes on meanwhile. New jobs start from it with ``.option("anabranch.savepoint", path)``.
        """
        self._need_workers()
        return int(self._coordinator.savepoint(path).epoch)

    def _session(self) -> SparkSession:
        return self._pipeline.source.sparkSession

    def _stage(self, wanted: str | int) -> StatefulStage:
        stages = self._pipeline.stateful_stages
        for stage in stages:
            if wanted in (stage.spec.name, stage.spec.number, f"stage{stage.spec.number}"):
                return stage
        known = ", ".join(f"{s.spec.number} ({s.spec.name!r})" for s in stages) or "none"
        raise UnsupportedError(f"There is no stateful stage {wanted!r}. Stateful stages: {known}.")

    def _variable(self, stage: StatefulStage, wanted: str | None) -> str:
        names = [variable.name for variable in stage.spec.variables]
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted not in names:
            raise UnsupportedError(
                f"The stage {stage.spec.name!r} has the state variables {names}; name one of them: "
                f"state({stage.spec.name!r}, {names[0]!r})."
            )
        return str(wanted)

    def _with_report(self, progress: Any, reports: dict[int, Any]) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(progress.json)
        document["anabranch"] = reports.get(document["batchId"], {})
        return document

    def _explained(self, error: Exception) -> Exception:
        return explained(self._loop, error)

    def _need_workers(self) -> None:
        if self._is_released:
            raise UnsupportedError("The query has ended, and its workers with it. Its state is in its checkpoint.")

    def _watch(self) -> None:
        """Take down the workers when the query ends by itself."""
        # A failed query has ended as well; and a gateway that is gone took Spark with it.
        with contextlib.suppress(StreamingQueryException, Py4JError, OSError):
            while not self._query.awaitTermination(_WATCH_INTERVAL_S):  # type: ignore[arg-type]
                pass
        self._let_go()

    def _let_go(self) -> None:
        with self._released:
            if self._is_released:
                return
            self._is_released = True
            self._release()


def explained(loop: EpochLoop, error: Exception) -> Exception:
    """The error as Anabranch raised it, which says what to do; Spark's own wraps it in stack traces."""
    if isinstance(loop.error, AnabranchError):
        return loop.error
    return _raised_in_task(str(error)) or error


def _raised_in_task(report: str) -> AnabranchError | None:
    """The error of ours that ended a task, if it was one; of several in a chain, the last."""
    for found in reversed(list(_TASK_ERROR.finditer(report))):
        kind = getattr(errors, found[1], None)
        if isinstance(kind, type) and issubclass(kind, AnabranchError):
            return kind(_END_OF_MESSAGE.split(report[found.end() :], maxsplit=1)[0].strip())
    return None
