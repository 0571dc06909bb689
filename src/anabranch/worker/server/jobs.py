"""The jobs that a worker takes part in, and who answers which request. Knows nothing of the network."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from anabranch.core.errors import WorkerError
from anabranch.core.ids import WorkerId
from anabranch.wire import messages
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import Parts
from anabranch.worker.parts import PRODUCTION, WorkerParts
from anabranch.worker.server import admission
from anabranch.worker.server.job import WorkerJob
from anabranch.worker.server.staging import Tables
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.stores.shared import wipe

#: How often a worker that is to go looks whether it may.
_LEAVE_INTERVAL_S = 0.1

Answer = tuple[dict[str, Any], Parts]
Batches = tuple[pa.Schema, Iterator[pa.RecordBatch]]


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
        self._jobs: dict[str, WorkerJob] = {}
        self._leaving = False
        self._asked_s = parts.scheduler.monotonic_s()
        #: How often the driver of each job looks after this worker.
        self._heartbeats_s: dict[str, float] = {}
        #: Called with the id of a job that goes on without this worker.
        self.on_dismissed: Callable[[str], None] = lambda _: None

    def answer(self, request: messages.Request, tables: Tables) -> Answer:
        """Does what a request says, and gives the header and the tables of the answer."""
        match request:
            case messages.Health():
                return self._health(), ()
            case messages.OpenJob():
                return self._open(request), ()
            case messages.CloseJob():
                return self._close_job(request), ()
            case messages.Wipe():
                return self._wipe(request), ()
            case messages.Scan() | messages.FetchGroups() | messages.FetchDue():
                raise WorkerError(f"{request.kind()!r} is a ticket, not an action. Run the same version everywhere.")
            case messages.JobRequest():
                job = self._job(request)
                admission.check(request, tables, job.shape)
                return _answered(job, request, tables)
        raise WorkerError(f"{request.kind()!r} is not something to ask a worker. Run the same version everywhere.")

    def stream(self, request: messages.Request) -> Batches:
        """The rows that a request asks for, in pieces."""
        if not isinstance(request, messages.Scan | messages.FetchGroups | messages.FetchDue):
            raise WorkerError(f"{request.kind()!r} is not a ticket. Only scans are.")
        job = self._job(request)
        admission.check(request, {}, job.shape)
        return job.scan(request)

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

    def _health(self) -> dict[str, Any]:
        self._asked_s = self._parts.scheduler.monotonic_s()
        return {
            "worker": self.worker,
            "pid": os.getpid(),
            "store": self._stores.kind,
            "jobs": sorted(name for name, job in self._jobs.items() if not job.is_broken),
            "leaving": self._leaving,
        }

    def _open(self, request: messages.OpenJob) -> dict[str, Any]:
        admission.check_opening(request)
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

    def _close_job(self, request: messages.CloseJob) -> dict[str, Any]:
        with self._lock:
            job = self._jobs.get(request.job)
            if job is None:
                return {}
            job.check_generation(request)
            del self._jobs[request.job]
            self._heartbeats_s = {each: s for each, s in self._heartbeats_s.items() if each in self._jobs}
        job.close()
        if (folder := self._stores.folder(request.job)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if request.goes_on and not self._leaving:
            self.on_dismissed(request.job)
        return {}

    def _wipe(self, request: messages.Wipe) -> dict[str, Any]:
        with self._lock:
            job = self._jobs.get(request.job)
        if job is not None:
            job.check_generation(request)
            # One that is broken begins with nothing when the job is opened on it again.
            if not job.is_broken:
                raise WorkerError(f"The worker {self.worker} takes part in the job {request.job}; nothing is removed.")
        if self._stores.connection is not None:
            wipe(self._stores.connection, request.job)
        return {}

    def _job(self, request: messages.JobRequest) -> WorkerJob:
        job = self._jobs.get(request.job)
        if job is None:
            raise WorkerError(
                f"The worker {self.worker} does not take part in the job {request.job}: it was restarted, or the job "
                "was closed. Start the query again: it resumes from its checkpoint."
            )
        return job


def _answered(job: WorkerJob, request: messages.JobRequest, tables: Tables) -> Answer:
    """The answer of a job that takes part here."""
    match request:
        case messages.Read():
            return {}, job.read(request, tables)
        case messages.Write():
            return job.write(request, tables), ()
        case messages.FetchKeys():
            return {}, job.fetch_keys(request, tables)
    handlers: dict[type[messages.JobRequest], Callable[[Any], dict[str, Any]]] = {
        messages.Assign: job.assign,
        messages.HandOver: job.hand_over,
        messages.Begin: job.begin,
        messages.LookUpRoute: job.look_up_route,
        messages.Seals: job.seals,
        messages.Prepare: job.prepare,
        messages.Commit: job.commit,
        messages.Abort: job.abort,
        messages.Flush: job.flush,
        messages.Progress: job.progress,
        messages.Complete: job.complete,
        messages.Release: job.release,
        messages.Describe: job.describe,
    }
    return handlers[type(request)](request), ()
