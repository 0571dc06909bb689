"""Simulated time, and simulated processes whose threads take turns.

Every thread of a process is a greenlet; whatever happens is an entry in one queue, ordered by time and, at the same
time, by chance. A process is what production calls a scheduler: it gives out locks, conditions and threads, so the very
classes that run in production run here, one step at a time, and the same seed gives the same history.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

STEPS_MAX = 60_000
#: Threads that could go on at the same moment do so in an order of chance, within so long.
JITTER_S = 0.0002
#: When simulated time begins, in seconds since 1970.
BEGINNING_S = 1_000_000.0


class World:
    """Time, and the queue of all that is to happen."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        #: How far the clocks that people set have jumped.
        self.clock_jump_s = 0.0
        self.steps = 0
        self.done = False
        #: What happened how often: shows that histories reach what they are meant to reach.
        self.seen: Counter[str] = Counter()
        self.hub = getcurrent()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entries = 0
        self._threads: list[greenlet] = []

    def at(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._entries += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._entries, action, arguments))

    def soon(self, action: Callable[..., None], *arguments: Any) -> None:
        self._entries += 1
        when = self.now + self.rng.random() * JITTER_S
        heapq.heappush(self._queue, (when, self._entries, action, arguments))

    def run(self) -> None:
        """Lets things happen until the history is done; what nobody catches in any thread comes out here."""
        try:
            while not self.done:
                self.steps += 1
                assert self.steps < STEPS_MAX, "the history does not end"
                assert self._queue, "nothing is left to happen, but the job has not ended"
                self.now, _, action, arguments = heapq.heappop(self._queue)
                action(*arguments)
        finally:
            self._end_threads()

    def add(self, thread: greenlet) -> None:
        self._threads.append(thread)

    def _end_threads(self) -> None:
        """Nothing of a history is left to run when its greenlets are collected."""
        self.done = True
        for thread in self._threads:
            while not thread.dead:
                with suppress(BaseException):
                    thread.throw(GreenletExit)
        self._threads.clear()


class _Wait:
    """A thread that waits, until it is woken or its time is over."""

    __slots__ = ("over", "process", "thread", "woken")

    def __init__(self, process: Process, thread: greenlet) -> None:
        self.process = process
        self.thread = thread
        self.over = False
        self.woken = False

    def wake(self) -> None:
        if not self.over:
            self.over = self.woken = True
            self.process.world.soon(self.process._go_on, self.thread)

    def expire(self) -> None:
        if not self.over:
            self.over = True
            self.process._go_on(self.thread)


class Process:
    """One simulated process, and the scheduler of everything in it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        #: Those that have not ended, in the order in which they began.
        self.threads: dict[SimThread, None] = {}
        #: Until then, no thread of it does anything.
        self.paused_until = 0.0

    def kill(self) -> None:
        """No thread of it ever goes on."""
        self.alive = False

    # -- the scheduler

    def monotonic_s(self) -> float:
        return self.world.now

    def time_s(self) -> float:
        return BEGINNING_S + self.world.now + self.world.clock_jump_s

    def lock(self) -> SimLock:
        return SimLock(self)

    def condition(self) -> SimCondition:
        return SimCondition(self)

    def start(self, work: Callable[[], None], *, name: str = "") -> SimThread:
        return SimThread(self, work, name)

    def submit(self, work: Callable[[], Any]) -> SimFuture:
        future = SimFuture(self)

        def run() -> None:
            try:
                value = work()
            except Exception as error:
                future.fail(error)
            else:
                future.succeed(value)

        SimThread(self, run, "submitted")
        return future

    def gather(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        made = list(calls)
        if len(made) == 1:
            return [made[0]()]
        under_way = [self.submit(call) for call in made]
        for future in under_way:
            future.wait()
        return [future.result() for future in under_way]

    def line(self, name: str, *, stands_back: bool = False) -> SimLine:
        del stands_back
        return SimLine(self, name)

    def in_background(self, work: Callable[[], Any]) -> Any:
        return work()

    # -- waiting

    def sleep(self, seconds: float) -> None:
        self.park(seconds)

    def park(self, timeout: float | None = None, waits: deque[_Wait] | None = None) -> bool:
        """Waits until somebody wakes this thread, for so long at most; whether somebody did."""
        self.check()
        wait = _Wait(self, getcurrent())
        if waits is not None:
            waits.append(wait)
        if timeout is not None:
            self.world.at(timeout, wait.expire)
        self.world.hub.switch()
        self.check()
        return wait.woken

    def check(self) -> None:
        if self.world.done or not self.alive:
            raise GreenletExit

    def _go_on(self, thread: greenlet) -> None:
        if not self.alive:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until - self.world.now, self._go_on, thread)
            return
        thread.switch()


class SimThread:
    """A greenlet, and those who wait for its end."""

    def __init__(self, process: Process, work: Callable[[], None], name: str) -> None:
        self._process = process
        self._ended = False
        self._waits: deque[_Wait] = deque()
        self.name = name

        def run() -> None:
            try:
                process.check()
                work()
            except GreenletExit:
                return
            finally:
                self._ended = True
                process.threads.pop(self, None)
                for wait in self._waits:
                    wait.wake()

        process.threads[self] = None
        thread = greenlet(run, process.world.hub)
        process.world.add(thread)
        process.world.soon(process._go_on, thread)

    def is_alive(self) -> bool:
        return not self._ended

    def join(self) -> None:
        while not self._ended:
            self._process.park(waits=self._waits)


class SimFuture:
    """What becomes of work that was handed in."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._waits: deque[_Wait] = deque()
        self._followers: list[SimFuture] = []

    def done(self) -> bool:
        return self._done

    def followed_in(self, process: Process) -> SimFuture:
        """The same future, for those who wait in another process."""
        follower = SimFuture(process)
        if self._done:
            follower._end(self._value, self._error)
        else:
            self._followers.append(follower)
        return follower

    def succeed(self, value: Any) -> None:
        self._end(value, None)

    def fail(self, error: Exception) -> None:
        self._end(None, error)

    def _end(self, value: Any, error: Exception | None) -> None:
        if self._done:
            return
        self._done, self._value, self._error = True, value, error
        for wait in self._waits:
            wait.wake()
        for follower in self._followers:
            follower._end(value, error)

    def wait(self, timeout: float | None = None) -> bool:
        while not self._done:
            if not self._process.park(timeout, self._waits) and not self._done:
                return False
        return True

    def result(self, timeout: float | None = None) -> Any:
        if not self.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class SimLine:
    """One thread, and work that waits for it."""

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._name = name
        self._work: deque[tuple[Callable[[], Any], SimFuture]] = deque()
        self._thread: SimThread | None = None

    def submit(self, work: Callable[[], Any]) -> SimFuture:
        future = SimFuture(self._process)
        self._work.append((work, future))
        if self._thread is None or not self._thread.is_alive():
            self._thread = SimThread(self._process, self._run, self._name)
        return future

    def close(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._work:
            work, future = self._work.popleft()
            try:
                future.succeed(work())
            except Exception as error:
                future.fail(error)


class SimLock:
    """A lock that the thread which holds it may take again."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._owner: greenlet | None = None
        self._depth = 0
        self._waits: deque[_Wait] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        me = getcurrent()
        while self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            self._process.park(waits=self._waits)
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waits:
                self._waits.popleft().wake()

    def __enter__(self) -> SimLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition(SimLock):
    """A lock, and a way to wait for something that others do while they hold it."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._sleepers: deque[_Wait] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        depth, self._depth = self._depth, 1
        self.release()
        try:
            return self._process.park(timeout, self._sleepers)
        finally:
            if self._process.alive and not self._process.world.done:
                self.acquire()
                self._depth = depth

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._process.world.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._process.world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify_all(self) -> None:
        sleepers, self._sleepers = self._sleepers, deque()
        for sleeper in sleepers:
            sleeper.wake()
