"""Histories of a simulated job as data: its size, its input, what its result must be, and the faults it suffers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

Row = tuple[int, int]  #: a stage and a key
State = dict[Row, int]
SinkRows = tuple[tuple[Row, int], ...]
STAGES = 2
FIRST_STAGE_KEYS = 10
SECOND_STAGE_KEYS = 5
ROWS = [(0, key) for key in range(FIRST_STAGE_KEYS)] + [(1, key) for key in range(SECOND_STAGE_KEYS)]
#: A count that is a multiple of this deletes its key.
DELETED_AT = 4


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
class SilenceWorker(Fault):
    """A worker cannot be reached for a while, and comes back with the state it had.

    Requests of that time never arrive (``late=False``), or are all carried out when it is back.
    """

    which: int
    ticks: int
    late: bool


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
class BreakRead(Fault):
    """From now on, the next time that a worker brings state from the checkpoint, it cannot read the last file."""


@dataclass(frozen=True)
class History:
    """One run of a job. The network's behaviour follows from the seed; everything else is spelled out."""

    seed: int
    workers: int
    key_groups: int
    epochs: int
    #: The parallelism of each run of an epoch, in turn.
    parallelism: tuple[int, ...]
    #: How often a request is sent before its receiver is taken for lost.
    tries: int
    loss_rate: float
    duplicate_rate: float
    #: How many messages take longer than anybody waits.
    delay_rate: float
    #: Workers end with their driver; a new driver starts new ones.
    embedded: bool
    #: The last stage gives all of its rows in every epoch, not those that changed.
    complete: bool
    #: How often an epoch is followed by a snapshot and a clean-up.
    upkeep_rate: float
    keep_epochs: int
    #: How long a worker rests at most between two steps of a drain.
    drain_ticks: int
    faults: tuple[Fault, ...]

    @cached_property
    def input(self) -> tuple[tuple[int, ...], ...]:
        """The keys of the rows of each epoch."""
        rng = random.Random(self.seed)
        return tuple(tuple(rng.randrange(FIRST_STAGE_KEYS) for _ in range(6)) for _ in range(self.epochs))

    @cached_property
    def hash_of(self) -> dict[Row, int]:
        """Few slots for many keys, so that keys of several key groups share one."""
        return {(stage, key): (key % 3 << 40) + key * 7 + stage * 3 for stage, key in ROWS}

    @cached_property
    def group_of(self) -> dict[Row, int]:
        return {row: hash_ % self.key_groups for row, hash_ in self.hash_of.items()}

    @cached_property
    def expected(self) -> tuple[tuple[State, ...], tuple[SinkRows, ...]]:
        """The state as of each epoch, and what the sink holds of it."""
        states: list[State] = []
        sink: list[SinkRows] = []
        state: State = {}
        for keys in self.input:
            first = apply_rows(state, first_stage_rows(keys))
            second = apply_rows(state, second_stage_rows(first))
            state = {row: count for row, count in (state | first | second).items() if count % DELETED_AT}
            states.append(state)
            whole = {row: count for row, count in state.items() if row[0] == STAGES - 1}
            sink.append(sink_rows(whole | second if self.complete else second))
        return tuple(states), tuple(sink)

    def state_at(self, epoch: int) -> State:
        return self.expected[0][epoch] if epoch >= 0 else {}


def first_stage_rows(keys: Iterable[int]) -> list[tuple[Row, int]]:
    return [((0, key), 1) for key in keys]


def second_stage_rows(counts: State) -> list[tuple[Row, int]]:
    """The second stage sums the first one's results under other keys, so an error in the first one multiplies."""
    return [((1, key % SECOND_STAGE_KEYS), count) for (_, key), count in sorted(counts.items())]


def apply_rows(state: State, rows: Iterable[tuple[Row, int]]) -> State:
    """What the rows change counts to; only the keys that they touch. Which counts delete their key: DELETED_AT."""
    counts: State = {}
    for row, amount in rows:
        counts[row] = counts.get(row, state.get(row, 0)) + amount
    return counts


def sink_rows(counts: State) -> SinkRows:
    return tuple(sorted(counts.items()))


def draw_history(seed: int) -> History:
    rng = random.Random(seed)
    epochs = rng.choice((1, 2, 2, 3))
    horizon = 60 + 100 * epochs
    times = sorted(rng.randrange(horizon) for _ in range(rng.randint(0, 5)))
    return History(
        seed=seed,
        workers=rng.randint(1, 3),
        key_groups=rng.randint(4, 8),
        epochs=epochs,
        parallelism=tuple(rng.randint(1, 3) for _ in range(3)),
        tries=rng.choice((1, 1, 3)),
        loss_rate=rng.choice((0.0, 0.0, 0.01, 0.04)),
        duplicate_rate=rng.choice((0.0, 0.0, 0.02, 0.1)),
        delay_rate=rng.choice((0.0, 0.005, 0.02)),
        embedded=rng.random() < 0.2,
        complete=rng.random() < 0.3,
        upkeep_rate=rng.choice((0.0, 1.0, 1.0)),
        keep_epochs=rng.choice((1, 1, 2)),
        drain_ticks=rng.choice((30, 60, 400)),
        faults=tuple(draw_fault(rng, at) for at in times),
    )


def draw_fault(rng: random.Random, at: int) -> Fault:
    makers = (
        lambda: CrashDriver(at),
        lambda: CrashDriver(at),
        lambda: SecondDriver(at),
        lambda: PauseDriver(at, ticks=rng.randint(20, 300)),
        lambda: CrashWorker(at, which=rng.randrange(8)),
        lambda: CrashWorker(at, which=rng.randrange(8)),
        lambda: SilenceWorker(at, which=rng.randrange(8), ticks=rng.randint(20, 300), late=rng.random() < 0.5),
        lambda: SilenceWorker(at, which=rng.randrange(8), ticks=rng.randint(20, 100), late=rng.random() < 0.5),
        lambda: Rescale(at, workers=rng.randint(1, 3)),
        lambda: SlowTask(at),
        lambda: BrokenTask(at),
        lambda: FailJob(at),
        lambda: LoseManifest(at),
        lambda: LoseSparkCommit(at),
        lambda: RepeatEpoch(at),
        lambda: KillUpkeep(at),
        lambda: BreakRead(at),
    )
    return rng.choice(makers)()


def undisturbed(history: History) -> History:
    """The same job without any fault."""
    return replace(history, loss_rate=0.0, duplicate_rate=0.0, delay_rate=0.0, faults=())


def draw_return(seed: int) -> History:
    """An epoch is run again without a worker that has committed its first run; the worker comes back afterwards."""
    rng = random.Random(seed)
    faults = (LoseSparkCommit(at=0, silent_ticks=rng.randint(60, 150)), Rescale(at=rng.randint(130, 200), workers=3))
    quiet = undisturbed(draw_history(seed))
    shape = {"workers": 2, "key_groups": 8, "epochs": rng.randint(1, 2), "parallelism": (2,)}
    return replace(quiet, **shape, embedded=False, faults=faults)


def draw_rerun(seed: int) -> History:
    """An epoch is run again with another parallelism while tasks of its earlier run are still busy."""
    rng = random.Random(seed)
    times = sorted(rng.randint(20, 200) for _ in range(3))
    faults = tuple(
        fault for turn, at in enumerate(times) for fault in (Rescale(at, workers=1 + turn % 2), FailJob(at + 1))
    )
    quiet = undisturbed(draw_history(seed))
    return replace(quiet, workers=2, key_groups=8, parallelism=(2, 3, 1), embedded=False, faults=faults)


def draw_losses(seed: int) -> History:
    """Workers are lost one after the other, so that key groups move on while they have not arrived."""
    rng = random.Random(seed)
    history = draw_history(seed)
    times = sorted(rng.randrange(100, 100 + 100 * history.epochs) for _ in range(3))
    faults = tuple(
        rng.choice(
            (
                CrashWorker(at, which=rng.randrange(8)),
                SilenceWorker(at, which=rng.randrange(8), ticks=rng.randint(20, 150), late=True),
                Rescale(at, workers=rng.randint(1, 3)),
            )
        )
        for at in times
    )
    delay_rate = rng.choice((history.delay_rate, 0.05))
    return replace(history, workers=3, epochs=history.epochs + 1, delay_rate=delay_rate, faults=faults)


def draw_upkeep(seed: int) -> History:
    """Key groups arrive slowly, while snapshots are made, and what is older than those is cleaned up."""
    rng = random.Random(seed)
    history = draw_history(seed)
    epochs = rng.randint(3, 4)
    makers = (
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: CrashDriver(at),
        lambda at: Rescale(at, workers=rng.randint(1, 3)),
        lambda at: KillUpkeep(at),
        lambda at: BreakRead(at),
    )
    times = sorted(rng.randrange(80, 100 * epochs) for _ in range(rng.randint(1, 3)))
    faults = tuple(rng.choice(makers)(at) for at in times)
    return replace(history, epochs=epochs, keep_epochs=1, upkeep_rate=1.0, drain_ticks=600, faults=faults)


def draw_late_pieces(seed: int) -> History:
    """Drivers follow each other, and requests come again long after they were sent."""
    rng = random.Random(seed)
    faults = tuple(CrashDriver(at=rng.randint(30, 160)) for _ in range(2))
    return replace(undisturbed(draw_history(seed)), duplicate_rate=0.4, embedded=False, epochs=2, faults=faults)


def draw_broken_reads(seed: int) -> History:
    """Workers fail to read some files of key groups that move on before they have arrived, and newer snapshots come."""
    rng = random.Random(seed)
    times = [rng.randrange(100, 400) for _ in range(6)]
    faults = [BreakRead(at) for at in times] + [CrashDriver(at=rng.randrange(150, 600))]
    faults += [Rescale(at=rng.randrange(100, 600), workers=rng.randint(1, 3)) for _ in range(4)]
    shape = {"workers": 2, "epochs": 5, "keep_epochs": 1, "upkeep_rate": 1.0, "drain_ticks": rng.choice((300, 900))}
    quiet = undisturbed(draw_history(seed))
    return replace(quiet, **shape, embedded=False, faults=tuple(sorted(faults, key=lambda fault: fault.at)))
