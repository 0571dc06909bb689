"""The jobs that a worker takes part in, and who answers which request. Knows nothing of the network."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core import requests
from anabranch.core.answers import Done, Opened, SharedOffer, WorkerHealth
from anabranch.core.errors import WorkerError
from anabranch.core.ids import JobId, WorkerId
from anabranch.core.requests import JobRequest, PeerOffer, Request
from anabranch.core.schemas import HASH
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import Parts, Tables
from anabranch.wire.messages import FURTHER_ROWS, KEYS, kind_of
from anabranch.worker.parts import PRODUCTION, WorkerParts
from anabranch.worker.server.job import Batches, WorkerJob
from anabranch.worker.state.job_state import JobShape
from anabranch.worker.stores.options import StoreOptions

#: How often a worker that is to go looks whether it may.
_LEAVE_INTERVAL_S = 0.1


class WorkerJobs:
    """Answers requests of several jobs. Any thread may call any method."""

    def __init__(
        self, worker: WorkerId, stores: StoreOptions, credentials: Credentials, parts: WorkerParts = PRODUCTION
    ) -> None:
        self.worker = worker
        self._stores = stores
        self._credentials = credentials
        self._parts = parts
        self._lock = parts.scheduler.lock()
        self._jobs: dict[JobId, WorkerJob] = {}
        self._leaving = False
        self._asked_s = parts.scheduler.monotonic_s()
        #: How often the driver of each job looks after this worker.
        self._heartbeats_s: dict[JobId, float] = {}
        #: Called with the id of a job that goes on without this worker.
        self.on_dismissed: Callable[[str], None] = lambda _: None
        #: What answers each type of request that does not need an open job. All others are a job's.
        self.handlers: dict[type[Request[Any]], Callable[[Any], Any]] = {
            requests.Health: self._health,
            requests.OpenJob: self._open,
            requests.CloseJob: self._close_job,
            requests.Wipe: self._wipe,
        }

    def answer(self, request: Request[Any], tables: Tables) -> tuple[Any, Parts]:
        """Does what a request says, and gives the answer, and the tables that go with it."""
        if (handler := self.handlers.get(type(request))) is not None:
            return handler(request), ()
        job = self._job_of(request)
        check(request, tables, job.shape)
        if (exchange := job.exchanges.get(type(request))) is not None:
            return Done(), exchange(request, tables)
        if (handler := job.handlers.get(type(request))) is not None:
            return handler(request), ()
        raise WorkerError(f"{kind_of(type(request))!r} is a ticket, not an action. Run the same version everywhere.")

    def stream(self, request: Request[Any]) -> Batches:
        """The rows that a request asks for, in pieces."""
        if not isinstance(request, requests.RowRequest):
            raise WorkerError(f"{kind_of(type(request))!r} is not a ticket. Only scans are.")
        job = self._job_of(request)
        check(request, {}, job.shape)
        return job.streams[type(request)](request)

    def leave(self, *, patience_s: float, urgent: threading.Event) -> None:
        """Tells drivers that this worker is to go, and waits until others have all that it holds.

        A driver that is so late with its next look is gone; what this worker holds is in its checkpoint.
        """
        self._leaving = True
        clock = self._parts.scheduler
        while clock.monotonic_s() - self._asked_s < max(self._heartbeats_s.values(), default=0.0) + patience_s:
            with self._lock:
                if all(job.is_idle for job in self._jobs.values()):
                    return
            if urgent.wait(_LEAVE_INTERVAL_S):
                return

    @property
    def is_free(self) -> bool:
        """Whether the worker takes part in no job."""
        return not self._jobs

    def close(self) -> None:
        """Frees everything."""
        for job in self._jobs.values():
            job.close()

    def _health(self, _: requests.Health) -> WorkerHealth:
        self._asked_s = self._parts.scheduler.monotonic_s()
        return WorkerHealth(
            worker=self.worker,
            pid=os.getpid(),
            store=self._stores.kind,
            jobs=frozenset(name for name, job in self._jobs.items() if not job.is_broken),
            leaving=self._leaving,
        )

    def _open(self, request: requests.OpenJob) -> Opened:
        with self._lock:
            if request.job not in self._jobs:
                self._jobs[request.job] = WorkerJob(
                    self.worker, request.job, self._stores, self._credentials, self._parts
                )
            job = self._jobs[request.job]
        answer = job.open(request)
        with self._lock:
            self._heartbeats_s = {**self._heartbeats_s, request.job: request.heartbeat_ms / 1000}
            self._asked_s = self._parts.scheduler.monotonic_s()
        return answer

    def _close_job(self, request: requests.CloseJob) -> Done:
        with self._lock:
            job = self._jobs.get(request.job)
            if job is None:
                return Done()
            job.check_generation(request)
            del self._jobs[request.job]
            self._heartbeats_s = {each: s for each, s in self._heartbeats_s.items() if each in self._jobs}
        job.close()
        self._stores.backend.close_job(request.job)
        if request.goes_on and not self._leaving:
            self.on_dismissed(request.job)
        return Done()

    def _wipe(self, request: requests.Wipe) -> Done:
        with self._lock:
            job = self._jobs.get(request.job)
        if job is not None:
            job.check_generation(request)
            # One that is broken begins with nothing when the job is opened on it again.
            if not job.is_broken:
                raise WorkerError(f"The worker {self.worker} takes part in the job {request.job}; nothing is removed.")
        self._stores.backend.wipe(request.job)
        return Done()

    def _job_of(self, request: Request[Any]) -> WorkerJob:
        job = self._jobs.get(request.job) if isinstance(request, JobRequest) else None
        if job is None:
            raise WorkerError(
                f"The worker {self.worker} does not take part in the job {getattr(request, 'job', '')}: it was "
                "restarted, or the job was closed. Start the query again: it resumes from its checkpoint."
            )
        return job


def check(request: Request[Any], tables: Tables, shape: JobShape) -> None:
    """Raises an error if a request does not fit the job. Changes are checked where they are staged."""
    match request:
        case requests.Assign():
            offers: list[PeerOffer | SharedOffer] = [*request.peers, *request.shared]
            offered = [group for offer in offers for group in offer.groups]
            _check_groups(request, [*request.groups, *offered], shape)
        case requests.HandOver():
            _check_groups(request, request.keep, shape)
        case requests.Read():
            _check_groups(request, request.groups, shape)
            _check_keys(request, tables, shape)
            _check_load(request, tables.get(FURTHER_ROWS), shape)
        case requests.FetchGroups() | requests.FetchDue():
            _check_groups(request, request.groups, shape)
        case requests.FetchKeys():
            _check_keys(request, tables, shape)


def _check_groups(request: Request[Any], groups: Collection[int], shape: JobShape) -> None:
    if groups and not (min(groups) >= 0 and max(groups) < shape.key_groups):
        raise _unfit(request, f"names key groups that do not exist: they go from 0 to {shape.key_groups - 1}")


def _check_keys(request: requests.Read | requests.FetchKeys, tables: Tables, shape: JobShape) -> None:
    keys, spec = tables.get(KEYS), shape.stages.get(request.stage)
    if keys is None or spec is None:
        return  # the job says so itself
    expected = next((layout.keys for layout in spec.layouts.values()), keys.schema)
    if (keys.schema.names, keys.schema.types) != (expected.names, expected.types):
        raise _unfit(request, f"has keys with the columns {keys.schema.names}, not {expected.names} of their types")
    if keys.column(HASH).null_count:
        raise _unfit(request, "has keys without a hash")


def _check_load(request: requests.Read, rows: pa.Table | None, shape: JobShape) -> None:
    if rows is None:
        return
    are_numbers = len(rows.schema) == 2 and all(pa.types.is_integer(kind) for kind in rows.schema.types)
    if not are_numbers or any(column.null_count for column in rows.columns):
        raise _unfit(request, "tells of further rows otherwise than by key group and number")
    if len(rows):
        _check_groups(request, list(pc.min_max(rows.column(0)).as_py().values()), shape)


def _unfit(request: Request[Any], what: str) -> WorkerError:
    return WorkerError(f"The request {kind_of(type(request))!r} {what}. Run the same version of anabranch everywhere.")
