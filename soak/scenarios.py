"""Scenarios: a query and the faults that it meets, all drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from soak.crashpoints import CHANGE_POINTS, POINTS, START_POINTS
from soak.jobs import JOBS, InputRow, make_files, make_last_files


class Kind(StrEnum):
    """What happens to a query."""

    #: A state worker is killed.
    WORKER = "worker killed"
    #: A state worker stands still for longer than anabranch.workerTimeout, and then goes on.
    FREEZE = "worker frozen"
    #: A state worker stands still for less than that.
    HICCUP = "worker slow"
    #: The process that state workers are forked from is killed; those that it has forked go on.
    FORK_SERVER = "fork server killed"
    #: A Python process that runs tasks of Spark's is killed.
    TASK = "task process killed"
    #: The process beside the driver in which Spark asks for epochs without rows is killed: Spark ends the query, and a
    #: new driver starts.
    SOURCE = "source process killed"
    #: The query is asked for another number of workers, or another parallelism.
    RESCALE = "rescaled"
    #: A state worker that was started by hand joins the query.
    JOIN = "worker joined"
    #: A state worker is told to stop: it hands over what it has, and leaves.
    LEAVE = "worker told to stop"
    #: The storage of the checkpoint fails now and then, before an effect or after it, for long enough that a driver
    #: which ends because of it is followed by one that starts in the middle of it.
    STORAGE = "storage failing"
    #: The driver's Python process is killed; a new driver starts at once.
    DRIVER = "driver killed"
    #: Everything on the driver's machine is killed at the same moment; a new driver starts.
    MACHINE = "machine lost"
    #: The driver and all that it has started stand still; a new driver starts; then the old one goes on.
    ZOMBIE = "driver replaced"
    #: The driver ends by itself at a given point; a new driver starts.
    CRASH = "driver crashed"


#: After these, a new driver starts.
ENDS_DRIVER = frozenset({Kind.SOURCE, Kind.DRIVER, Kind.MACHINE, Kind.ZOMBIE, Kind.CRASH})
_WEIGHTS = {
    Kind.WORKER: 6,
    Kind.FREEZE: 3,
    Kind.HICCUP: 2,
    Kind.FORK_SERVER: 2,
    Kind.TASK: 3,
    Kind.RESCALE: 8,
    Kind.JOIN: 2,
    Kind.LEAVE: 3,
    Kind.SOURCE: 1,
    Kind.DRIVER: 2,
    Kind.MACHINE: 1,
    Kind.ZOMBIE: 1,
}
#: Beside the others, if the storage of a scenario fails.
_STORAGE_WEIGHT = 12
_DRIVERS_MAX = 4


@dataclass(frozen=True)
class Fault:
    """Something that happens, some time after what happened before."""

    kinds: tuple[Kind, ...]
    after_s: float
    #: Chooses the victims among those that there are.
    choice: int
    #: Whether it may hit a driver whose query has not started yet.
    early: bool = False
    #: How long a process stands still.
    pause_s: float = 0.0
    #: Which part of the operations of a storage fails, and for how long.
    rate: float = 0.0
    failing_s: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A query and what happens to it. The same seed gives the same scenario, if not the same moments."""

    seed: int
    job: str
    files: int
    rows: int
    keys: int
    files_per_epoch: int
    workers: int
    store: str
    #: Whether the workers are started apart from the driver, which then cannot replace or kill any.
    apart: bool
    faults: tuple[Fault, ...]
    #: Where the first drivers crash by themselves, one after the other.
    crashes: tuple[str, ...]
    worker_timeout_s: float = 2.0
    #: How state follows when workers come and go.
    migration: str = "lazy"
    #: Seconds from one durable epoch to the next; 0: every epoch is durable.
    checkpoint_interval_s: float = 0.0

    @property
    def storage_fails(self) -> bool:
        return any(Kind.STORAGE in fault.kinds for fault in self.faults)

    @property
    def epochs(self) -> int:
        """Those with rows."""
        return -(-(self.files + self._last_files) // self.files_per_epoch)

    @property
    def _last_files(self) -> int:
        """Of the first of two epochs the watermark moves, and in the second everything goes out that waited for it."""
        return 2 * self.files_per_epoch if JOBS[self.job].goes_by_event_time else 0

    def input(self) -> list[list[InputRow]]:
        """The rows of each input file."""
        files = make_files(self.seed, files=self.files, rows=self.rows, keys=self.keys)
        last = self._last_files
        return files + make_last_files(self.seed, after=self.files, files=last, rows=self.rows, keys=self.keys)

    def __str__(self) -> str:
        kind = f"{self.workers} {self.store} workers{' of their own' if self.apart else ''}, {self.migration}"
        durable = f"every {self.checkpoint_interval_s:g} s" if self.checkpoint_interval_s else "every epoch"
        storage = f", durable {durable}{', failing storage' if self.storage_fails else ''}"
        return f"seed {self.seed}: {self.job}, {self.epochs} epochs of {self.files_per_epoch} files, {kind}{storage}"


@dataclass(frozen=True)
class Wanted:
    """What is not left to chance; None: it is."""

    job: str | None = None
    store: str | None = None
    checkpoint_interval_s: float | None = None
    failing_storage: bool | None = None

    def options(self) -> str:
        """The same on the command line."""
        switch = {None: "", True: "failing-storage", False: "no-failing-storage"}[self.failing_storage]
        values = {"job": self.job, "store": self.store, "checkpoint-interval-s": self.checkpoint_interval_s}
        return " ".join(
            [f"--{name} {value}" for name, value in values.items() if value is not None]
            + [f"--{switch}"] * bool(switch)
        )


def draw(seed: int, *, faults_max: int = 8, wanted: Wanted | None = None) -> Scenario:
    """The scenario of a seed, but for what is wanted."""
    wanted = wanted or Wanted()
    random_ = random.Random(f"scenario {seed}")
    files_per_epoch = random_.randint(1, 3)
    epochs = random_.randint(15, 40)
    apart = random_.random() < 0.25
    workers = random_.randint(2, 3) + apart
    crashes = _crashes(random_, epochs)
    drawn = random_.choice([*sorted(JOBS), *(name for name, job in JOBS.items() if job.timed is not None)])
    store = random_.choice(["memory", "memory", "rocksdb", "redis"])
    interval_s = random_.choice([0.0, 0.0, 0.5, 2.0, 10.0])
    storage_fails = random_.random() < 0.35
    storage_fails = storage_fails if wanted.failing_storage is None else wanted.failing_storage
    count = random_.randint(2, faults_max)
    faults = _faults(random_, count, drivers_left=_DRIVERS_MAX - len(crashes), storage_fails=storage_fails)
    return Scenario(
        seed=seed,
        job=wanted.job or drawn,
        files=epochs * files_per_epoch - random_.randrange(files_per_epoch),
        rows=random_.choice([20, 60, 300]),
        keys=random_.choice([50, 400, 3000]),
        files_per_epoch=files_per_epoch,
        workers=workers,
        store=wanted.store or store,
        apart=apart,
        faults=faults,
        crashes=crashes,
        migration=random_.choice(["lazy", "lazy", "lazy", "eager"]),
        checkpoint_interval_s=interval_s if wanted.checkpoint_interval_s is None else wanted.checkpoint_interval_s,
    )


def _crashes(random_: random.Random, epochs: int) -> tuple[str, ...]:
    if random_.random() < 0.6:
        return ()
    count = random_.randint(1, 2)
    at = sorted(random_.sample(range(epochs), count))
    points = [f"{random_.choice(POINTS)}:{epoch}" for epoch in at]
    if random_.random() < 0.3:
        points.insert(random_.randint(0, 1), random_.choice(START_POINTS))
    if random_.random() < 0.4:
        points.insert(random_.randint(0, 1), random_.choice(CHANGE_POINTS))
    return tuple(points)


def _faults(random_: random.Random, count: int, *, drivers_left: int, storage_fails: bool) -> tuple[Fault, ...]:
    weights = _WEIGHTS | ({Kind.STORAGE: _STORAGE_WEIGHT} if storage_fails else {})
    faults = []
    for number in range(count):
        size = random_.choices([1, 2, 3], [6, 2, 1])[0]
        kinds = random_.choices(list(weights), list(weights.values()), k=size)
        if storage_fails and number == 0:
            kinds[0] = Kind.STORAGE
        ending = [kind for kind in kinds if kind in ENDS_DRIVER]
        # One driver ends at a time, and each start of another takes its time.
        kinds = [kind for kind in kinds if kind not in ENDS_DRIVER] + ending[: drivers_left > 0]
        drivers_left -= bool(ending)
        faults.append(
            Fault(
                kinds=tuple(kinds) or (Kind.WORKER,),
                after_s=round(random_.expovariate(1 / 1.5), 2),
                choice=random_.randrange(1 << 30),
                early=random_.random() < 0.15,
                pause_s=round(random_.uniform(2.2, 5.0), 2),
                rate=random_.choice([0.03, 0.1, 0.3]) if Kind.STORAGE in kinds else 0.0,
                failing_s=round(random_.uniform(8.0, 25.0), 2) if Kind.STORAGE in kinds else 0.0,
            )
        )
    return tuple(faults)
