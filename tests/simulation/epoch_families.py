"""Families of histories: each leads to one kind of trouble more often than chance does."""

from __future__ import annotations

import random
from dataclasses import replace

from epoch_faults import (
    BreakPeer,
    BreakRead,
    CrashDeparting,
    CrashDriver,
    CrashWorker,
    FailJob,
    Fault,
    KillUpkeep,
    Leave,
    LoseSparkCommit,
    Rescale,
    RestartWorker,
    SilenceWorker,
    SlowTask,
    StrayTask,
)
from epoch_history import History, draw_history


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
    faults = tuple(fault for at in times for fault in (RestartWorker(at, which=rng.randrange(2)), FailJob(at + 1)))
    quiet = undisturbed(draw_history(seed))
    return replace(quiet, workers=2, key_groups=8, parallelism=(2, 4, 3), embedded=False, faults=faults)


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


def draw_moves(seed: int) -> History:
    """The route changes again and again while key groups are on their way, and their former owners fail."""
    rng = random.Random(seed)
    history = draw_history(seed)
    epochs = rng.randint(2, 3)
    makers = (
        lambda at: Rescale(at, workers=rng.choice((None, 1, 2, 3))),
        lambda at: Rescale(at, workers=rng.choice((None, 1, 2, 3))),
        lambda at: Rescale(at, workers=rng.choice((None, 2, 3))),
        lambda at: Leave(at, which=rng.randrange(8)),
        lambda at: StrayTask(at),
        lambda at: StrayTask(at),
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: CrashDeparting(at),
        lambda at: RestartWorker(at, which=rng.randrange(8)),
        lambda at: SilenceWorker(at, which=rng.randrange(8), ticks=rng.randint(20, 200), late=rng.random() < 0.5),
        lambda at: CrashDriver(at),
    )
    moves: list[Fault] = [Rescale(rng.randrange(60, 150), workers=rng.choice((1, 2, 3)))]
    moves += [rng.choice(makers)(rng.randrange(80, 100 * epochs)) for _ in range(rng.randint(2, 5))]
    return replace(
        history,
        workers=rng.randint(2, 3),
        key_groups=rng.choice((4, 6, 8)),
        epochs=epochs,
        embedded=False,
        drain_ticks=rng.choice((30, 150, 400)),
        faults=tuple(sorted(moves, key=lambda fault: fault.at)),
    )


def draw_slow_drains(seed: int) -> History:
    """What former owners send is under way for longer than an epoch takes, and the same comes by other ways before."""
    rng = random.Random(seed)
    history = draw_history(seed)
    makers = (
        lambda at: Rescale(at, workers=rng.choice((None, 2, 3))),
        lambda at: Rescale(at, workers=rng.choice((None, 2, 3))),
        lambda at: CrashDeparting(at),
        lambda at: BreakPeer(at),
        lambda at: BreakPeer(at),
        lambda at: BreakPeer(at),
        lambda at: SlowTask(at),
        lambda at: FailJob(at),
        lambda at: CrashDriver(at),
    )
    faults: list[Fault] = [Rescale(rng.randrange(60, 120), workers=rng.choice((1, 3)))]
    faults += [rng.choice(makers)(rng.randrange(120, 350)) for _ in range(rng.randint(2, 4))]
    return replace(
        undisturbed(history),
        workers=2,
        key_groups=rng.choice((4, 6)),
        epochs=rng.randint(3, 4),
        embedded=False,
        complete=rng.random() < 0.6,
        loss_rate=rng.choice((0.0, 0.04)),
        delay_rate=rng.choice((0.0, 0.05)),
        drain_ticks=rng.choice((10, 60)),
        eager=False,
        peer_ticks=rng.choice((60, 250)),
        peer_timeout=rng.choice((60, 200)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def draw_strays(seed: int) -> History:
    """Key groups move between workers that stay, and tasks look for them at their former owners."""
    rng = random.Random(seed)
    moves = [Rescale(rng.randrange(60, 200), workers=rng.choice((None, None, 3))) for _ in range(2)]
    strays = [StrayTask(rng.randrange(150, 350)) for _ in range(4)]
    faults: list[Fault] = sorted([*moves, *strays], key=lambda fault: fault.at)
    quiet = undisturbed(draw_history(seed))
    return replace(quiet, workers=2, key_groups=8, epochs=3, embedded=False, eager=False, faults=tuple(faults))


def draw_chains(seed: int) -> History:
    """Key groups move on while their former owner still has to fetch them itself, and then something changes again."""
    rng = random.Random(seed)
    last = (
        lambda at: CrashDriver(at),
        lambda at: CrashDriver(at),
        lambda at: Rescale(at, workers=rng.choice((None, 1, 2))),
        lambda at: Leave(at, which=rng.randrange(8)),
        lambda at: RestartWorker(at, which=rng.randrange(8)),
    )
    times = sorted(rng.randrange(230, 420) for _ in range(2))
    first = Rescale(rng.randrange(60, 110), workers=1)
    second = Rescale(rng.randrange(150, 220), workers=rng.choice((2, 2, 3)))
    return replace(
        undisturbed(draw_history(seed)),
        workers=2,
        key_groups=4,
        epochs=rng.randint(3, 4),
        embedded=False,
        eager=False,
        drain_ticks=rng.choice((20, 100)),
        peer_ticks=rng.choice((60, 200)),
        peer_timeout=200,
        faults=(first, second, *(rng.choice(last)(at) for at in times)),
    )
