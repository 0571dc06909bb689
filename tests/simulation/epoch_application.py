"""The simulated Spark application: drivers one after another (or at once), and the faults that strike them."""

from __future__ import annotations

from collections import Counter
from functools import partial

from epoch_checkpoint import plain_documents, stored_state
from epoch_driver import Driver
from epoch_faults import (
    BreakPeer,
    BreakRead,
    BrokenTask,
    CrashDeparting,
    CrashDriver,
    CrashWorker,
    FailJob,
    Fault,
    KillUpkeep,
    Leave,
    LoseManifest,
    LoseSparkCommit,
    PauseDriver,
    RepeatEpoch,
    Rescale,
    RestartWorker,
    SecondDriver,
    SilenceWorker,
    SlowTask,
    StrayTask,
)
from epoch_history import History
from epoch_peers import without_threads
from epoch_rows import counts_of
from epoch_worker import WorkerProcess
from epoch_world import World

from anabranch.checkpoint.routes import newest_route
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import Documents
from anabranch.core.epochs import EpochMachine
from anabranch.core.epochs import Step as MachineStep
from anabranch.core.ids import WorkerId
from anabranch.core.transactions import TransactionMachine

#: Faults that wait for their moment, by the name under which whoever meets it takes them.
WAITING_FAULTS = {
    SlowTask: "slow_tasks",
    BrokenTask: "broken_tasks",
    StrayTask: "stray_tasks",
    LoseManifest: "manifests_to_lose",
    LoseSparkCommit: "spark_commits_to_lose",
    RepeatEpoch: "epochs_to_repeat",
    BreakRead: "reads_to_break",
    BreakPeer: "peers_to_break",
}


class Application:
    """Everything that runs one history: the world, the drivers one after another (or at once), and the faults."""

    def __init__(
        self,
        history: History,
        worker_machine: type[TransactionMachine] = TransactionMachine,
        driver_machine: type[EpochMachine] = EpochMachine,
    ) -> None:
        self.history = history
        self.world = World(history, worker_machine)
        self.driver_machine = driver_machine
        self.drivers: list[Driver] = []
        self.workers_wanted = history.workers
        self.runs = 0
        self.waiting: Counter[str] = Counter()
        self.world.reading_breaks = partial(self.take, "reads_to_break")
        self.world.peer_breaks = partial(self.take, "peers_to_break")
        #: For how long a worker falls silent when Spark fails to commit.
        self.silent_ticks = 0

    def run(self) -> World:
        for fault in self.history.faults:
            self.world.at(fault.at, self.strike, fault)
        with plain_documents(), without_threads():
            self.start_driver()
            self.world.run()
        return self.world

    def take(self, fault: str) -> bool:
        """Whether such a fault waits; it strikes once."""
        if self.world.calm or not self.waiting[fault]:
            return False
        self.waiting[fault] -= 1
        return True

    # -- drivers

    def start_driver(self) -> None:
        self.drivers.append(Driver(self))

    def driver_died(self, driver: Driver) -> None:
        """A successor starts unless the newest driver is alive; an older one that is left gets fenced."""
        if self.history.embedded and driver.cluster is not None:
            for worker in driver.cluster.all_workers:
                self.world.at(self.world.rng.randint(1, 60), self.stop_worker, worker)
        if self.drivers[-1].dead:
            self.world.at(self.world.rng.randint(1, 30), self.start_successor)

    def start_successor(self) -> None:
        if self.drivers[-1].dead:
            self.start_driver()

    def stop_worker(self, worker: WorkerId) -> None:
        self.world.workers[worker].alive = False

    def find_workers(self) -> list[WorkerId]:
        """The workers of a new driver: those that the last one used, as far as they are there, and new ones."""
        wanted = self.workers_wanted
        if self.history.embedded:
            return [self.world.start_worker() for _ in range(wanted)]
        route = newest_route(self.world.storage)
        known = set(route.workers if route is not None else ())
        found = [worker.name for worker in self.world.live_workers() if worker.reachable]
        found.sort(key=lambda name: (name not in known, name))
        return found[:wanted] + [self.world.start_worker() for _ in range(wanted - len(found))]

    def next_parallelism(self) -> int:
        self.runs += 1
        return self.history.parallelism[self.runs % len(self.history.parallelism)]

    # -- faults

    def strike(self, fault: Fault) -> None:
        world, driver = self.world, self.drivers[-1]
        if world.calm:
            return
        world.count(fault)
        live = world.live_workers()
        match fault:
            case CrashDriver() if not driver.dead:
                driver.die()
            case SecondDriver():
                self.start_driver()
            case PauseDriver():
                driver.paused_until = world.now + fault.ticks
            case CrashWorker() if live:
                self.lose(live[fault.which % len(live)])
            case SilenceWorker() if live:
                self.lose(live[fault.which % len(live)], fault)
            case CrashDeparting() if driver.cluster is not None and (departing := list(driver.cluster.departing)):
                self.lose(world.workers[departing[0]])
            case RestartWorker() if live:
                live[fault.which % len(live)].restart()
            case Rescale():
                self.rescale(fault.workers)
            case Leave() if driver.cluster is not None and not driver.dead:
                driver.cluster.leave(driver.cluster.workers[fault.which % len(driver.cluster.workers)])
            case FailJob() if driver.job is not None and not driver.job.done and not driver.dead:
                if driver.machine.step is MachineStep.RUNNING:
                    driver.awake(self.fail_job, driver, driver.job)
            case KillUpkeep():
                for each in self.drivers:
                    each.upkeep.kill()
            case _ if type(fault) in WAITING_FAULTS:
                self.waiting[WAITING_FAULTS[type(fault)]] += 1
                if isinstance(fault, LoseSparkCommit):
                    self.silent_ticks = fault.silent_ticks

    def lose(self, worker: WorkerProcess, silence: SilenceWorker | None = None) -> None:
        if silence is None:
            worker.alive = False
        else:
            worker.silent_until = self.world.now + silence.ticks
            worker.silent_but_late = silence.late
        for driver in self.drivers:
            if driver.cluster is not None:
                self.world.at(self.world.rng.randint(5, 90), driver.awake, driver.cluster.watch, worker.name)

    def lose_spark_commit(self) -> bool:
        lost = self.take("spark_commits_to_lose")
        if lost and self.silent_ticks and (live := self.world.live_workers()):
            worker = self.world.rng.choice(live)
            self.lose(worker, SilenceWorker(self.world.now, 0, ticks=self.silent_ticks, late=False))
        return lost

    def rescale(self, workers: int | None) -> None:
        self.workers_wanted = workers or self.workers_wanted
        driver = self.drivers[-1]
        if driver.dead or driver.cluster is None:
            return
        busy = driver.cluster.all_workers
        idle = [worker.name for worker in self.world.live_workers() if worker.reachable and worker.name not in busy]
        driver.cluster.rescale(workers, idle)

    def fail_job(self, driver: Driver, job: object) -> None:
        if driver.job is job and driver.machine.step is MachineStep.RUNNING and not driver.job.done:
            driver.job_failed()

    # -- the end

    def ended(self, driver: Driver) -> None:
        """All epochs are committed. A last driver, undisturbed, opens the job once more: its view is checked."""
        if not self.world.calm:
            self.world.calm = True
            for worker in self.world.workers.values():
                worker.silent_until = min(worker.silent_until, self.world.now)
            driver.die()
        elif driver is self.drivers[-1]:
            if self.world.waits:
                self.world.at(10, self.ended, driver)
                return
            self.check(driver)
            self.world.done = True

    def check(self, driver: Driver) -> None:
        """Sink, checkpoint and workers have exactly what an undisturbed run would have left."""
        world, history, storage = self.world, self.history, self.world.storage
        last = history.epochs - 1
        states, sink = history.expected
        assert last_committed_epoch(storage) == last, "not every epoch was committed"
        assert world.sink == dict(enumerate(sink)), "the sink is wrong"
        documents = Documents(storage)
        for epoch in documents.epochs:
            if epoch > last - history.keep_epochs or documents.gap_before(epoch) is None:
                stored = stored_state(storage, documents.state_files(epoch))
                assert counts_of(stored) == states[epoch], f"the checkpoint is wrong as of epoch {epoch}"
        workers = [world.workers[name] for name in driver.cluster.route.workers]
        assert all(worker.machine.committed == last for worker in workers), "a worker is behind"
        held = []
        for worker in workers:
            groups = driver.cluster.route.groups_of(worker.name)
            assert sorted(worker.state.holdings.groups) == list(groups), "wrong groups"
            worker.state.check(states[last])
            for variable, state in worker.state.states.items():
                worker.state.holdings.complete(variable)
                held += state.rows().items()
        assert sorted(held) == sorted(stored.items()), "the workers' state is not that of the checkpoint"
