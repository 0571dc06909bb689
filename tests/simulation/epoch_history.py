"""Histories of a simulated job as data: its size, its input, what its result must be, and the faults it suffers."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property

Row = tuple[int, int]  #: a stage and a key
State = dict[Row, int]
STAGES = 2
SECOND_STAGE_KEYS = 5


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time, in ticks; an undisturbed epoch takes about 150."""

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
    """A worker process dies, with all its state; maybe another one is started."""

    which: int
    replaced: bool


@dataclass(frozen=True)
class IsolateWorker(Fault):
    """A worker cannot be reached for a while, and then comes back with the state it had."""

    which: int
    ticks: int


@dataclass(frozen=True)
class Rescale(Fault):
    """The job is to use another number of workers from now on."""

    workers: int


@dataclass(frozen=True)
class SlowTask(Fault):
    """From now on, the next task is so slow that Spark runs a speculative copy, and both complete."""


@dataclass(frozen=True)
class BrokenTask(Fault):
    """From now on, the next task stages its changes, seals them on some of the workers only, and dies."""


@dataclass(frozen=True)
class FailJob(Fault):
    """Spark's job fails while its tasks run; some of them go on for a while."""


@dataclass(frozen=True)
class LoseManifest(Fault):
    """From now on, the next manifest is written or not, and the driver does not learn which."""


@dataclass(frozen=True)
class RepeatEpoch(Fault):
    """From now on, Spark hands over the next epoch again after it was committed, before its own commit."""


@dataclass(frozen=True)
class History:
    """One run of a job. The network's behaviour follows from the seed; everything else is spelled out."""

    seed: int
    workers: int
    key_groups: int
    epochs: int
    #: The parallelism of each run of an epoch, in turn.
    parallelism: tuple[int, ...]
    loss_rate: float
    duplicate_rate: float
    #: How many messages take longer than anybody waits.
    delay_rate: float
    faults: tuple[Fault, ...]

    @cached_property
    def input(self) -> tuple[tuple[int, ...], ...]:
        """The keys of the rows of each epoch."""
        rng = random.Random(self.seed)
        return tuple(tuple(rng.randrange(12) for _ in range(10)) for _ in range(self.epochs))

    def group_of(self, row: Row) -> int:
        return (row[1] * 7 + row[0] * 3) % self.key_groups

    @cached_property
    def expected(self) -> tuple[State, dict[int, State]]:
        """The final state, and what the sink holds of each epoch."""
        state: State = {}
        sink: dict[int, State] = {}
        for epoch, keys in enumerate(self.input):
            first = apply_rows(state, first_stage_rows(keys))
            second = apply_rows(state, second_stage_rows(first))
            state |= first | second
            sink[epoch] = second
        return state, sink


def first_stage_rows(keys: tuple[int, ...]) -> list[tuple[Row, int]]:
    return [((0, key), 1) for key in keys]


def second_stage_rows(counts: State) -> list[tuple[Row, int]]:
    """The second stage sums the first one's results under other keys, so an error in the first one multiplies."""
    return [((1, key % SECOND_STAGE_KEYS), count) for (_, key), count in sorted(counts.items())]


def apply_rows(state: State, rows: list[tuple[Row, int]]) -> State:
    """What the rows change the state to; only the keys that they touch."""
    changes: State = {}
    for row, amount in rows:
        changes[row] = changes.get(row, state.get(row, 0)) + amount
    return changes


def draw_history(seed: int) -> History:
    rng = random.Random(seed)
    epochs = rng.randint(2, 4)
    horizon = 170 * epochs
    makers = (
        lambda at: CrashDriver(at),
        lambda at: CrashDriver(at),
        lambda at: SecondDriver(at),
        lambda at: PauseDriver(at, ticks=rng.randint(20, 300)),
        lambda at: CrashWorker(at, which=rng.randrange(8), replaced=rng.random() < 0.5),
        lambda at: IsolateWorker(at, which=rng.randrange(8), ticks=rng.randint(20, 300)),
        lambda at: Rescale(at, workers=rng.randint(1, 4)),
        lambda at: SlowTask(at),
        lambda at: BrokenTask(at),
        lambda at: FailJob(at),
        lambda at: LoseManifest(at),
        lambda at: RepeatEpoch(at),
    )
    times = sorted(rng.randrange(horizon) for _ in range(rng.randint(0, 8)))
    return History(
        seed=seed,
        workers=rng.randint(1, 3),
        key_groups=rng.randint(4, 9),
        epochs=epochs,
        parallelism=tuple(rng.randint(1, 5) for _ in range(3)),
        loss_rate=rng.choice((0.0, 0.0, 0.02, 0.08)),
        duplicate_rate=rng.choice((0.0, 0.0, 0.02, 0.1)),
        delay_rate=rng.choice((0.0, 0.01, 0.03)),
        faults=tuple(rng.choice(makers)(at) for at in times),
    )


def undisturbed(history: History) -> History:
    """The same job without any fault."""
    return replace(history, loss_rate=0.0, duplicate_rate=0.0, delay_rate=0.0, faults=())


def draw_return(seed: int) -> History:
    """An epoch is run again without a worker that has committed its first run; the worker comes back afterwards."""
    rng = random.Random(seed)
    isolate = IsolateWorker(at=rng.randint(80, 120), which=rng.randrange(3), ticks=rng.randint(200, 350))
    quiet = undisturbed(draw_history(seed))
    faults = (RepeatEpoch(at=0), isolate)
    return replace(quiet, workers=3, key_groups=9, epochs=rng.randint(1, 2), parallelism=(3,), faults=faults)


def draw_rerun(seed: int) -> History:
    """An epoch is run again with another parallelism while tasks of its earlier run are still busy."""
    rng = random.Random(seed)
    faults = tuple(FailJob(at=rng.randint(20, 400)) for _ in range(3))
    quiet = undisturbed(draw_history(seed))
    return replace(quiet, workers=rng.randint(1, 2), key_groups=9, parallelism=(2, 5, 3), faults=faults)
