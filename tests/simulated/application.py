"""A simulated job from its first driver to its end: workers, drivers, faults, and what must be true of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anabranch.checkpoint.manifests import newest_route
from anabranch.checkpoint.rewind import rewind
from anabranch.checkpoint.savepoints import start_from
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import state_files
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.wire.routed import StageAccess
from anabranch.worker.state import job_state as jobstate
from simulated.checks import Checks, offsets
from simulated.driver import Driver
from simulated.faults import (
    BreakStorage,
    CrashDeparting,
    CrashDriver,
    CrashWorker,
    Fault,
    JumpClock,
    Leave,
    PauseDriver,
    Rescale,
    RestartWorker,
    Rewind,
    SecondDriver,
    SilenceWorker,
    TakeSavepoint,
    Waiting,
)
from simulated.history import History
from simulated.job import Batch
from simulated.network import Network
from simulated.observation import observers
from simulated.redis import BreakRedis, RedisTrouble, RestartRedis, SaveRedis
from simulated.shortcuts import Place, replaced, shortcuts
from simulated.storage import Disk, SimStorage, plain_files
from simulated.workers import BrokenMemoryError, WorkerProcess
from simulated.world import Process, World

#: More are never needed, whatever goes wrong before them.
DRIVERS_MAX = 40
#: How long what goes on after the end of the last driver may take.
_AFTERMATH_S = 0.5
#: Epochs without rows, after the last row, in which timers are due.
TICKS_AT_THE_END = 2


class Application:
    """Everything that one history is about."""

    def __init__(self, history: History, location: str = "checkpoint", before: Sequence[Batch] = ()) -> None:
        self.history = history
        self.location = location
        #: The epochs before those of this job, if it began with a savepoint of another one.
        self.before = before
        self.settings = history.settings
        self.world = World(history.seed ^ 0x5EED)
        self.disk = Disk(self.world)
        self.disk.trouble = self._storage_trouble
        self.plain = SimStorage(self.disk, self.location)
        self.network = Network(
            self.world,
            loss=history.loss,
            duplication=history.duplication,
            delay=history.delay,
            piece_s=history.piece_s,
        )
        self.network.peer_breaks = lambda: self.take("peers_to_break")
        self.workers: dict[WorkerId, WorkerProcess] = {}
        self.drivers: list[Driver] = []
        self.compactions: list[Process] = []
        self.workers_wanted = history.workers
        self.sink: dict[int, tuple[tuple[int, int], ...]] = {}
        self.calm = False
        self._waiting: Counter[str] = Counter()
        self._silent_s = 0.0
        self._storage_faults: list[tuple[float, BreakStorage]] = []
        self.redis = RedisTrouble(self) if history.shared_store else None
        self._accesses: list[Mapping[int, StageAccess]] = []
        self.savepoints: list[tuple[str, Epoch]] = []
        #: Epochs without rows after the last row.
        self._ticks: set[Epoch] = set()
        self.checks = Checks(self)
        #: The one that is started because those before it have not left everything as it should be.
        self.last_driver: Driver | None = None
        #: Whether the end of the last driver is as disturbed as the rest, and a successor shows what became of it.
        self.ends_amid_faults = history.seed % 4 == 0
        #: By how many epochs somebody puts the job back when no driver runs.
        self._rewind_by = 0

    def run(self) -> World:
        for fault in self.history.faults:
            self.world.at(fault.at, self.strike, fault)
        history = self.history
        sizes = {"drain_rest_s": history.drain_rest_s, "message_rows": history.message_rows}
        small = shortcuts(real_state=history.real_state, **sizes)  # type: ignore[arg-type]
        places = [*small, breaking_commits(self), *observers(self.world.seen)]
        with plain_files(), replaced(places):
            self.start_driver()
            self.world.run()
            for target, epoch in self.savepoints[:1]:
                self._fork(target, epoch)
        return self.world

    def _fork(self, target: str, epoch: Epoch) -> None:
        """A job that starts from a savepoint comes to the same end."""
        before = [self.batch(Epoch(number)) for number in range(epoch + 1)]
        quiet = replace(self.history, loss=0.0, duplication=0.0, delay=0.0, faults=())
        fork = Application(quiet, "fork", before)
        fork.disk.folders = {folder: dict(files) for folder, files in self.disk.folders.items()}
        start_from(SimStorage(fork.disk, target), fork.plain, fork.plain)
        fork.start_driver()
        fork.world.run()
        self.world.seen["a job starts from a savepoint"] += 1

    def take(self, fault: str) -> bool:
        """Whether such a fault waits; it strikes once."""
        if self.calm or not self._waiting[fault]:
            return False
        self._waiting[fault] -= 1
        self.world.seen[fault] += 1
        return True

    # -- drivers and workers

    def start_driver(self) -> None:
        failure = self.drivers[-1].failure if self.drivers else None
        assert len(self.drivers) < DRIVERS_MAX, f"no driver gets on: {failure}"
        self.drivers.append(Driver(self, len(self.drivers)))

    def driver_ended(self, driver: Driver) -> None:
        """A successor starts unless a newer driver is alive, or all is done."""
        rng, world = self.world.rng, self.world
        world.at(rng.uniform(0.0, 0.05), driver.executors.process.kill)
        if self.history.embedded and driver.coordinator is not None:
            cluster = driver.coordinator.cluster
            for member in (*cluster.members.all, *cluster.departing):
                world.at(rng.uniform(0.0, 0.06), self.workers[member.worker].kill)
        if driver is not self.drivers[-1]:
            return
        if driver.failure is None and driver.ended:
            self._completed(driver)
        else:
            world.at(rng.uniform(0.001, 0.03), self._start_successor)

    def _start_successor(self) -> None:
        if self.drivers[-1].is_alive or self.world.done:
            return
        back, self._rewind_by = self._rewind_by, 0
        to = last_committed_epoch(self.plain) - back
        if back and to >= 0 and not any(driver.is_alive for driver in self.drivers):
            self._rewind(Epoch(to))
        else:
            self.start_driver()

    def _rewind(self, to: Epoch) -> None:
        """As the command does, which may die half-way: then somebody calls it again."""
        process = Process(self.world, "rewind")

        def work() -> None:
            storage = SimStorage(self.disk, self.location, process)
            try:
                state_files(storage, to)
            except AnabranchError:
                self.world.seen["a rewind is refused"] += 1
            else:
                repeated = rewind(storage, storage, to)
                self.world.seen["a rewind"] += bool(repeated)
            self.world.soon(self.start_driver)

        def again() -> None:
            if thread.is_alive():
                process.kill()
                self.world.seen["a rewind breaks off"] += 1
                self._rewind(to)

        def guarded() -> None:
            try:
                work()
            except AnabranchError:
                self.world.seen["a rewind fails"] += 1
                self._rewind(to)

        thread = process.start(guarded, name="rewind")
        if self.world.rng.random() < 0.5 and not self.calm:
            self.world.at(self.world.rng.uniform(0.001, 0.03), again)

    def find_workers(self) -> list[WorkerProcess]:
        """The workers of a new driver: those that the last one used, as far as they are there, and new ones."""
        wanted = self.workers_wanted
        if self.history.embedded:
            return [self.new_worker() for _ in range(wanted)]
        route = newest_route(self.plain)
        known = set(route.workers if route is not None else ())
        found = [worker for worker in self.workers.values() if worker.is_reachable]
        found.sort(key=lambda worker: (worker.name not in known, worker.name))
        return found[:wanted] + [self.new_worker() for _ in range(wanted - len(found))]

    def idle_worker(self) -> WorkerProcess:
        """One that nobody uses, or a new one."""
        busy: set[WorkerId] = set()
        for driver in self.drivers:
            if driver.is_alive and driver.coordinator is not None:
                cluster = driver.coordinator.cluster
                members = [*cluster.members.all, *cluster.departing, *cluster.pending_workers]
                busy.update(member.worker for member in members)
        if not self.history.embedded and self.world.rng.random() < 0.5:
            for worker in self.workers.values():
                if worker.is_reachable and worker.name not in busy:
                    self.world.seen["a worker that was here before comes back"] += 1
                    return worker
        return self.new_worker()

    def new_worker(self) -> WorkerProcess:
        name = WorkerId(f"w{len(self.workers)}")
        self.workers[name] = WorkerProcess(self, name)
        self.network.workers[self.workers[name].address] = self.workers[name]
        return self.workers[name]

    # -- Spark's input and output

    def rows_arrived(self) -> int:
        return min(self.history.rows, 4 + int(self.world.now * self.history.rows_per_s))

    def wants_tick(self, epoch: Epoch) -> bool:
        """Whether an epoch without rows is due: timers may be."""
        if not self.history.kind.timed or epoch == 0:
            return False
        if self.batch(Epoch(epoch - 1)).end == self.history.rows:
            return len(self._ticks) < TICKS_AT_THE_END
        return self.world.rng.random() < 0.3

    def is_over(self, committed: Epoch) -> bool:
        return committed >= 0 and self.batch(committed).end == self.history.rows

    def batch(self, epoch: Epoch) -> Batch:
        return offsets(self.plain, epoch)

    def write_to_sink(self, epoch: int, rows: tuple[tuple[int, int], ...]) -> None:
        """An epoch that the sink has already, it does not take again."""
        if epoch in self.sink:
            self.world.seen["the sink has the epoch already"] += 1
            assert self.sink[epoch] == rows, (
                f"epoch {epoch} gave {self.sink[epoch]}, and gives {rows} when it is repeated"
            )
        self.sink[epoch] = rows

    def note_commit(self, epoch: Epoch) -> None:
        self.world.seen["epochs committed"] += 1
        batch = self.batch(epoch)
        if batch.start == batch.end:
            self.world.seen["an epoch without rows"] += 1
            if batch.end == self.history.rows:
                self._ticks.add(epoch)

    def spark_commit_lost(self) -> None:
        live = [worker for worker in self.workers.values() if worker.is_reachable]
        if self._silent_s and live:
            worker = self.world.rng.choice(live)
            worker.silent_until, worker.silent_but_late = self.world.now + self._silent_s, False
            # To take leave of that worker would take longer than it is silent.
            self.drivers[-1].crash()

    def stray(self, accesses: Mapping[int, StageAccess]) -> Mapping[int, StageAccess]:
        """Where the tasks of a job look for state: in an older place, if such a fault waits."""
        if not self._accesses or self._accesses[-1] is not accesses:
            self._accesses.append(accesses)
        mine = [each for each in self._accesses if each[0].generation == accesses[0].generation]
        if len(mine) > 1 and self.take("tasks_to_stray"):
            # Which task has which keys is part of a plan, and the same for all of them.
            return {stage: replace(access, routing=mine[-2][stage].routing) for stage, access in accesses.items()}
        return accesses

    # -- savepoints

    def note_savepoint(self, target: str, epoch: Epoch) -> None:
        self.world.seen["a savepoint is taken"] += 1
        self.savepoints.append((target, epoch))

    def note_failed_savepoint(self) -> None:
        self.world.seen["a savepoint fails"] += 1

    # -- faults

    def strike(self, fault: Fault) -> None:
        if self.calm:
            return
        world, driver = self.world, self.drivers[-1]
        world.seen[type(fault).__name__] += 1
        live = [worker for worker in self.workers.values() if worker.is_alive]
        match fault:
            case CrashDriver() if driver.is_alive:
                driver.crash()
            case SecondDriver():
                self.start_driver()
            case PauseDriver():
                driver.process.paused_until = world.now + fault.seconds
            case CrashWorker() if live:
                live[fault.which % len(live)].kill()
            case SilenceWorker() if live:
                worker = live[fault.which % len(live)]
                worker.silent_until, worker.silent_but_late = world.now + fault.seconds, fault.late
            case CrashDeparting() if driver.is_alive and driver.coordinator is not None:
                for member in driver.coordinator.cluster.departing[:1]:
                    world.seen["a departing worker is lost"] += 1
                    self.workers[member.worker].kill()
            case RestartWorker() if live:
                live[fault.which % len(live)].restart()
            case Rescale():
                self.workers_wanted = fault.workers or self.workers_wanted
                driver.rescale(fault.workers, fault.parallelism)
            case Leave():
                driver.drain(fault.which)
            case BreakStorage():
                self._storage_faults.append((world.now + fault.seconds, fault))
            case BreakRedis() | SaveRedis() | RestartRedis() if self.redis is not None:
                self.redis.strike(fault)
            case JumpClock():
                world.clock_jump_s += fault.seconds
            case TakeSavepoint():
                driver.savepoint(f"savepoint-{fault.at}")
            case Rewind() if driver.is_alive:
                self._rewind_by = fault.epochs
                driver.stopping = True
            case Waiting(what="upkeep_to_kill"):
                for process in self.compactions:
                    world.seen["upkeep_to_kill"] += process.alive
                    process.kill()
            case Waiting():
                self._waiting[fault.what] += 1
                self._silent_s = fault.silent_s

    def _storage_trouble(self, action: str, path: str) -> str:
        del path
        if self.calm:
            return ""
        for until, fault in self._storage_faults:
            if self.world.now < until and fault.action in ("", action) and self.world.rng.random() < fault.share:
                return "silent" if fault.silent else "refused"
        return ""

    # -- the end

    def calm_down(self) -> None:
        """From now on nothing goes wrong."""
        self.calm = self.network.calm = True
        for worker in self.workers.values():
            worker.silent_until = min(worker.silent_until, self.world.now)

    def all_done(self, driver: Driver) -> None:
        """A driver has processed all rows: its workers are looked at, unless it is to end amid faults."""
        if driver is not self.drivers[-1] or (not self.calm and self.ends_amid_faults):
            return
        self.calm_down()
        try:
            driver.change_now()
            self.checks.workers(driver)
        except AnabranchError as error:
            # Whatever has gone wrong before may show only now; but a driver that never knew trouble has none.
            if driver is self.last_driver:
                raise AssertionError("a driver without any trouble cannot be looked into") from error
            self.world.seen["a look at the workers fails"] += 1
        else:
            driver.looked_into = True

    def _completed(self, driver: Driver) -> None:
        """All rows are committed. If need be, a last driver, undisturbed, opens the job once more."""
        if not (driver.looked_into and self.checks.is_durable()):
            assert driver is not self.last_driver, "what an undisturbed driver has done is not durable"
            self.calm_down()
            self.start_driver()
            self.last_driver = self.drivers[-1]
            return
        self.world.at(_AFTERMATH_S, self._end)

    def _end(self) -> None:
        self.checks.end()
        self.world.done = True


def breaking_commits(application: Application) -> Place:
    """A worker may run out of memory while it applies an epoch."""
    add_layer = vars(jobstate.JobState)["add_layer"]

    def breaking(state: Any, epoch: int, changes: Any) -> None:
        if application.take("commits_to_break"):
            raise BrokenMemoryError("no memory for the changes of an epoch")
        add_layer(state, epoch, changes)

    return jobstate.JobState, "add_layer", breaking
