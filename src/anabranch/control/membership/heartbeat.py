"""The heartbeat: notices workers that end, fall silent or want to leave, also while nobody else talks to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from anabranch.control.membership.members import Member
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import WorkerId
from anabranch.core.requests import Health
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS

logger = logging.getLogger(__name__)


class HeartbeatListener(Protocol):
    """Whose workers are looked after."""

    def watched(self) -> Sequence[Member]:
        """The workers that should be alive."""

    def report_lost(self, worker: WorkerId, reason: str) -> None: ...

    def report_leaving(self, worker: WorkerId) -> None:
        """The worker has been told to stop, and waits until others have its key groups."""

    def on_beat(self) -> None:
        """Called after every look at the workers."""


class Heartbeat:
    """Runs in a thread of its own until it is closed."""

    def __init__(
        self,
        cluster: HeartbeatListener,
        exited: Callable[[], Collection[WorkerId]],
        *,
        heartbeat_s: float,
        worker_timeout_s: float,
        scheduler: Scheduler = THREADS,
    ) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._exited = exited
        self._heartbeat_s = heartbeat_s
        self._worker_timeout_s = worker_timeout_s
        self._silent_since: dict[WorkerId, float] = {}
        self._closed = False
        self._wake = scheduler.condition()
        self._thread = scheduler.start(self._run, name="anabranch-heartbeat")

    def stop(self) -> None:
        """Looks at no worker any more, after the one that is being looked at."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def close(self) -> None:
        self.stop()
        self._thread.join()

    def _wait_for_beat(self) -> bool:
        """Waits for the next look; False: there will be none."""
        with self._wake:
            if not self._closed:
                self._wake.wait(self._heartbeat_s)
            return not self._closed

    def _run(self) -> None:
        while self._wait_for_beat():
            for member in self._cluster.watched():
                if member.worker in self._exited():
                    self._cluster.report_lost(member.worker, "its process has ended")
                else:
                    self._look_at(member)
            try:
                self._cluster.on_beat()
            except AnabranchError as error:
                logger.info("workers could not be asked how far they are: %s", error)

    def _look_at(self, member: Member) -> None:
        try:
            health = member.client.call(Health(), timeout_s=max(self._heartbeat_s, 1.0))
        except AnabranchError:
            since = self._silent_since.setdefault(member.worker, self._scheduler.monotonic_s())
            if self._scheduler.monotonic_s() - since >= self._worker_timeout_s:
                self._cluster.report_lost(member.worker, f"silent for {self._worker_timeout_s:g} s")
            return
        self._silent_since.pop(member.worker, None)
        if health.leaving:
            self._cluster.report_leaving(member.worker)
