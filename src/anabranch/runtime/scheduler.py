"""Scheduler: time, locks, and work that goes on at the same time, as coordinator and workers are given them.

Production passes real threads and clocks (``threads``), the simulation its own. Code that takes a scheduler uses
nothing else to wait, to lock or to ask for the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Lock(AbstractContextManager[Any], Protocol):
    """A lock that the thread which holds it may take again."""


class Condition(Lock, Protocol):
    """A lock, and a way to wait for something that other threads do while they hold it."""

    def wait(self, timeout: float | None = None) -> bool: ...

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T: ...

    def notify_all(self) -> None: ...


class Future(Protocol[T_co]):
    """The result to come of work that was handed in."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> T_co:
        """Waits for the result, or raises what the work raised; TimeoutError after ``timeout`` seconds."""


class Thread(Protocol):
    """Work that goes on until it ends by itself."""

    def is_alive(self) -> bool: ...

    def join(self) -> None: ...


class Line(Protocol):
    """Work that is done one piece after the other, in the order in which it was handed in."""

    def submit(self, work: Callable[[], T]) -> Future[T]: ...

    def close(self) -> None:
        """Takes no more work, and waits for what was handed in."""


class Scheduler(Protocol):
    """Gives out time, locks and threads."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that only goes forward."""

    def time_s(self) -> float:
        """Seconds since 1970, by a clock that people and other machines set."""

    def lock(self) -> Lock: ...

    def condition(self) -> Condition: ...

    def start(self, work: Callable[[], None], *, name: str) -> Thread:
        """Begins work in a thread of its own, which does not keep the process from ending."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Begins a piece of work that takes no longer than a request."""

    def gather(self, calls: Iterable[Callable[[], T]]) -> list[T]:
        """Makes all calls side by side and waits for all of them; raises the first error, in their order."""

    def line(self, name: str, *, stands_back: bool = False) -> Line:
        """Work that waits for its turn; with ``stands_back``, in a thread that lets others run before it."""

    def in_background(self, work: Callable[[], T]) -> T:
        """Does work in a thread that lets others run before it, and waits for it."""
