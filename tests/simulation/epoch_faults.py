"""What may go wrong, or be asked for, in the history of a simulated job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time, in ticks; an undisturbed epoch takes about 100."""

    at: int


@dataclass(frozen=True)
class CrashDriver(Fault):
    """The newest driver dies; its tasks may go on for a while. A successor starts."""


@dataclass(frozen=True)
class SecondDriver(Fault):
    """A driver starts although one is running."""


@dataclass(frozen=True)
class PauseDriver(Fault):
    """The newest driver does nothing for a while, and then goes on as if nothing had happened."""

    ticks: int


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
    ticks: int
    late: bool


@dataclass(frozen=True)
class Rescale(Fault):
    """The job is to use another number of workers from now on; None: the same, with the load shared out anew."""

    workers: int | None


@dataclass(frozen=True)
class Leave(Fault):
    """A worker is to hand over all that it has, and to leave."""

    which: int


@dataclass(frozen=True)
class SlowTask(Fault):
    """From now on, the next task is so slow that Spark runs a speculative copy, and both complete."""


@dataclass(frozen=True)
class BrokenTask(Fault):
    """From now on, the next task stages its changes, seals them on some of the workers only, and dies."""


@dataclass(frozen=True)
class StrayTask(Fault):
    """From now on, the next task looks for state where it was before the last change of the route."""


@dataclass(frozen=True)
class FailJob(Fault):
    """Spark's job fails while its tasks run; some of them go on for a while."""


@dataclass(frozen=True)
class LoseManifest(Fault):
    """From now on, the next manifest is written or not, and the driver does not learn which."""


@dataclass(frozen=True)
class LoseSparkCommit(Fault):
    """From now on, Spark fails when it is to commit the next epoch, which is committed here.

    In the same moment a worker may fall silent.
    """

    silent_ticks: int = 0


@dataclass(frozen=True)
class RepeatEpoch(Fault):
    """From now on, Spark hands over the next epoch again after it was committed, before its own commit."""


@dataclass(frozen=True)
class KillUpkeep(Fault):
    """The process that makes a snapshot dies, or a clean-up stops in the middle, if one is under way."""


@dataclass(frozen=True)
class BreakPeer(Fault):
    """From now on, the next time that a worker asks another one for state, nothing comes of it."""


@dataclass(frozen=True)
class BreakRead(Fault):
    """From now on, the next time that a worker brings state from the checkpoint, it cannot read the last file."""
