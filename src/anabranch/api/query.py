"""The handle of a running query: what PySpark's StreamingQuery offers, and a look into workers and state."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.listener import StreamingQueryProgress

from anabranch.api.control import QueryControl
from anabranch.api.failures import as_failure, explained
from anabranch.api.running import Running
from anabranch.control.coordinator import Coordinator
from anabranch.control.membership.rescale import Rescale, asked_for
from anabranch.control.strategies.strategy import MigrationStrategy
from anabranch.core.errors import UnsupportedError
from anabranch.core.ids import StageNumber, WorkerId
from anabranch.core.reports import EpochReport, WorkerReport, as_json
from anabranch.core.settings import MAX_PARALLELISM, Settings
from anabranch.engine.spark.files import TemporaryFolder
from anabranch.engine.spark.java import JvmCallError
from anabranch.engine.stages import StatefulStage
from anabranch.operators.process.timers import TIMERS
from anabranch.plan.explain import explain_logical, explain_physical, explain_routes
from anabranch.plan.pipeline import Pipeline
from anabranch.wire.credentials import Credentials

if TYPE_CHECKING:
    from anabranch.control.http.server import ControlServer

#: Short, because what changes between two epochs holds up none.
_WATCH_INTERVAL_S = 0.1
#: As many as Spark remembers.
_REMEMBERED_REPORTS = 100


class StreamQuery:
    """A running query. Its workers are taken down when it ends, whichever way it ends."""

    def __init__(
        self,
        running: Running,
        pipeline: Pipeline,
        strategy: MigrationStrategy,
        launch: Callable[[Settings, Mapping[StageNumber, int]], Running],
        *,
        settings: Settings,
        sink: str,
        temporary: TemporaryFolder | None = None,
    ) -> None:
        self._running = running
        self.pipeline = pipeline
        self.settings = settings
        self._sink = sink
        #: How the query is rescaled.
        self.strategy = strategy
        self._launch = launch
        #: The checkpoint, if it is of no use after the query.
        self._temporary = temporary
        #: Held while one run of the query gives way to the next.
        self._restarting = threading.Lock()
        #: Reports of earlier runs.
        self._past: deque[StreamingQueryProgress] = deque(maxlen=_REMEMBERED_REPORTS)
        #: What ended the query, if it was not Spark that failed.
        self._failure: Exception | None = None
        self._server: ControlServer | None = None
        self._closing = threading.Lock()
        #: The rescale that was asked for last.
        self.last_rescale: Rescale | None = None

    def open_control(self, *, strict_port: bool) -> None:
        """Serve the HTTP API, and look after the query from now on."""
        if self.settings.control_port >= 0:
            from anabranch.control.http.server import ControlServer

            self._server = ControlServer(
                QueryControl(self),
                host=self.settings.control_host,
                port=self.settings.control_port,
                credentials=Credentials.of(self.settings),
                strict_port=strict_port,
            )
        threading.Thread(target=self._watch, name="anabranch-watch", daemon=True).start()

    # --------------------------------------------------------------------------------- as in StreamingQuery

    @property
    def id(self) -> str:
        return str(self._running.query.id)

    @property
    def runId(self) -> str:
        return str(self._running.query.runId)

    @property
    def name(self) -> str | None:
        return self._running.query.name

    @property
    def isActive(self) -> bool:
        query = self._running.query
        return self._restarting.locked() or bool(query.isActive) or self._running.goes_on(query)

    @property
    def status(self) -> dict[str, Any]:
        """Spark's status, with an ``anabranch`` part: the workers, and what was done about lost ones."""
        return {**self._running.query.status, "anabranch": as_json(self.coordinator.status())}

    @property
    def recentProgress(self) -> list[StreamingQueryProgress]:
        """Spark's progress reports, with the state operators, and an ``anabranch`` part about the epoch."""
        return [*self._past, *self._running.progress()]

    @property
    def lastProgress(self) -> StreamingQueryProgress | None:
        return self._running.last_progress() or (self._past[-1] if self._past else None)

    def awaitTermination(self, timeout: int | None = None) -> bool | None:
        """Wait until the query ends; with a timeout in seconds, say whether it has. Raises if the query failed."""
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            return self._running.query.awaitTermination(timeout)  # Spark says what is wrong with it
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            running = self._running
            spark_query = running.query
            left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
            try:
                ended = spark_query.awaitTermination(left_s)  # type: ignore[arg-type]
            except StreamingQueryException as error:
                if running.goes_on(spark_query):
                    continue
                running.let_go()
                raise explained(self._running.loop, error) from error
            if ended is False:
                return False
            with self._restarting:  # if it has ended for a restart, the next run is there after this
                if self._failure is not None:
                    raise self._failure
                if self._running is running:
                    running.let_go()
                    self._leave()
                    return ended

    def processAllAvailable(self) -> None:
        """Wait until all input that is there has been processed."""
        while True:
            running = self._running
            spark_query = running.query
            try:
                spark_query.processAllAvailable()
            except StreamingQueryException as error:
                if running.goes_on(spark_query):
                    continue
                raise explained(self._running.loop, error) from error
            with self._restarting:
                if self._failure is not None:
                    raise self._failure
                if self._running is running:
                    return

    def stop(self) -> None:
        """Stop after the epoch that is running, and take down the workers."""
        with self._restarting:
            self._running.stop(self.settings.request_timeout_s)
        self._leave()

    def exception(self) -> Exception | None:
        """The error that ended the query, or None."""
        spark_query = self._running.query
        error = spark_query.exception()
        if error is None or self._running.goes_on(spark_query):
            return self._failure
        return explained(self._running.loop, error)

    def explain(self, extended: bool = False) -> None:
        """Print the logical plan, the physical plan and the routes; extended: also Spark's plan of the last epoch."""
        coordinator, members = self.coordinator, self.coordinator.members
        lines = explain_logical(self.pipeline, self._sink)
        lines += explain_physical(
            self.pipeline,
            parallelism={stage: access.parallelism for stage, access in coordinator.accesses().items()},
            workers=len(members),
            store=members[0].store or self.settings.store,
            key_groups=coordinator.route.key_groups,
        )
        lines += explain_routes(coordinator.route, [(member.worker, member.address) for member in members])
        print("\n".join(lines))
        if extended:
            self._running.query.explain(True)

    # ------------------------------------------------------------------------------------- beyond Spark's

    @property
    def url(self) -> str | None:
        """Where the query's HTTP API is; None if it has none, or has ended."""
        return None if self._server is None else self._server.url

    @property
    def token(self) -> str:
        """The secret that changes over HTTP have to show: that of the settings, or one drawn for this query."""
        return self.settings.token

    @property
    def coordinator(self) -> Coordinator:
        return self._running.coordinator

    def epoch_reports(self) -> list[EpochReport]:
        """Reports of the last epochs, oldest first."""
        return list(self._running.loop.reports)

    def wish_for_epoch(self) -> None:
        """Let timers, time-outs and windows be looked after now, though no rows come."""
        self._running.loop.wish()

    def workers(self) -> list[dict[str, Any]]:
        """For each worker its id, address, pid, key groups, and rows and bytes of state."""
        return list(as_json(self.worker_reports()))

    def worker_reports(self) -> list[WorkerReport]:
        """What each worker holds."""
        self._need_workers()
        return self.coordinator.describe()

    def state(self, stage: str | int, variable: str | None = None) -> DataFrame:
        """The state of a stage as of the last committed epoch, as a DataFrame with the user's own columns."""
        self._need_workers()
        found = self._stage(stage)
        name = self._variable(found, variable)
        _, rows = self.coordinator.scan(found.spec, name)
        return found.present(name, self.pipeline.source.sparkSession.createDataFrame(rows))

    def savepoint(self, path: str) -> int:
        """Save the job in a place of its own, a path or URL, and return the epoch that it was saved as of.

        The query goes on meanwhile. New jobs start from it with ``.option("anabranch.savepoint", path)``.
        """
        self._need_workers()
        return int(self.coordinator.savepoint(path).epoch)

    def rescale(
        self, workers: int | None = None, parallelism: int | None = None, stage: str | int | None = None
    ) -> Rescale:
        """Change the number of workers, or the parallelism of one stateful stage or of all, while the query runs.

        It takes effect before the next epoch that finds new workers ready; state follows as ``anabranch.migration``
        says. Without any argument, the load is shared out anew. The handle has ``wait(timeout)`` and ``progress()``.
        """
        self._need_workers()
        _check_number("workers", workers)
        _check_number("parallelism", parallelism)
        if stage is not None and parallelism is None:
            raise UnsupportedError("A stage is named, but no parallelism for it: workers serve all stages.")
        stages = self.pipeline.stateful_stages if stage is None else [self._stage(stage)]
        wanted = {int(each.spec.number): parallelism for each in stages} if parallelism is not None else {}
        rescale = asked_for(workers, wanted)
        self.strategy.rescale(self, rescale)
        self.last_rescale = rescale
        return rescale

    def scale_out(self, stage: str | int | None = None) -> Rescale:
        """One worker more than was asked for last, and one task more for a stateful stage, if one is named."""
        self._need_workers()
        stages = [] if stage is None else [self._stage(stage).spec.number]
        rescale = self.strategy.scale_out(self, stages)
        self.last_rescale = rescale
        return rescale

    def drain(self, worker: str) -> Rescale:
        """Let a worker hand over all that it has, and leave."""
        self._need_workers()
        self.last_rescale = self.coordinator.cluster.drain(WorkerId(worker))
        return self.last_rescale

    def restarting(self) -> threading.Lock:
        """Held while one run of the query gives way to the next, or to none."""
        return self._restarting

    @property
    def is_released(self) -> bool:
        """Whether the query has ended for good."""
        return self._running.is_released

    def relaunch(self, settings: Settings, parallelism: Mapping[StageNumber, int]) -> None:
        """Stop this run of the query, and start another one. The caller holds the lock for restarts."""
        before = self._running
        try:
            before.stop(self.settings.request_timeout_s)
            self._past.extend(before.progress())
            self._running = self._launch(settings, parallelism)
        except Exception as error:
            self._failure = error
            raise
        self.settings = settings

    def _stage(self, wanted: str | int) -> StatefulStage:
        stages = self.pipeline.stateful_stages
        for stage in stages:
            if wanted in (stage.spec.name, stage.spec.number, f"stage{stage.spec.number}"):
                return stage
        known = ", ".join(f"{s.spec.number} ({s.spec.name!r})" for s in stages) or "none"
        raise UnsupportedError(f"There is no stateful stage {wanted!r}. Stateful stages: {known}.")

    def _variable(self, stage: StatefulStage, wanted: str | None) -> str:
        names = [variable.name for variable in stage.spec.variables]
        declared = [name for name in names if name != TIMERS]
        if wanted is None and len(declared) == 1:
            return declared[0]
        if wanted not in names:
            raise UnsupportedError(
                f"The stage {stage.spec.name!r} has the state variables {names}; name one of them: "
                f"state({stage.spec.name!r}, {names[0]!r})."
            )
        return str(wanted)

    def _need_workers(self) -> None:
        if self._running.is_released and not self._restarting.locked():
            raise UnsupportedError("The query has ended, and its workers with it. Its state is in its checkpoint.")

    def _watch(self) -> None:
        """Take down the workers when the query ends by itself, and end it if a newer driver has taken over."""
        while True:
            running = self._running
            spark_query = running.query
            looked_s = time.monotonic()
            # A failed query has ended as well; and a gateway that is gone took Spark with it.
            with contextlib.suppress(StreamingQueryException, JvmCallError, OSError):
                while not spark_query.awaitTermination(_WATCH_INTERVAL_S):  # type: ignore[arg-type]
                    running.change_while_idle()
                    if time.monotonic() - looked_s >= self.settings.heartbeat_s:
                        self._stop_if_fenced(running)
                        looked_s = time.monotonic()
            with contextlib.suppress(JvmCallError, OSError):
                if running.goes_on(spark_query):
                    continue
            with self._restarting:
                if self._running is running:
                    running.let_go()
                    break
        self._leave()

    def _stop_if_fenced(self, running: Running) -> None:
        """An epoch that runs notices by itself. Others do, if nobody looks, only when there is input again."""
        fenced = running.loop.fenced()
        if fenced is None:
            return
        with self._restarting:  # who waits for the end of the query hears of it when it is known why it has ended
            if self._running is running and running.stop_while_idle():
                self._failure = as_failure(fenced)

    def _leave(self) -> None:
        """The query and its workers have ended: let go of the rest."""
        with self._closing:  # whoever comes second waits until it is closed, too
            server, self._server = self._server, None
            if server is not None:
                server.close()
            if self._temporary is not None:
                self._temporary.remove()


def _check_number(name: str, number: Any) -> None:
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if number is not None and not (is_whole and 1 <= number <= MAX_PARALLELISM):
        raise UnsupportedError(f"{name} is {number!r}; it must be a whole number from 1 to {MAX_PARALLELISM}.")
