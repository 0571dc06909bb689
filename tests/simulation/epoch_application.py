"""The simulated Spark application: drivers one after another (or at once), and the faults that strike them."""

from __future__ import annotations

from epoch_driver import Driver
from epoch_history import (
    BrokenTask,
    CrashDriver,
    CrashWorker,
    FailJob,
    Fault,
    History,
    IsolateWorker,
    LoseManifest,
    PauseDriver,
    RepeatEpoch,
    Rescale,
    SecondDriver,
    SlowTask,
)
from epoch_world import World

from anabranch.core.epoch_events import SinkFailed
from anabranch.core.epochs import EpochMachine
from anabranch.core.transactions import TransactionMachine


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
        self.slow_tasks = 0
        self.broken_tasks = 0
        self.manifests_to_lose = 0
        self.epochs_to_repeat = 0
        for _ in range(history.workers):
            self.world.start_worker()

    def run(self) -> World:
        for fault in self.history.faults:
            self.world.at(fault.at, self.strike, fault)
        self.start_driver()
        self.world.run()
        return self.world

    def start_driver(self) -> None:
        self.drivers.append(Driver(self))

    def driver_died(self) -> None:
        """A successor starts unless the newest driver is alive; an older one that is left gets fenced."""
        if self.drivers[-1].dead:
            self.world.at(self.world.rng.randint(5, 20), self.start_successor)

    def start_successor(self) -> None:
        if self.drivers[-1].dead:
            self.start_driver()

    def next_parallelism(self) -> int:
        self.runs += 1
        return self.history.parallelism[self.runs % len(self.history.parallelism)]

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
                live[fault.which % len(live)].alive = False
                if fault.replaced or len(live) == 1:
                    world.start_worker()
            case IsolateWorker() if live:
                live[fault.which % len(live)].isolated_until = world.now + fault.ticks
            case Rescale():
                self.workers_wanted = fault.workers
                for _ in range(fault.workers - len(live)):
                    world.start_worker()
            case SlowTask():
                self.slow_tasks += 1
            case BrokenTask():
                self.broken_tasks += 1
            case FailJob() if driver.started:
                driver.awake(driver.feed, SinkFailed(driver.machine.run, "the job failed"))
            case LoseManifest():
                self.manifests_to_lose += 1
            case RepeatEpoch():
                self.epochs_to_repeat += 1

    def ended(self, driver: Driver) -> None:
        """All epochs are committed. A last driver, undisturbed, opens the job once more: its view is checked."""
        if not self.world.calm:
            self.world.calm = True
            for worker in self.world.workers.values():
                worker.isolated_until = 0
            driver.die()
        elif driver is self.drivers[-1]:
            self.world.done = True
