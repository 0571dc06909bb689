"""The shared store in a simulation: the store of production on a real Redis, whose calls fail as a history says.

A call fails before it takes effect or after it, or its process dies in the middle of it; Redis may also forget all that
it had. Nothing waits while a call is made, so no simulated thread ever holds a lock of the store.
"""

from __future__ import annotations

import atexit
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import redis
from greenlet import GreenletExit

from anabranch.worker.stores import StorePlace
from anabranch.worker.stores import redis_scripts as scripts
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.stores.redis import RedisBackend
from anabranch.worker.stores.redis_connection import Command, RedisConnection
from simulated.faults import CrashDriver, CrashWorker, Fault, Leave, Rescale, RestartWorker, Waiting, draw_silence
from simulated.history import History, draw_history
from simulated.world import Process
from support.redis_server import RedisServer, running_redis

if TYPE_CHECKING:
    from simulated.application import Application


#: How calls fail: without effect, after they took effect, after a part of them did, or then with their process.
HOWS = ("refused", "silent", "half", "killed")


@dataclass(frozen=True)
class BreakRedis(Fault):
    """For a while, so many calls of Redis fail."""

    seconds: float
    share: float
    #: One of HOWS.
    how: str


@dataclass(frozen=True)
class SaveRedis(Fault):
    """Redis saves what it has."""


@dataclass(frozen=True)
class RestartRedis(Fault):
    """Redis starts anew, with what it saved last, or empty."""


@cache
def server() -> RedisServer:
    """The Redis of all histories of this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(running_redis())


class RedisTrouble:
    """What goes wrong with the Redis of one history."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._faults: list[tuple[float, BreakRedis]] = []
        #: What Redis has saved, by its keys.
        self._saved: dict[bytes, bytes] = {}
        self._client = server().client()
        self._client.flushall()

    def strike(self, fault: BreakRedis | SaveRedis | RestartRedis) -> None:
        match fault:
            case BreakRedis():
                self._faults.append((self._application.world.now + fault.seconds, fault))
            case SaveRedis():
                self._saved = {key: self._client.dump(key) for key in self._client.scan_iter()}
            case RestartRedis():
                self._restart()

    def _restart(self) -> None:
        self._client.flushall()
        for key, value in self._saved.items():
            self._client.restore(key, 0, value)

    def next_call(self, *, takes_over: bool) -> str:
        """How the next call fails; empty: it does not."""
        # A fault of Waiting, but only of histories with a shared store.
        if takes_over and self._application.take("take_overs_to_set_back"):
            self._restart()
        world = self._application.world
        for until, fault in () if self._application.calm else self._faults:
            if world.now < until and world.rng.random() < fault.share:
                world.seen[f"a call of Redis is {fault.how}"] += 1
                return fault.how
        return ""


class SimRedis(RedisConnection):
    """The connection of one simulated process. It does not wait for a Redis that is away."""

    def __init__(self, process: Process, trouble: RedisTrouble) -> None:
        super().__init__(server().url, patience_s=0.0)
        self._process = process
        self._trouble = trouble
        self._begins = self.script(scripts.BEGIN)

    def _answers(self, piece: Sequence[Command]) -> list[Any]:
        self._process.check()
        how = self._trouble.next_call(takes_over=self._begins in piece[0])
        if how in ("half", "killed"):
            super()._answers(piece[: self._process.world.rng.randrange(len(piece) + 1)])
        elif how != "refused":
            answers = super()._answers(piece)
        if how == "killed":
            self._process.kill()
            raise GreenletExit
        if how:
            raise redis.ConnectionError("out of order")
        return answers


@dataclass(frozen=True)
class SharedStores(StoreOptions):
    """Stores of one simulated process in the Redis of a history."""

    process: Process | None = None
    trouble: RedisTrouble | None = None

    @cached_property
    def backend(self) -> RedisBackend:
        assert self.process is not None
        assert self.trouble is not None
        backend = RedisBackend(StorePlace())
        vars(backend)["connection"] = SimRedis(self.process, self.trouble)
        return backend


def draw_shared(seed: int) -> History:
    """State is in a Redis that workers share; calls of it fail while workers and drivers come, go and die."""
    if seed % 4 == 0:
        return draw_set_back(seed)
    rng = random.Random(seed)
    makers = (
        lambda at: _draw_redis(rng, at, rng.choice(HOWS)),
        lambda at: _draw_redis(rng, at, rng.choice(HOWS)),
        SaveRedis,
        RestartRedis,
        RestartRedis,
        CrashDriver,
        lambda at: CrashWorker(at, which=rng.randrange(8)),
        lambda at: RestartWorker(at, which=rng.randrange(8)),
        lambda at: Rescale(at, workers=rng.choice((None, 1, 2, 3))),
        lambda at: Rescale(at, workers=rng.choice((1, 2, 3))),
        lambda at: Leave(at, which=rng.randrange(8)),
        lambda at: draw_silence(rng, at),
        lambda at: Waiting(at, "jobs_to_fail"),
        lambda at: Waiting(at, "commits_to_break"),
    )
    # Each way to fail in turn, so that no way is left to chance.
    faults: list[Fault] = [_draw_redis(rng, rng.uniform(0.0, 0.4), HOWS[seed // 4 % len(HOWS)])]
    faults += [rng.choice(makers)(rng.uniform(0.0, 0.4)) for _ in range(rng.randint(0, 3))]
    history = draw_history(seed)
    return replace(
        history,
        shared_store=True,
        real_state=True,
        eager=False,
        rows=history.rows + 4,
        checkpoint_interval_s=rng.choice((0.0, 0.0, 0.2)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def draw_set_back(seed: int) -> History:
    """Redis is set back to what it saved just when a worker takes over what another one has left there."""
    rng = random.Random(seed)
    faults = (
        SaveRedis(rng.uniform(0.03, 0.15)),
        Waiting(0.18, "take_overs_to_set_back"),
        Rescale(rng.uniform(0.2, 0.3), workers=rng.choice((1, 3))),
    )
    quiet = replace(draw_history(seed), loss=0.0, duplication=0.0, delay=0.0, checkpoint_interval_s=0.0)
    shape: dict[str, Any] = {"workers": 2, "rows": 17, "rows_per_s": 50.0, "embedded": False}
    return replace(quiet, **shape, shared_store=True, real_state=True, eager=False, faults=faults)


def _draw_redis(rng: random.Random, at: float, how: str) -> BreakRedis:
    return BreakRedis(
        at,
        seconds=rng.choice((0.01, 0.05, 0.2)),
        share=rng.choice((0.1, 0.5, 1.0)),
        how=how,
    )
