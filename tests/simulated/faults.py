"""What may go wrong, or be asked for, in the history of a simulated job."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time, in seconds."""

    at: float


@dataclass(frozen=True)
class CrashDriver(Fault):
    """The newest driver dies; its tasks may go on for a while. A successor starts."""


@dataclass(frozen=True)
class SecondDriver(Fault):
    """A driver starts although one is running."""


@dataclass(frozen=True)
class PauseDriver(Fault):
    """The newest driver does nothing for a while, and then goes on as if nothing had happened."""

    seconds: float


@dataclass(frozen=True)
class CrashWorker(Fault):
    """A worker process dies, with all its state."""

    which: int


@dataclass(frozen=True)
class CrashDeparting(Fault):
    """A worker that has left and keeps key groups for their new owners dies, if there is one."""


@dataclass(frozen=True)
class RestartWorker(Fault):
    """A worker process dies, and another one with the same name and address takes its place, without any state."""

    which: int


@dataclass(frozen=True)
class SilenceWorker(Fault):
    """A worker cannot be reached for a while, and comes back with the state it had.

    Requests of that time never arrive (``late=False``), or are all carried out when it is back.
    """

    which: int
    seconds: float
    late: bool


@dataclass(frozen=True)
class Rescale(Fault):
    """The job is to use another number of workers from now on; None: the same, with the load shared out anew."""

    workers: int | None
    #: Of all stages; None: as it is.
    parallelism: int | None = None


@dataclass(frozen=True)
class Leave(Fault):
    """A worker is to hand over all that it has, and to leave."""

    which: int


@dataclass(frozen=True)
class BreakStorage(Fault):
    """For a while, so many calls of the storage fail, before or after they take effect."""

    seconds: float
    share: float
    #: Whether calls take effect and nobody hears of it.
    silent: bool
    #: The calls that fail; empty: all.
    action: str = ""


@dataclass(frozen=True)
class JumpClock(Fault):
    """The clocks that people set jump."""

    seconds: float


@dataclass(frozen=True)
class TakeSavepoint(Fault):
    """A savepoint is taken while epochs go on."""


@dataclass(frozen=True)
class Rewind(Fault):
    """The job is stopped, and somebody puts it back to an older epoch; then it starts again."""

    epochs: int


@dataclass(frozen=True)
class Waiting(Fault):
    """From now on, the next thing of some kind goes wrong: see WAITING."""

    what: str
    #: For how long a worker falls silent in the same moment.
    silent_s: float = 0.0


#: What a Waiting fault may be about.
WAITING = (
    "tasks_to_repeat",  # a task has a speculative copy, and both complete
    "tasks_to_break",  # a task seals its changes on some of the workers only, and dies
    "tasks_to_skip",  # nobody reads the result of a task, so that it never writes its changes
    "tasks_to_stray",  # tasks look for state where it was before the last change of the route
    "jobs_to_fail",  # Spark's job fails after its tasks have run
    "sinks_to_fail",  # the sink has the rows, and Spark does not hear of it
    "spark_commits_to_lose",  # Spark fails when it is to commit an epoch which is committed here
    "epochs_to_repeat",  # Spark hands over an epoch again after it was committed, before its own commit
    "peers_to_break",  # a worker cannot reach the former owner of its key groups
    "commits_to_break",  # a worker runs out of memory while it applies an epoch
    "starts_to_fail",  # a worker cannot be started
    "starts_to_break",  # starting a worker fails in a way that nobody expects
    "upkeep_to_kill",  # the process that makes a snapshot dies
)


def draw_fault(rng: random.Random, at: float) -> Fault:
    makers: tuple[Callable[[], Fault], ...] = (
        lambda: CrashDriver(at),
        lambda: CrashDriver(at),
        lambda: SecondDriver(at),
        lambda: PauseDriver(at, seconds=rng.uniform(0.02, 0.3)),
        lambda: CrashWorker(at, which=rng.randrange(8)),
        lambda: CrashWorker(at, which=rng.randrange(8)),
        lambda: draw_silence(rng, at),
        lambda: RestartWorker(at, which=rng.randrange(8)),
        lambda: Rescale(at, workers=rng.choice((None, 1, 2, 3))),
        lambda: Rescale(at, workers=rng.randint(1, 3)),
        lambda: Leave(at, which=rng.randrange(8)),
        lambda: draw_storage(rng, at),
        lambda: draw_storage(rng, at),
        lambda: JumpClock(at, seconds=rng.choice((-30.0, -0.1, 0.1, 5000.0))),
        lambda: TakeSavepoint(at),
        *((lambda what=what: Waiting(at, what)) for what in WAITING),
    )
    return rng.choice(makers)()


def draw_silence(rng: random.Random, at: float) -> SilenceWorker:
    return SilenceWorker(at, which=rng.randrange(8), seconds=rng.uniform(0.02, 0.3), late=rng.random() < 0.5)


def draw_storage(rng: random.Random, at: float) -> BreakStorage:
    return BreakStorage(
        at,
        seconds=rng.choice((0.005, 0.03, 0.1)),
        share=rng.choice((0.1, 0.5, 1.0)),
        silent=rng.random() < 0.4,
        action=rng.choice(("", "write", "write", "read", "list", "delete", "create")),
    )
