"""Histories of a simulated job as data: its size, its input, what its result must be, and the faults it suffers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from epoch_faults import (
    BreakPeer,
    BreakRead,
    BrokenTask,
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

Row = tuple[int, int]  #: a stage and a key
State = dict[Row, int]
SinkRows = tuple[tuple[Row, int], ...]
STAGES = 2
FIRST_STAGE_KEYS = 10
SECOND_STAGE_KEYS = 5
ROWS = [(0, key) for key in range(FIRST_STAGE_KEYS)] + [(1, key) for key in range(SECOND_STAGE_KEYS)]
#: How many different hashes the keys of each stage have.
DIFFERENT_HASHES = 7, 4
#: A count that is a multiple of this deletes its key.
DELETED_AT = 4


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
    #: Key groups that move are brought before the next epoch begins.
    eager: bool
    #: How long the next piece of a drain from another worker takes at most.
    peer_ticks: int
    #: After how long without an answer another worker is given up as a source.
    peer_timeout: int
    faults: tuple[Fault, ...]

    @cached_property
    def input(self) -> tuple[tuple[int, ...], ...]:
        """The keys of the rows of each epoch."""
        rng = random.Random(self.seed)
        return tuple(tuple(rng.randrange(FIRST_STAGE_KEYS) for _ in range(6)) for _ in range(self.epochs))

    @cached_property
    def blind(self) -> tuple[frozenset[Row], ...]:
        """By epoch: keys of the first stage that are counted from 0 again, so that nobody reads their state before."""
        rng = random.Random(self.seed ^ 0xB11D)
        return tuple(frozenset((0, key) for key in sorted(set(keys)) if rng.random() < 0.2) for keys in self.input)

    @cached_property
    def hash_of(self) -> dict[Row, int]:
        """Few slots for many keys, so that keys of several key groups share one; and some keys share their hash."""
        codes = {(stage, key): key % DIFFERENT_HASHES[stage] for stage, key in ROWS}
        return {row: (code % 3 << 40) + code * 7 + row[0] * 3 for row, code in codes.items()}

    @cached_property
    def group_of(self) -> dict[Row, int]:
        return {row: hash_ % self.key_groups for row, hash_ in self.hash_of.items()}

    @cached_property
    def expected(self) -> tuple[tuple[State, ...], tuple[SinkRows, ...]]:
        """The state as of each epoch, and what the sink holds of it."""
        states: list[State] = []
        sink: list[SinkRows] = []
        state: State = {}
        for keys, blind in zip(self.input, self.blind, strict=True):
            seen = {row: count for row, count in state.items() if row not in blind}
            first = apply_rows(seen, first_stage_rows(keys))
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
        eager=rng.random() < 0.15,
        peer_ticks=rng.choice((4, 20, 100)),
        peer_timeout=rng.choice((40, 150)),
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
        lambda: RestartWorker(at, which=rng.randrange(8)),
        lambda: Rescale(at, workers=rng.randint(1, 3)),
        lambda: Rescale(at, workers=rng.choice((None, 1, 2, 3))),
        lambda: Leave(at, which=rng.randrange(8)),
        lambda: SlowTask(at),
        lambda: BrokenTask(at),
        lambda: StrayTask(at),
        lambda: FailJob(at),
        lambda: LoseManifest(at),
        lambda: LoseSparkCommit(at),
        lambda: RepeatEpoch(at),
        lambda: KillUpkeep(at),
        lambda: BreakRead(at),
        lambda: BreakPeer(at),
    )
    return rng.choice(makers)()
