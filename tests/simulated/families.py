"""Families of histories: each leads to one kind of trouble more often than chance does. Times are in seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

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
    draw_silence,
    draw_storage,
)
from simulated.history import History, draw_history

Makers = Sequence[Callable[[float], Fault]]


def undisturbed(history: History) -> History:
    """The same job without any fault."""
    return replace(history, loss=0.0, duplication=0.0, delay=0.0, faults=())


def rows_of(epochs: int) -> int:
    """As many rows as there are in about so many epochs."""
    return 1 + 4 * epochs


def _in_order(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _some(rng: random.Random, makers: Makers, count: int, since: float, until: float) -> list[Fault]:
    return [rng.choice(makers)(rng.uniform(since, until)) for _ in range(count)]


def draw_return(seed: int) -> History:
    """An epoch is run again without a worker that has committed its first run; the worker comes back afterwards."""
    rng = random.Random(seed)
    faults = (
        Waiting(0.0, "spark_commits_to_lose", silent_s=rng.uniform(0.05, 0.1)),
        Rescale(rng.uniform(0.14, 0.2), workers=3),
    )
    shape: dict[str, Any] = {"workers": 2, "key_groups": 8, "rows": rows_of(rng.randint(1, 3)), "parallelism": (2,)}
    quiet = undisturbed(draw_history(seed))
    return replace(quiet, **shape, rows_per_s=50.0, embedded=False, checkpoint_interval_s=0.0, faults=faults)


def draw_rerun(seed: int) -> History:
    """An epoch is run again with another parallelism while tasks of its earlier run are still busy."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    for at in sorted(rng.uniform(0.02, 0.2) for _ in range(2)):
        faults.append(Rescale(at - 0.01, workers=None, parallelism=rng.randint(1, 3)))
        faults.append(RestartWorker(at, which=rng.randrange(2)))
    shape: dict[str, Any] = {"workers": 2, "key_groups": 6, "parallelism": (2,), "embedded": False, "delay": 0.2}
    history = undisturbed(draw_history(seed))
    return replace(history, **shape, rows=rows_of(2), message_rows=1000, faults=_in_order(faults))


def draw_losses(seed: int) -> History:
    """Workers are lost one after the other, so that key groups move on while they have not arrived."""
    rng = random.Random(seed)
    history = draw_history(seed)
    makers: Makers = (
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: SilenceWorker(at, which=rng.randrange(8), seconds=rng.uniform(0.02, 0.15), late=True),
        lambda at: Rescale(at, workers=rng.randint(1, 3)),
    )
    faults = _some(rng, makers, 3, 0.05, 0.35)
    shape: dict[str, Any] = {"workers": 3, "rows": history.rows + 4, "drain_rest_s": rng.choice((0.03, 0.2))}
    return replace(history, **shape, delay=rng.choice((0.0, 0.05)), faults=_in_order(faults))


def draw_upkeep(seed: int) -> History:
    """Key groups arrive slowly, while snapshots are made, and what is older than those is cleaned up."""
    rng = random.Random(seed)
    makers: Makers = (
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        CrashDriver,
        lambda at: Rescale(at, workers=rng.randint(1, 3)),
        lambda at: Waiting(at, "upkeep_to_kill"),
        lambda at: BreakStorage(at, seconds=0.02, share=0.5, silent=False, action="read"),
    )
    faults = _some(rng, makers, rng.randint(1, 3), 0.08, 0.4)
    return replace(
        undisturbed(draw_history(seed)),
        rows=rows_of(rng.randint(3, 4)),
        checkpoint_interval_s=0.0,
        keep_epochs=1,
        snapshot_epochs=1,
        piece_s=0.1,
        drain_rest_s=rng.choice((0.1, 0.4)),
        faults=_in_order(faults),
    )


def draw_reads(seed: int) -> History:
    """Workers fail to read some files of key groups that move on before they have arrived, and newer snapshots come."""
    rng = random.Random(seed)
    faults: list[Fault] = [
        BreakStorage(rng.uniform(0.05, 0.4), seconds=0.05, share=0.5, silent=False, action="read") for _ in range(4)
    ]
    faults.append(CrashDriver(rng.uniform(0.1, 0.5)))
    faults += [Rescale(rng.uniform(0.05, 0.5), workers=rng.randint(1, 3)) for _ in range(3)]
    shape: dict[str, Any] = {
        "workers": 2,
        "rows": rows_of(4),
        "keep_epochs": 1,
        "snapshot_epochs": 1,
        "embedded": False,
    }
    shape |= {"checkpoint_interval_s": 0.0, "drain_rest_s": rng.choice((0.1, 0.4))}
    return replace(undisturbed(draw_history(seed)), **shape, faults=_in_order(faults))


def draw_late(seed: int) -> History:
    """Drivers follow each other, and requests come again long after they were sent."""
    rng = random.Random(seed)
    faults = [CrashDriver(rng.uniform(0.03, 0.25)) for _ in range(2)]
    if rng.random() < 0.3:
        faults.append(SecondDriver(rng.uniform(0.03, 0.25)))  # type: ignore[arg-type]
    quiet = undisturbed(draw_history(seed))
    shape: dict[str, Any] = {"duplication": 0.3, "delay": rng.choice((0.0, 0.1)), "parallelism": (2, 1, 3)}
    return replace(quiet, **shape, embedded=False, rows=rows_of(2), faults=_in_order(faults))


def draw_moves(seed: int) -> History:
    """The route changes again and again while key groups are on their way, and their former owners fail."""
    rng = random.Random(seed)
    makers: Makers = (
        lambda at: Rescale(at, workers=rng.choice((None, 1, 2, 3))),
        lambda at: Rescale(at, workers=rng.choice((None, 1, 2, 3))),
        lambda at: Rescale(at, workers=rng.choice((None, 2, 3))),
        lambda at: Leave(at, which=rng.randrange(8)),
        lambda at: Waiting(at, "tasks_to_stray"),
        lambda at: Waiting(at, "peers_to_break"),
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        CrashDeparting,
        lambda at: RestartWorker(at, which=rng.randrange(8)),
        lambda at: draw_silence(rng, at),
        CrashDriver,
    )
    moves: list[Fault] = [Rescale(rng.uniform(0.03, 0.12), workers=rng.choice((1, 2, 3)))]
    moves += _some(rng, makers, rng.randint(2, 4), 0.06, 0.35)
    return replace(
        draw_history(seed),
        workers=rng.randint(2, 3),
        key_groups=rng.choice((4, 6, 8)),
        rows=rows_of(3),
        rows_per_s=50.0,
        embedded=False,
        piece_s=rng.choice((0.02, 0.1)),
        faults=_in_order(moves),
    )


def draw_slow(seed: int) -> History:
    """What former owners send is under way for longer than an epoch takes, and the same comes by other ways before."""
    rng = random.Random(seed)
    history = draw_history(seed)
    makers: Makers = (
        lambda at: Rescale(at, workers=rng.choice((None, 2, 3))),
        lambda at: Rescale(at, workers=rng.choice((None, 2, 3))),
        CrashDeparting,
        lambda at: Waiting(at, "peers_to_break"),
        lambda at: Waiting(at, "peers_to_break"),
        lambda at: Waiting(at, "peers_to_break"),
        lambda at: Waiting(at, "jobs_to_fail"),
        CrashDriver,
    )
    faults: list[Fault] = [Rescale(rng.uniform(0.04, 0.12), workers=rng.choice((1, 3)))]
    faults += _some(rng, makers, rng.randint(2, 4), 0.1, 0.4)
    return replace(
        undisturbed(history),
        kind=replace(history.kind, sums=rng.random() < 0.6, complete=True),
        workers=2,
        key_groups=rng.choice((4, 6)),
        rows=rows_of(4),
        rows_per_s=50.0,
        embedded=False,
        loss=rng.choice((0.0, 0.02)),
        delay=rng.choice((0.0, 0.03)),
        eager=False,
        piece_s=rng.choice((0.06, 0.25)),
        worker_timeout_s=rng.choice((0.06, 0.2)),
        faults=_in_order(faults),
    )


def draw_strays(seed: int) -> History:
    """Key groups move between workers that stay, and tasks look for them at their former owners."""
    rng = random.Random(seed)
    faults: list[Fault] = [Rescale(rng.uniform(0.04, 0.15), workers=rng.choice((None, None, 3))) for _ in range(2)]
    faults += [Waiting(rng.uniform(0.1, 0.35), "tasks_to_stray") for _ in range(4)]
    quiet = undisturbed(draw_history(seed))
    shape: dict[str, Any] = {"workers": 2, "key_groups": 8, "rows": rows_of(4), "rows_per_s": 50.0}
    return replace(quiet, **shape, embedded=False, eager=False, faults=_in_order(faults))


def draw_chains(seed: int) -> History:
    """Key groups move on while their former owner still has to fetch them itself, and then something changes again."""
    rng = random.Random(seed)
    last: Makers = (
        CrashDriver,
        CrashDriver,
        lambda at: Rescale(at, workers=rng.choice((None, 1, 2))),
        lambda at: Leave(at, which=rng.randrange(8)),
        lambda at: RestartWorker(at, which=rng.randrange(8)),
    )
    first = Rescale(rng.uniform(0.04, 0.09), workers=1)
    second = Rescale(rng.uniform(0.12, 0.2), workers=rng.choice((2, 2, 3)))
    return replace(
        undisturbed(draw_history(seed)),
        workers=2,
        key_groups=4,
        rows=rows_of(4),
        rows_per_s=50.0,
        embedded=False,
        eager=False,
        piece_s=rng.choice((0.06, 0.2)),
        worker_timeout_s=0.2,
        faults=_in_order([first, second, *_some(rng, last, 2, 0.2, 0.4)]),
    )


def draw_storage_trouble(seed: int) -> History:
    """Calls of the storage fail in all ways, while drivers and workers change."""
    rng = random.Random(seed)
    makers: Makers = (
        lambda at: draw_storage(rng, at),
        lambda at: draw_storage(rng, at),
        lambda at: draw_storage(rng, at),
        CrashDriver,
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: Rescale(at, workers=rng.randint(1, 3)),
    )
    faults = _some(rng, makers, rng.randint(2, 5), 0.0, 0.35)
    return replace(undisturbed(draw_history(seed)), faults=_in_order(faults))


def draw_volatile(seed: int) -> History:
    """Several epochs are not durable when workers or drivers are lost, or writing them fails."""
    rng = random.Random(seed)
    makers: Makers = (
        CrashDriver,
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: RestartWorker(at, which=rng.randrange(8)),
        lambda at: Rescale(at, workers=rng.randint(1, 3)),
        lambda at: Waiting(at, "spark_commits_to_lose"),
        lambda at: Waiting(at, "epochs_to_repeat"),
        lambda at: Waiting(at, "commits_to_break"),
        lambda at: BreakStorage(
            at, seconds=0.05, share=rng.choice((0.3, 1.0)), silent=rng.random() < 0.4, action="write"
        ),
        lambda at: draw_silence(rng, at),
    )
    faults = _some(rng, makers, rng.randint(1, 4), 0.05, 0.4)
    history = draw_history(seed)
    return replace(
        undisturbed(history),
        kind=replace(history.kind, timed=rng.random() < 0.2),
        workers=rng.randint(1, 3),
        rows=rows_of(4),
        checkpoint_interval_s=rng.choice((0.12, 0.2, 5.0)),
        snapshot_epochs=rng.choice((1, 2, 100)),
        faults=_in_order(faults),
    )


def draw_timed(seed: int) -> History:
    """Timers and expiries, with epochs that run again and clocks that jump."""
    rng = random.Random(seed)
    makers: Makers = (
        CrashDriver,
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: Rescale(at, workers=rng.choice((None, 1, 2, 3))),
        lambda at: Waiting(at, "jobs_to_fail"),
        lambda at: Waiting(at, "spark_commits_to_lose"),
        lambda at: JumpClock(at, seconds=rng.choice((-0.1, 0.1, 30.0))),
    )
    history = draw_history(seed)
    return replace(
        undisturbed(history),
        kind=replace(history.kind, timed=True),
        rows=rows_of(3),
        rows_per_s=50.0,
        faults=_in_order(_some(rng, makers, rng.randint(1, 3), 0.03, 0.4)),
    )


def draw_tables(seed: int) -> History:
    """A table that all tasks read changes, while epochs run again."""
    rng = random.Random(seed)
    makers: Makers = (
        CrashDriver,
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: Rescale(at, workers=rng.randint(1, 3)),
        lambda at: Waiting(at, "jobs_to_fail"),
        lambda at: Waiting(at, "sinks_to_fail"),
        lambda at: Waiting(at, "epochs_to_repeat"),
        lambda at: Waiting(at, "spark_commits_to_lose"),
    )
    history = draw_history(seed)
    return replace(
        undisturbed(history),
        kind=replace(history.kind, tables=True, timed=False),
        rows=rows_of(3),
        faults=_in_order(_some(rng, makers, rng.randint(1, 3), 0.02, 0.35)),
    )


def draw_savepoints(seed: int) -> History:
    """Savepoints are taken, and the job is stopped and put back to an older epoch, while other things go wrong."""
    rng = random.Random(seed)
    makers: Makers = (
        CrashDriver,
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: Rescale(at, workers=rng.randint(1, 3)),
        lambda at: draw_storage(rng, at),
        lambda at: Waiting(at, "upkeep_to_kill"),
        lambda at: Rewind(at, epochs=rng.randint(1, 3)),
    )
    faults: list[Fault] = [
        TakeSavepoint(rng.uniform(0.08, 0.3)),
        Rewind(rng.uniform(0.1, 0.4), epochs=rng.randint(1, 2)),
    ]
    faults += _some(rng, makers, rng.randint(0, 2), 0.05, 0.4)
    return replace(
        undisturbed(draw_history(seed)),
        rows=rows_of(4),
        rows_per_s=50.0,
        keep_epochs=rng.choice((1, 4)),
        checkpoint_interval_s=rng.choice((0.0, 0.0, 0.2)),
        faults=_in_order(faults),
    )


def draw_clocks(seed: int) -> History:
    """Clocks jump while files are written, snapshots are made and what nobody needs is deleted."""
    rng = random.Random(seed)
    makers: Makers = (
        lambda at: JumpClock(at, seconds=rng.choice((5000.0, 9000.0, -5000.0))),
        lambda at: JumpClock(at, seconds=5000.0),
        CrashDriver,
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: PauseDriver(at, seconds=rng.uniform(0.02, 0.2)),
        SecondDriver,
    )
    faults: list[Fault] = [JumpClock(rng.uniform(0.0, 0.2), seconds=5000.0)]
    faults += _some(rng, makers, rng.randint(0, 3), 0.02, 0.4)
    history = draw_history(seed)
    return replace(
        undisturbed(history),
        kind=replace(history.kind, timed=False),
        rows=rows_of(4),
        checkpoint_interval_s=rng.choice((0.0, 0.0, 0.12)),
        snapshot_epochs=1,
        keep_epochs=1,
        delay=rng.choice((0.0, 0.05)),
        faults=_in_order(faults),
    )


def draw_broken(seed: int) -> History:
    """Workers break while they apply an epoch, and some cannot be started in their place."""
    rng = random.Random(seed)
    makers: Makers = (
        lambda at: Waiting(at, "commits_to_break"),
        lambda at: Waiting(at, "commits_to_break"),
        lambda at: Waiting(at, "starts_to_fail"),
        lambda at: Waiting(at, "starts_to_break"),
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: Rescale(at, workers=rng.randint(1, 3)),
        lambda at: Leave(at, which=rng.randrange(8)),
        CrashDriver,
    )
    faults = _some(rng, makers, rng.randint(2, 4), 0.0, 0.3)
    return replace(undisturbed(draw_history(seed)), rows=rows_of(3), faults=_in_order(faults))


def draw_real(seed: int) -> History:
    """Any history, with the state that workers keep in production."""
    return replace(draw_history(seed + 1_000_000), real_state=True)
