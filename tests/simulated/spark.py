"""Simulated Spark: plans micro-batches into its log of offsets, runs them, and commits them.

It repeats the epoch that is planned and not committed, from the offsets in the log, and plans another one only when
there is none: the boundaries of an epoch depend on what has arrived at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from anabranch.checkpoint import paths
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch
from anabranch.core.schemas import INDEX
from anabranch.engine.runner import EpochInput, EpochRunner, Stopwatch, complete_missing
from anabranch.engine.tables import TableKeeper
from anabranch.engine.tasks import TaskEpoch
from anabranch.wire.routed import RoutedState, StageAccess
from simulated.job import TABLES, WEIGHT, Batch, hash_of, sink_rows, weight_in
from simulated.storage import SimStorage
from simulated.tasks import Executors, Told, keys_table, value_changes
from simulated.world import Process, SimFuture

if TYPE_CHECKING:
    from anabranch.control.coordinator import Coordinator
    from simulated.application import Application

#: How long Spark looks for new rows at a time.
_LOOK_S = 0.02


class Offsets(dict[str, Any]):
    """An entry of the log of offsets, kept as it is; as text, that of a query whose sources keep no logs."""

    def decode(self) -> str:
        return "v1\n{}"


class SparkError(Exception):
    """Spark's own failure."""


class SimSpark:
    """One streaming query of Spark's, in the driver's process."""

    def __init__(
        self, application: Application, process: Process, runner: EpochRunner[Batch], stopping: Callable[[], bool]
    ) -> None:
        self._application = application
        self._process = process
        self._storage = SimStorage(application.disk, application.location, process)
        self._runner = runner
        self._stopping = stopping
        #: Held while an epoch runs.
        self.running = process.lock()

    def run(self) -> None:
        """Runs epochs until all rows have been processed."""
        application = self._application
        # Read once, as Spark does: whatever another driver commits later comes to light when this one is to commit it.
        committed, planned = self._newest(paths.SPARK_COMMITS), self._newest(paths.SPARK_OFFSETS)
        while True:
            if self._stopping():
                application.world.seen["a query is stopped"] += 1
                raise SparkError("the query was stopped")
            if planned > committed:
                self._run_epoch(planned)
                committed = planned
            elif self._plan(Epoch(committed + 1)):
                planned = Epoch(committed + 1)
            elif application.is_over(committed):
                return
            else:
                self._process.sleep(_LOOK_S)

    def run_once(self) -> None:
        """Repeats the epoch that is planned and not committed, as a query with a trigger of once does."""
        committed, planned = self._newest(paths.SPARK_COMMITS), self._newest(paths.SPARK_OFFSETS)
        if planned > committed or self._plan(Epoch(committed + 1)):
            self._run_epoch(max(planned, Epoch(committed + 1)))

    def _plan(self, epoch: Epoch) -> bool:
        """Logs the boundaries of the next epoch, if there is anything to do in it."""
        application = self._application
        start = self.batch(Epoch(epoch - 1)).end if epoch else 0
        available = application.rows_arrived() - start
        if available <= 0 and not application.wants_tick(epoch):
            return False
        end = start + min(max(available, 0), application.world.rng.randint(3, 7))
        batch = Batch(start, end, round(1000 * self._process.time_s()))
        if not self._storage.create(f"{paths.SPARK_OFFSETS}/{epoch}", Offsets(vars(batch))):
            application.world.seen["Spark is not alone"] += 1
            raise SparkError("Multiple streaming queries are concurrently using the offsets.")
        return True

    def batch(self, epoch: Epoch) -> Batch:
        try:
            return Batch(**self._storage.read(f"{paths.SPARK_OFFSETS}/{epoch}"))  # type: ignore[arg-type]
        except CheckpointError as error:  # a newer driver has put it aside, or the storage fails
            raise SparkError(str(error)) from error

    def _run_epoch(self, epoch: Epoch) -> None:
        application = self._application
        batch = self.batch(epoch)
        with self.running:
            self._runner.run(epoch, EpochInput(batch, batch.time_ms))
            if application.take("epochs_to_repeat"):
                application.world.seen["Spark hands over an epoch again"] += 1
                self._runner.run(epoch, EpochInput(batch, batch.time_ms))
        if application.take("spark_commits_to_lose"):
            application.spark_commit_lost()
            self._process.check()
            raise SparkError("the commit log cannot be written")
        if not self._storage.create(f"{paths.SPARK_COMMITS}/{epoch}", {}):
            application.world.seen["Spark is not alone"] += 1
            raise SparkError("Multiple streaming queries are concurrently using the commits.")
        application.note_commit(epoch)

    def _newest(self, folder: str) -> Epoch:
        numbers = (paths.spark_batch_of(name) for name in self._storage.list_names(folder))
        return max((number for number in numbers if number is not None), default=Epoch(-1))


class SparkWork:
    """What Spark does in an epoch: the tasks of one stage after the other, and the sink's write."""

    def __init__(self, application: Application, executors: Executors, process: Process) -> None:
        self._application = application
        self._executors = executors
        self._process = process
        self.coordinator: Coordinator
        self._tables = TableKeeper(SimTableStage(application), bytes_max=1 << 20)  # type: ignore[arg-type]
        #: What the tasks of the job that runs wait for.
        self._under_way: list[SimFuture] = []

    def cancel(self) -> None:
        """Lets the tasks that run fail at once."""
        for future in self._under_way:
            future.fail(SparkError("the job was cancelled"))

    def run(self, rows: Batch, epoch: TaskEpoch, clock: Stopwatch, *, repeated: bool) -> Mapping[str, Any]:
        del clock, repeated
        application = self._application
        weight = self._weight(rows, epoch)
        result = self._run_stages(rows, epoch, weight, lambda _stage: None)
        if application.take("jobs_to_fail"):
            raise SparkError("the job failed")
        application.write_to_sink(epoch.epoch, result)
        if application.take("sinks_to_fail"):
            raise SparkError("the sink did not answer")
        complete_missing(self.coordinator, epoch.epoch, partial(self._complete, rows, epoch, weight))
        return {}

    def committed(self, epoch: int) -> None:
        if self._application.history.kind.tables:
            self._tables.committed(epoch)

    def _weight(self, rows: Batch, epoch: TaskEpoch) -> int:
        if not self._application.history.kind.tables:
            return 1
        accesses: Any = {
            number: OpenedBy(access, self._executors) for number, access in self.coordinator.accesses().items()
        }
        self._tables.begin(rows, accesses, epoch, may_change=True)  # type: ignore[arg-type]
        current = self._tables.current
        assert current is not None
        values = current.tables[WEIGHT].column("n").to_pylist()
        return int(values[0]) if values else 1

    def _run_stages(
        self, batch: Batch, epoch: TaskEpoch, weight: int, only: Callable[[int], frozenset[int] | None]
    ) -> tuple[tuple[int, int], ...]:
        application = self._application
        accesses = application.stray(self.coordinator.accesses())
        told: Told = {}
        for part in self._stage(
            accesses[0], only(0), lambda p: self._executors.first_stage(accesses[0], epoch, p, batch, weight)
        ):
            for key, says in part.items():
                told.setdefault(key, []).extend(says)
        if not application.history.kind.sums:
            return sink_rows({key: sum(says) for key, says in told.items()})
        sums: dict[int, int] = {}
        for part in self._stage(
            accesses[1], only(1), lambda p: self._executors.second_stage(accesses[1], epoch, p, told)
        ):
            sums.update(part)
        return sink_rows(sums)

    def _complete(self, batch: Batch, epoch: TaskEpoch, weight: int, missing: Mapping[int, frozenset[int]]) -> None:
        """Runs what is missing again; stage 1 needs all of stage 0."""
        self._application.world.seen["missing tasks are run"] += 1
        self._run_stages(batch, epoch, weight, lambda stage: None if stage == 0 else missing.get(1, frozenset()))

    def _stage(self, access: StageAccess, only: frozenset[int] | None, task: Callable[[int], Any]) -> list[Any]:
        """Runs the tasks of a stage on the executors, and waits for all of them; a failed one is tried once more."""
        partitions = range(access.parallelism) if only is None else sorted(only)
        futures = [self._executors.process.submit(partial(self._twice, task, partition)) for partition in partitions]
        here = [future.followed_in(self._process) for future in futures]
        self._under_way = here
        return [future.result() for future in here]

    def _twice(self, task: Callable[[int], Any], partition: int) -> Any:
        try:
            return task(partition)
        except Exception:
            self._application.world.seen["a task is tried again"] += 1
            return task(partition)


class OpenedBy:
    """An access whose connections are those of the simulation."""

    def __init__(self, access: StageAccess, executors: Executors) -> None:
        self._access = access
        self._executors = executors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._access, name)

    def open(self, *, epoch: int, run: int, partition: int, attempt: int) -> RoutedState:
        del attempt
        return self._executors.open(self._access, TaskEpoch(epoch, run, 0), partition)


class SimTableStage:
    """The stage that holds the weight of a row."""

    spec = TABLES
    sources = (1, 1)
    key_hash = hash_of(2, 0)

    def __init__(self, application: Application) -> None:
        self._seed = application.history.seed
        self.table_keys = {WEIGHT: ("k",)}

    def rows_of_tables(self, rows: Batch) -> Any:
        new = [weight for row in range(rows.start, rows.end) if (weight := weight_in(row, self._seed)) is not None]
        return _Collected(pa.table({"n": pa.array(new, pa.int64())}))

    def stored(self, state: RoutedState) -> dict[str, pa.Table]:
        found = state.read(keys_table(TABLES, [0]))[WEIGHT]
        assert INDEX in found.schema.names
        return {WEIGHT: pa.table({"n": found.column("n")})}

    def update(self, before: Any, arrived: pa.Table) -> tuple[Any, Mapping[str, pa.Table]]:
        del before
        newest = arrived.column("n").to_pylist()[-1]
        changes = value_changes(TABLES, WEIGHT, {0: (newest,)})
        return {WEIGHT: pa.table({"n": pa.array([newest], pa.int64())})}, {WEIGHT: changes}


class _Collected:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def toArrow(self) -> pa.Table:
        return self._table
