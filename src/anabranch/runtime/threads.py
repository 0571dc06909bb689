"""Real threads and clocks: the scheduler of production."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

#: As `nice` counts: a thread that stands back gets a tenth of what others get, if they want it all.
_NICENESS = 10
#: Pieces of work that are under way at the same time. Each may wait for another process, so there is room for many;
#: threads that are idle are used again.
_AT_ONCE_MAX = 256


class ThreadScheduler:
    """Gives out threads of this process. Belongs to the process that made it: a forked child makes another."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._owner_pid = 0
        self._making = threading.Lock()

    def monotonic_s(self) -> float:
        return time.monotonic()

    def time_s(self) -> float:
        return time.time()

    def lock(self) -> threading.RLock:
        return threading.RLock()

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def start(self, work: Callable[[], None], *, name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._workers().submit(work)

    def gather(self, calls: Iterable[Callable[[], T]]) -> list[T]:
        made = list(calls)
        if len(made) == 1:
            return [made[0]()]
        under_way = [self.submit(call) for call in made]
        for call in under_way:
            call.exception()  # waits, and raises nothing
        return [call.result() for call in under_way]

    def line(self, name: str, *, stands_back: bool = False) -> ThreadLine:
        return ThreadLine(name, stands_back=stands_back)

    def in_background(self, work: Callable[[], T]) -> T:
        """Does work in a thread that stands back, and waits for it.

        State moves in the background, and on a machine that tasks, driver and workers share, it would take half of the
        processors from an epoch; the system knows better than any pause of ours when there is time. A thread of its own
        each time: work may wait for another worker, which may wait for other work here. It must not be the first to use
        what keeps threads of its own, such as Arrow's readers of files: these would stand back as well.
        """
        with ThreadPoolExecutor(max_workers=1, initializer=stand_back, thread_name_prefix="background") as pool:
            return pool.submit(work).result()

    def _workers(self) -> ThreadPoolExecutor:
        with self._making:
            if self._pool is None or self._owner_pid != os.getpid():
                self._pool = ThreadPoolExecutor(_AT_ONCE_MAX, thread_name_prefix="anabranch")
                self._owner_pid = os.getpid()
            return self._pool


class ThreadLine:
    """One thread, and work that waits for it."""

    def __init__(self, name: str, *, stands_back: bool) -> None:
        initializer = stand_back if stands_back else None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=initializer)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def stand_back() -> None:
    """Lets others run before the thread that calls this, for good: without privileges there is no way back."""
    if sys.platform == "linux":  # elsewhere, a thread has no priority of its own
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # then it does its work with the priority that it has
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


#: The scheduler that production passes to all code that takes one.
THREADS = ThreadScheduler()
