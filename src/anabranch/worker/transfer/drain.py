"""The drain: brings what is missing of key groups in the background, out of the way of epochs.

Between epochs it goes on freely. While an epoch runs, it brings no more rows than the driver allows for that epoch: the
driver sees how long epochs take, and paces the drain so that they stay as short as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Protocol

from anabranch.core.errors import AnabranchError
from anabranch.runtime.scheduler import Scheduler, Thread
from anabranch.runtime.threads import THREADS

logger = logging.getLogger(__name__)

#: What a Begin says if the drain need not mind epochs.
NO_LIMIT = -1
#: How long a step should take: the number of key groups that are brought at a time follows from it.
_STEP_S = 0.03
_GROUPS_MIN, _GROUPS_MAX = 1, 256
_GROUPS_AT_FIRST = 8
#: While an epoch runs, the drain rests as many times as long as a step took.
_REST = 1.0
_REST_MIN_S = 0.001
#: How long the drain waits before it tries again after a failure.
_RETRY_S = 1.0
#: An epoch that has neither ended nor begun anew for so long does not hold up the drain: it may never end.
_EPOCH_MAX_S = 30.0
#: A stream in which no epoch runs for so long has time.
_NO_EPOCH_S = 1.0


class Arriving(Protocol):
    """Key groups that are on their way."""

    @property
    def pending(self) -> list[int]: ...

    def drain(self, groups: Collection[int], *, can_wait: bool) -> None: ...


class Drain:
    """Runs in a thread of its own as long as there is something to bring."""

    def __init__(
        self,
        prepare: Callable[[], None],
        choose: Callable[[int], tuple[Arriving, list[int]] | None],
        rows: Callable[[], int],
        scheduler: Scheduler = THREADS,
    ) -> None:
        """``prepare``: what comes before each step; ``choose``: what to bring then, up to a number of key groups;
        ``rows``: how many rows have been brought."""
        self._scheduler = scheduler
        self._prepare = prepare
        self._choose = choose
        self._rows = rows
        self._groups = _GROUPS_AT_FIRST
        #: Of the last step.
        self._rows_per_group = 0.0
        self._wake = scheduler.condition()
        self._thread: Thread | None = None
        self._stopped = False
        self._epoch_until_s = 0.0
        #: Epochs that have ended.
        self._ended = 0
        self._allowed = NO_LIMIT

    def start(self) -> None:
        """Go on, if there is something to bring."""
        with self._wake:
            if self._thread is None and not self._stopped:
                self._groups = _GROUPS_AT_FIRST  # what was right for other rows need not be so for these
                self._thread = self._scheduler.start(self._run, name="drain")

    def begin_epoch(self, rows: int) -> None:
        """An epoch runs; bring no more than these rows until it ends."""
        with self._wake:
            self._epoch_until_s = self._scheduler.monotonic_s() + _EPOCH_MAX_S
            self._allowed = rows
            self._wake.notify_all()

    def end_epoch(self) -> None:
        with self._wake:
            self._epoch_until_s = 0.0
            self._ended += 1
            self._wake.notify_all()

    def wait_for_end_of_epoch(self) -> bool:
        """Wait until there is time: just after an epoch, or if none runs for a while. False: there will be none."""
        with self._wake:
            ended, idle_until_s = self._ended, self._scheduler.monotonic_s() + _NO_EPOCH_S
            while not self._stopped and self._ended == ended:
                now_s = self._scheduler.monotonic_s()
                if now_s < self._epoch_until_s:
                    self._wake.wait(self._epoch_until_s - now_s)
                    idle_until_s = self._scheduler.monotonic_s() + _NO_EPOCH_S
                elif now_s < idle_until_s:
                    self._wake.wait(idle_until_s - now_s)
                else:
                    break
            return not self._stopped

    def stop(self) -> None:
        """Take no more steps, and let no one wait any longer."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()

    def close(self) -> None:
        self.stop()
        with self._wake:
            thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def _in_epoch(self) -> bool:
        return self._scheduler.monotonic_s() < self._epoch_until_s

    def _run(self) -> None:
        while self._wait_for_leave():
            chosen = self._choose(self._groups_now())
            if chosen is None:
                with self._wake:
                    if self._choose(1) is None:  # something may have come between
                        self._thread = None
                        return
                continue
            self._step(*chosen)

    def _wait_for_leave(self) -> bool:
        """Wait until there may be a step; False: there will be no more."""
        with self._wake:
            while not self._stopped and self._in_epoch and self._allowed == 0:
                self._wake.wait(max(_REST_MIN_S, self._epoch_until_s - self._scheduler.monotonic_s()))
            return not self._stopped

    def _groups_now(self) -> int:
        """How many key groups to bring next: no more than this epoch may have rows, as far as that is known."""
        with self._wake:
            if not self._in_epoch or self._allowed == NO_LIMIT or not self._rows_per_group:
                return self._groups
            return max(1, min(self._groups, int(self._allowed / self._rows_per_group)))

    def _step(self, arriving: Arriving, groups: list[int]) -> None:
        before, started = self._rows(), self._scheduler.monotonic_s()
        try:
            self._prepare()
            arriving.drain(groups, can_wait=True)
        except Exception as error:
            # Any at all, or the migration would never end. A task that needs the state meets the same error, and
            # reports it; it may be over by the next try.
            unexpected = not isinstance(error, AnabranchError)
            logger.warning("state cannot be brought yet: %s", error or type(error).__name__, exc_info=unexpected)
            self._rest(_RETRY_S)
            return
        took_s = self._scheduler.monotonic_s() - started
        if took_s < _STEP_S / 2:
            self._groups = min(2 * self._groups, _GROUPS_MAX)
        elif took_s > 2 * _STEP_S:
            self._groups = max(self._groups // 2, _GROUPS_MIN)
        rows = self._rows() - before
        with self._wake:
            self._rows_per_group = rows / len(groups) if groups else 0.0
            if self._allowed != NO_LIMIT:
                self._allowed = max(0, self._allowed - max(1, rows))
            rest_s = max(_REST_MIN_S, _REST * took_s) if self._in_epoch else _REST_MIN_S
        self._rest(rest_s)

    def _rest(self, seconds: float) -> None:
        with self._wake:
            if not self._stopped:
                self._wake.wait(seconds)
