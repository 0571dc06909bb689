"""The heartbeat: notices workers that end, fall silent or want to leave, also while nobody else talks to them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from anabranch.control.members import Member
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import WorkerId
from anabranch.wire.messages import Health

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """Whose workers are looked after."""

    def watched(self) -> Sequence[Member]:
        """The workers that should be alive."""

    def report_lost(self, worker: WorkerId, reason: str) -> None: ...

    def report_leaving(self, worker: WorkerId) -> None:
        """The worker has been told to stop, and waits until others have its key groups."""

    def on_beat(self) -> None:
        """Called after every look at the workers."""


class Watch:
    """Runs in a thread of its own until it is closed."""

    def __init__(
        self,
        cluster: Watched,
        exited: Callable[[], Collection[WorkerId]],
        *,
        heartbeat_s: float,
        worker_timeout_s: float,
    ) -> None:
        self._cluster = cluster
        self._exited = exited
        self._heartbeat_s = heartbeat_s
        self._worker_timeout_s = worker_timeout_s
        self._silent_since: dict[WorkerId, float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anabranch-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
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
            health, _ = member.client.call(Health(), timeout_s=max(self._heartbeat_s, 1.0))
        except AnabranchError:
            since = self._silent_since.setdefault(member.worker, time.monotonic())
            if time.monotonic() - since >= self._worker_timeout_s:
                self._cluster.report_lost(member.worker, f"silent for {self._worker_timeout_s:g} s")
            return
        self._silent_since.pop(member.worker, None)
        if health.get("leaving"):
            self._cluster.report_leaving(member.worker)
