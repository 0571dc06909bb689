"""The workers of a job and the route over them: who is there, who is gone, and what is done about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from anabranch.checkpoint.routes import save_route
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.control.members import Member, Membership
from anabranch.control.resume import Claimed, Committed, Resumed, open_on_all
from anabranch.core.errors import AnabranchError, EpochError, LostWorkerError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.routes import Route, next_route
from anabranch.core.settings import Settings
from anabranch.wire.messages import Describe, Health
from anabranch.wire.routed import Routing

logger = logging.getLogger(__name__)

#: How often a repair starts over because yet another worker was lost meanwhile.
_REPAIRS_MAX = 5


class WorkerSupply(Protocol):
    """Where workers come from."""

    def start(self) -> Member | None:
        """A new worker, ready to take part; None if this job does not start workers itself."""

    def kill(self, worker: WorkerId) -> None:
        """Make sure that a worker which is taken for lost is gone, if that is in our power."""

    def exited(self) -> frozenset[WorkerId]:
        """The workers that are known to have ended."""


@dataclass(frozen=True)
class Repair:
    """What was done about lost workers, for progress reports."""

    lost: tuple[WorkerId, ...]
    started: tuple[WorkerId, ...]
    key_groups: int
    route_version: int
    duration_ms: int

    def to_json(self) -> dict[str, Any]:
        return {
            "lost": list(self.lost),
            "started": list(self.started),
            "keyGroups": self.key_groups,
            "routeVersion": self.route_version,
            "durationMs": self.duration_ms,
        }


class Cluster:
    """Changes between epochs only, in the thread that runs them; the watch and newcomers only leave notes."""

    def __init__(self, resumed: Resumed, members: Membership, settings: Settings, supply: WorkerSupply) -> None:
        self._claimed: Claimed = resumed.claimed
        self._settings = settings
        self._supply = supply
        self.members = members
        self.route: Route = resumed.route
        self.routing = self._make_routing()
        self._wanted = len(members)
        self._notes = threading.Lock()
        self._lost: set[WorkerId] = set()
        self._newcomers: list[Member] = []
        self._starting = 0
        #: How often key groups were assigned by this driver, since it resumed the job.
        self._assignments = 0
        #: Held while key groups are assigned: until that is over, workers do not know what they will read.
        self._assigning = threading.Lock()
        #: What workers may still be reading from the checkpoint: each assignment points them to its own files.
        self._adopted_from: list[StateFiles] = [resumed.files]
        self._closed = threading.Event()
        #: Called, in another thread, when a worker is found lost while an epoch may wait for it.
        self.on_loss: Callable[[WorkerId], None] = lambda _: None
        self._watch = threading.Thread(target=self._run_watch, name="anabranch-heartbeat", daemon=True)
        self._watch.start()

    def use(self, claimed: Claimed) -> None:
        """The driver has claimed another generation."""
        self._claimed = claimed

    def close(self) -> None:
        self._closed.set()
        self._watch.join()

    @property
    def needs_change(self) -> bool:
        """Whether a worker was lost, or a new one waits to be let in."""
        with self._notes:
            return bool(self._lost or self._newcomers)

    def note_lost(self, worker: WorkerId) -> None:
        with self._notes:
            if worker in self.members.workers:
                self._lost.add(worker)

    def is_lost(self, worker: WorkerId) -> bool:
        with self._notes:
            return worker in self._lost

    def files_in_use(self) -> Sequence[StateFiles]:
        """What workers may still be reading from the checkpoint: it must not be cleaned up."""
        with self._assigning:
            return self._still_in_use()

    def _still_in_use(self) -> Sequence[StateFiles]:
        files = self._adopted_from
        request = Describe(job=self._claimed.job.job_id, generation=self._claimed.generation)
        try:
            for member in self.members.all:
                described, _ = member.client.call(request)
                if described["pendingGroups"]:
                    return files
        except AnabranchError as error:
            logger.info("what workers are reading is not known: %s", error)
            return files
        self._adopted_from = []
        return []

    # ------------------------------------------------------------------------------------------- changes

    def look_for_losses(self) -> bool:
        """Ask every worker whether it is alive and knows the job; True if one is not or does not."""
        with ThreadPoolExecutor(max_workers=max(1, len(self.members))) as pool:
            well = list(pool.map(self._is_well, self.members.all))
        return not all(well) or self.needs_change

    def repair(self, next_epoch: Epoch, committed: Committed) -> Repair:
        """Let go of lost workers, let in new ones, and share the key groups out among those that are there."""
        started_at = time.monotonic()
        before, lost, started = self.route, [], []
        for _ in range(_REPAIRS_MAX):
            lost += self._remove_lost()
            started += self._let_in()
            if set(self.members.workers) != set(self.route.workers):
                self.route = next_route(self.route, self.members.workers, next_epoch)
                save_route(self._claimed.storage, self.route, generation=self._claimed.generation)
                self.routing = self._make_routing()
            try:
                with self._assigning:
                    files = state_files(self._claimed.storage, committed.epoch)
                    self._adopted_from = [files]
                    self._assignments += 1
                    open_on_all(self._claimed, self.members, self.route, committed, files, self._assignments)
            except LostWorkerError as error:
                logger.warning("another worker was lost during a repair: %s", error)
                self.look_for_losses()
                continue
            self._start_in_background(self._wanted - len(self.members))
            moved = sum(a != b for a, b in zip(before.owners, self.route.owners, strict=True))
            duration_ms = round(1000 * (time.monotonic() - started_at))
            return Repair(tuple(lost), tuple(started), moved, self.route.version, duration_ms)
        raise EpochError(
            f"Workers are lost faster than they can be replaced: {', '.join(lost)}. See their logs, then start the "
            "query again: it resumes from its checkpoint."
        )

    def _remove_lost(self) -> list[WorkerId]:
        with self._notes:
            lost = [worker for worker in self.members.workers if worker in self._lost]
            self._lost.clear()
        for worker in lost:
            logger.warning("worker %s is lost; its key groups go to others", worker)
            self.members.remove(worker)
            self._supply.kill(worker)
        return lost

    def _let_in(self) -> list[WorkerId]:
        with self._notes:
            newcomers, self._newcomers = self._newcomers, []
        if not self.members.all and not newcomers:
            member = self._supply.start()
            if member is None:
                raise EpochError(
                    "All workers of anabranch.workerAddresses are lost. Start them again, then the query: it resumes "
                    "from its checkpoint."
                )
            newcomers = [member]
        for member in newcomers:
            logger.info("worker %s takes part", member.worker)
            self.members.add(member)
        return [member.worker for member in newcomers]

    def _start_in_background(self, missing: int) -> None:
        with self._notes:
            count = missing - self._starting - len(self._newcomers)
            if count <= 0:
                return
            self._starting += count
        for _ in range(count):
            threading.Thread(target=self._start_one, name="anabranch-replace", daemon=True).start()

    def _start_one(self) -> None:
        try:
            member = self._supply.start()
        except AnabranchError as error:
            logger.warning("no worker could be started in place of a lost one: %s", error)
            member = None
        with self._notes:
            self._starting -= 1
            if member is not None:
                self._newcomers.append(member)

    # --------------------------------------------------------------------------------------------- watch

    def _run_watch(self) -> None:
        """Notice workers that end or fall silent, also while nobody else talks to them."""
        interval_s = self._settings.heartbeat_s
        silent_since: dict[WorkerId, float] = {}
        while not self._closed.wait(interval_s):
            for worker in self._supply.exited() & set(self.members.workers):
                self._report_lost(worker, "its process has ended")
            for member in self.members.all:
                if self._answers(member, timeout_s=max(interval_s, 1.0)):
                    silent_since.pop(member.worker, None)
                    continue
                since = silent_since.setdefault(member.worker, time.monotonic())
                if time.monotonic() - since >= self._settings.worker_timeout_s:
                    self._report_lost(member.worker, f"silent for {self._settings.worker_timeout_s:g} s")

    def _report_lost(self, worker: WorkerId, reason: str) -> None:
        with self._notes:
            if worker in self._lost or worker not in self.members.workers:
                return
            self._lost.add(worker)
        logger.warning("worker %s is lost: %s", worker, reason)
        self.on_loss(worker)

    def _answers(self, member: Member, *, timeout_s: float) -> bool:
        try:
            member.client.call(Health(), timeout_s=timeout_s)
        except AnabranchError:
            return False
        return True

    def _is_well(self, member: Member) -> bool:
        if self.is_lost(member.worker):
            return False
        if member.worker in self._supply.exited():
            self.note_lost(member.worker)
            return False
        try:
            health, _ = member.client.call(Health(), timeout_s=self._settings.worker_timeout_s)
        except AnabranchError as error:
            logger.info("worker %s does not answer: %s", member.worker, error)
            self.note_lost(member.worker)
            return False
        return health["worker"] == member.worker and self._claimed.job.job_id in health["jobs"]

    def _make_routing(self) -> Routing:
        position = {member.worker: number for number, member in enumerate(self.members.all)}
        return Routing(
            workers=self.members.workers,
            addresses=tuple(member.address for member in self.members.all),
            owners=np.array([position[owner] for owner in self.route.owners], dtype=np.int16),
        )


def status_of(cluster: Cluster, repairs: list[Repair]) -> Mapping[str, Any]:
    """For the query's status: how many workers there are, and what was lost last."""
    return {
        "workers": list(cluster.members.workers),
        "routeVersion": cluster.route.version,
        "repairs": len(repairs),
        "lastRepair": repairs[-1].to_json() if repairs else None,
    }
