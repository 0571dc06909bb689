"""Histories of a simulated job as data: its size, its settings, and the faults it suffers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from anabranch.core.settings import Settings
from simulated.faults import Fault, draw_fault
from simulated.job import Kind


@dataclass(frozen=True)
class History:
    """One run of a job. The behaviour of network and threads follows from the seed; all else is spelled out.

    Times are in seconds; an undisturbed epoch takes about a tenth of one.
    """

    seed: int
    kind: Kind
    workers: int
    key_groups: int
    #: How many rows there are in all, and how many come in a second.
    rows: int
    rows_per_s: float
    #: The parallelism of stages when the first driver starts, when the second does, and so on.
    parallelism: tuple[int, ...]
    #: How many messages are lost, come twice, or take longer than anybody waits.
    loss: float
    duplication: float
    delay: float
    #: Workers end with their driver; a new driver starts new ones.
    embedded: bool
    #: Seconds from one durable epoch to the next; 0: every epoch is durable.
    checkpoint_interval_s: float
    #: A snapshot is made after so many epochs.
    snapshot_epochs: int
    keep_epochs: int
    eager: bool
    #: How long the next piece of a drain from another worker is under way at most.
    piece_s: float
    worker_timeout_s: float
    faults: tuple[Fault, ...]
    #: Whether workers keep their state as in production, and not in dictionaries.
    real_state: bool = False
    #: Whether they keep it in a Redis that they share.
    shared_store: bool = False
    #: How long a drain rests between two steps.
    drain_rest_s: float = 0.002
    #: Rows of one message between tasks and workers.
    message_rows: int = 1000

    @property
    def settings(self) -> Settings:
        return Settings(
            workers=self.workers,
            store="redis" if self.shared_store else "memory",
            key_groups=self.key_groups,
            migration="eager" if self.eager else "lazy",
            request_timeout_s=0.3,
            worker_timeout_s=self.worker_timeout_s,
            heartbeat_s=0.1,
            checkpoint_interval_s=self.checkpoint_interval_s,
            snapshot_epochs=self.snapshot_epochs,
            keep_epochs=self.keep_epochs,
        )


def draw_kind(rng: random.Random) -> Kind:
    """Most jobs have one stage and no times: that is enough for most of what can go wrong, and takes half as long."""
    return Kind(
        timed=rng.random() < 0.15, tables=rng.random() < 0.08, complete=rng.random() < 0.4, sums=rng.random() < 0.35
    )


def draw_history(seed: int) -> History:
    rng = random.Random(seed)
    epochs = rng.choice((1, 2, 2, 3))
    horizon_s = 0.1 + 0.1 * epochs
    times = sorted(rng.uniform(0.0, horizon_s) for _ in range(rng.randint(0, 5)))
    return History(
        seed=seed,
        kind=draw_kind(rng),
        workers=rng.randint(1, 3),
        key_groups=rng.randint(4, 7),
        rows=1 + 4 * epochs,
        rows_per_s=rng.choice((50.0, 150.0)),
        parallelism=(rng.choice((1, 2, 2, 3)),),
        loss=rng.choice((0.0, 0.0, 0.01, 0.03)),
        duplication=rng.choice((0.0, 0.0, 0.02, 0.1)),
        delay=rng.choice((0.0, 0.005, 0.02)),
        embedded=rng.random() < 0.2,
        checkpoint_interval_s=rng.choice((0.0, 0.0, 0.0, 0.2, 5.0)),
        snapshot_epochs=rng.choice((1, 2, 100)),
        keep_epochs=rng.choice((1, 1, 2)),
        eager=rng.random() < 0.15,
        piece_s=rng.choice((0.004, 0.02, 0.1)),
        worker_timeout_s=rng.choice((0.04, 0.15)),
        faults=tuple(draw_fault(rng, at) for at in times),
        drain_rest_s=rng.choice((0.002, 0.03, 0.1)),
        message_rows=rng.choice((1, 1000, 1000, 1000)),
    )
