"""Being told to stop: by Ctrl-C or SIGTERM, without losing the epoch that is running."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody has asked for the end."""

    def __init__(self) -> None:
        # Of all that can wake a waiting thread, this alone may be used in a signal handler.
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True
        self._asked.put(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the end is asked for, at most so long; whether it is."""
        if not self.is_asked:
            try:
                self._asked.get(timeout=timeout_s)
            except queue.Empty:
                return False
        return True


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """The first Ctrl-C asks for the end, the second insists on it.

    To be entered after Spark has started: its own handler cancels the jobs of the epoch that is running.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt
        stop.ask()

    former = [signal.signal(number, handle) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, former, strict=True):
            signal.signal(number, handler)


@contextmanager
def children_without_interrupts() -> Iterator[None]:
    """Processes and threads started meanwhile do not notice Ctrl-C, which a terminal sends to all that run in it.

    State workers must outlive it until the last epoch is committed; they end when this process ends them.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
