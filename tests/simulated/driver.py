"""A simulated driver: claims the checkpoint, opens the job on workers, and lets Spark run epochs until it dies.

Coordinator, cluster and the runner of epochs are those of the package. What stands here is what the api does to put
them together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.checkpoint import rewind
from anabranch.control.coordinator import Coordinator
from anabranch.control.membership.members import Membership
from anabranch.control.membership.rescale import Rescale
from anabranch.control.owned_checkpoint import OwnedCheckpoint, claim
from anabranch.control.parts import DriverParts
from anabranch.control.resume import resume
from anabranch.control.strategies import strategy_of
from anabranch.core.errors import AnabranchError, FencedError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.engine.runner import EpochRunner
from anabranch.worker.compaction import compact
from simulated.job import Batch
from simulated.spark import SimSpark, SparkError, SparkWork
from simulated.storage import SimStorage
from simulated.tasks import Executors
from simulated.workers import BrokenMemoryError, Supply, member_of
from simulated.world import Process

if TYPE_CHECKING:
    from simulated.application import Application

#: How often a query that is idle looks for something to do.
_WATCH_S = 0.05


class Driver:
    """One incarnation."""

    def __init__(self, application: Application, number: int) -> None:
        self.application = application
        self._number = number
        self.process = Process(application.world, f"driver-{number}")
        self.executors = Executors(application, Process(application.world, f"executors-{number}"))
        self.coordinator: Coordinator | None = None
        self.spark: SimSpark | None = None
        self.ended = False
        #: Whether somebody has asked the query to stop.
        self.stopping = False
        #: Whether its workers were seen to have the right state in the end.
        self.looked_into = False
        self.failure: Exception | None = None
        self.rescales: list[Rescale] = []
        self.process.start(self._run, name="main")

    @property
    def is_alive(self) -> bool:
        return self.process.alive and not self.ended

    def crash(self) -> None:
        """The process dies; its tasks go on for a while."""
        self.process.kill()
        self.application.driver_ended(self)

    # -- as the api does

    def _run(self) -> None:
        try:
            self._start()
            assert self.spark is not None
            self.spark.run()
            self.application.all_done(self)
        except (AnabranchError, SparkError, BrokenMemoryError) as error:
            self.failure = error
            self.application.world.seen[f"a query fails: {type(error).__name__}"] += 1
            if isinstance(error, FencedError):
                self.application.world.seen["a driver is fenced"] += 1
        self._close()
        self.ended = True
        self.application.driver_ended(self)

    def _start(self) -> None:
        application, settings = self.application, self.application.settings
        owned = claim(
            application.location,
            application.history.kind.stages,
            settings.key_groups,
            interval_s=settings.checkpoint_interval_s,
            open_storage=self._open_storage,
        )
        workers = application.find_workers()
        members = Membership([member_of(application, self.process, worker) for worker in workers])
        strategy = strategy_of(settings.migration, store_is_shared=application.history.shared_store)
        shared = strategy.hands_over
        resumed = resume(owned, members, shared_store=shared, heartbeat_s=settings.heartbeat_s, scheduler=self.process)
        parts = DriverParts(scheduler=self.process, open_storage=self._open_storage, compact=self._compact)
        tasks = application.history.parallelism[self._number % len(application.history.parallelism)]
        parallelism = {stage.number: tasks for stage in application.history.kind.stages}
        worker_pool = Supply(application, self.process)
        self.coordinator = Coordinator(resumed, members, settings, parallelism, worker_pool, parts, strategy)
        work = SparkWork(application, self.executors, self.process)
        work.coordinator = self.coordinator
        self.coordinator.cluster.on_loss = lambda _: self._note_loss(work)
        runner: EpochRunner[Batch] = EpochRunner(self.coordinator, work, delays_ms={})
        self.spark = SimSpark(application, self.process, runner, lambda: self.stopping)
        self._replay()
        self.process.start(self._watch, name="watch")

    def _note_loss(self, work: SparkWork) -> None:
        self.application.world.seen["loss noticed by the watch"] += 1
        work.cancel()

    def _replay(self) -> None:
        assert self.spark is not None
        logs = self._open_storage(self.application.location)
        for _ in rewind.repeated(logs):
            self.application.world.seen["an epoch is repeated from its offsets"] += 1
            self.spark.run_once()

    def _watch(self) -> None:
        """Changes among workers while no epoch runs, as the query's watch makes them."""
        assert self.spark is not None
        assert self.coordinator is not None
        while not self.ended:
            self.process.sleep(_WATCH_S)
            if self.ended or not self.spark.running.acquire(blocking=False):
                continue
            try:
                if self.coordinator.change_while_idle():
                    self.application.world.seen["a change between epochs"] += 1
                    self.coordinator.cluster.on_beat()
            except AnabranchError:
                self.application.world.seen["a change between epochs fails"] += 1
            finally:
                self.spark.running.release()

    def change_now(self) -> None:
        """Puts others in the place of lost workers: what these say about their state may be of an older epoch."""
        assert self.spark is not None
        assert self.coordinator is not None
        with self.spark.running:
            self.coordinator.change_while_idle()

    def _close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()

    # -- parts

    def _open_storage(self, location: str) -> SimStorage:
        return SimStorage(self.application.disk, location, self.process)

    def _compact(
        self,
        owned: OwnedCheckpoint,
        epoch: Epoch,
        *,
        target: str = "",
        on_start: Callable[[Any], None] = lambda _: None,
    ) -> int:
        """Lets a process of its own make a snapshot."""
        application = self.application
        process = Process(application.world, "compaction")
        application.compactions.append(process)
        on_start(process)
        storage = SimStorage(application.disk, owned.storage.location, process)
        place = SimStorage(application.disk, target, process) if target else None
        made = process.submit(partial(compact, storage, epoch, generation=owned.generation, write_to=place))
        while not made.done():
            self.process.sleep(0.004)
            if not process.alive:
                raise AnabranchError("The process that makes the snapshot has died.")
        application.world.seen["a snapshot is made"] += 1
        return sum(file.rows for file in made.result().files)

    # -- what users ask for

    def rescale(self, workers: int | None, tasks: int | None) -> None:
        if self.coordinator is None or not self.is_alive:
            return
        parallelism = {} if tasks is None else dict.fromkeys(self.coordinator.parallelism, tasks)
        wanted = {int(stage): number for stage, number in parallelism.items()}
        self._ask(lambda c: c.rescale(Rescale("rescale", workers=workers, parallelism=wanted)))

    def drain(self, which: int) -> None:
        if self.coordinator is None or not self.is_alive:
            return
        workers = self.coordinator.cluster.members.workers
        if not workers:
            return  # all are lost, and new ones are on their way
        self._ask(lambda c: c.cluster.drain(WorkerId(workers[which % len(workers)])))

    def savepoint(self, target: str) -> None:
        coordinator = self.coordinator
        if coordinator is None or not self.is_alive:
            return

        def save() -> None:
            try:
                savepoint = coordinator.savepoint(target)
            except AnabranchError:
                self.application.note_failed_savepoint()
            else:
                self.application.note_savepoint(target, savepoint.epoch)

        self.process.start(save, name="savepoint")

    def _ask(self, wish: Callable[[Coordinator], Rescale]) -> None:
        coordinator = self.coordinator
        assert coordinator is not None

        def ask() -> None:
            try:
                self.rescales.append(wish(coordinator))
            except AnabranchError:
                self.application.world.seen["a wish is refused"] += 1

        self.process.start(ask, name="wish")
