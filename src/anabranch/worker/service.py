"""The Flight service of a state worker: requests in, answers out, errors as text that says what to do."""

from __future__ import annotations

import hmac
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight

from anabranch.core.errors import AnabranchError, WorkerError
from anabranch.core.ids import WorkerId
from anabranch.wire import messages
from anabranch.wire.client import encode_error
from anabranch.wire.frames import pack, unpack
from anabranch.worker.job import WorkerJob
from anabranch.worker.shared import wipe
from anabranch.worker.staging import Tables
from anabranch.worker.storeoptions import StoreOptions

logger = logging.getLogger(__name__)

#: How often a worker that is to go looks whether it may.
_LEAVE_INTERVAL_S = 0.1

Answer = tuple[dict[str, Any], Tables]


class StateService(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the state of several jobs."""

    def __init__(self, location: str, *, worker: WorkerId, stores: StoreOptions, token: str = "") -> None:
        super().__init__(location)
        self._worker = worker
        self._stores = stores
        self._token = token
        self._lock = threading.Lock()
        self._jobs: dict[str, WorkerJob] = {}
        self._leaving = False
        self._asked_s = time.monotonic()
        #: How often the driver of each job looks after this worker.
        self._heartbeats_s: dict[str, float] = {}

    def leave(self, *, patience_s: float, urgent: threading.Event) -> None:
        """Tell drivers that this worker is to go, and wait until others have all that it holds.

        A driver that is so late with its next look is gone; what this worker holds is in its checkpoint.
        """
        self._leaving = True
        while time.monotonic() - self._asked_s < max(self._heartbeats_s.values(), default=0.0) + patience_s:
            with self._lock:
                if all(job.is_idle for job in self._jobs.values()):
                    return
            if urgent.wait(_LEAVE_INTERVAL_S):
                return

    def do_action(self, _context: Any, action: flight.Action) -> Iterator[flight.Result]:
        header, tables = self._guarded(lambda: self._handle(action.type, action.body))
        return iter([flight.Result(pack(header, tables))])

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        schema, batches = self._guarded(lambda: self._scan(ticket.ticket))
        return flight.GeneratorStream(schema, self._guarded_batches(batches))

    def close(self) -> None:
        """Stop serving and free everything."""
        self.shutdown()
        for job in self._jobs.values():
            job.close()

    def _handle(self, kind: str, body: pa.Buffer) -> Answer:
        header, tables = unpack(body)
        request = messages.decode(kind, header)
        self._authorise(request)
        match request:
            case messages.Health():
                return self._health(), {}
            case messages.OpenJob():
                return self._open(request), {}
            case messages.CloseJob():
                return self._close(request), {}
            case messages.Wipe():
                return self._wipe(request), {}
            case messages.Read():
                return {}, self._job(request).read(request, tables)
            case messages.Write():
                return self._job(request).write(request, tables), {}
            case messages.FetchKeys():
                return {}, self._job(request).fetch_keys(request, tables)
            case messages.JobRequest():
                handler: Callable[[Any], dict[str, Any]] = getattr(self._job(request), kind)
                return handler(request), {}
        raise WorkerError(f"{kind!r} is not something to ask a worker. Run the same version everywhere.")

    def _scan(self, ticket: bytes) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        try:
            document = json.loads(ticket)
            kind = document.pop("kind")
        except (ValueError, KeyError, AttributeError):
            raise WorkerError("The ticket cannot be read. Run the same version of anabranch everywhere.") from None
        request = messages.decode(kind, document)
        self._authorise(request)
        if not isinstance(request, messages.Scan | messages.FetchGroups | messages.FetchDue):
            raise WorkerError(f"{kind!r} is not a ticket. Only scans are.")
        return self._job(request).scan(request)

    def _health(self) -> dict[str, Any]:
        self._asked_s = time.monotonic()
        return {
            "worker": self._worker,
            "pid": os.getpid(),
            "store": self._stores.kind,
            "jobs": sorted(self._jobs),
            "leaving": self._leaving,
        }

    def _open(self, request: messages.OpenJob) -> dict[str, Any]:
        with self._lock:
            if request.job not in self._jobs:
                self._jobs[request.job] = WorkerJob(self._worker, request.job, self._stores, self._token)
            job = self._jobs[request.job]
        answer = job.open(request)
        with self._lock:
            self._heartbeats_s = {**self._heartbeats_s, request.job: request.heartbeat_ms / 1000}
            self._asked_s = time.monotonic()
        return answer

    def _close(self, request: messages.CloseJob) -> dict[str, Any]:
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
        return {}

    def _wipe(self, request: messages.Wipe) -> dict[str, Any]:
        with self._lock:
            if request.job in self._jobs:
                raise WorkerError(f"The worker {self._worker} takes part in the job {request.job}; nothing is removed.")
        if self._stores.connection is not None:
            wipe(self._stores.connection, request.job)
        return {}

    def _job(self, request: messages.JobRequest) -> WorkerJob:
        job = self._jobs.get(request.job)
        if job is None:
            raise WorkerError(
                f"The worker {self._worker} does not take part in the job {request.job}: it was restarted, or the job "
                "was closed. Start the query again: it resumes from its checkpoint."
            )
        return job

    def _authorise(self, request: messages.Request) -> None:
        if self._token and not hmac.compare_digest(self._token.encode(), request.token.encode()):
            raise WorkerError("The worker asks for another token. Give driver and workers the same anabranch.token.")

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except AnabranchError as error:
            raise flight.FlightServerError(encode_error(error)) from None
        except Exception as error:
            logger.exception("a request failed")
            wrapped = WorkerError(f"The worker {self._worker} failed: {type(error).__name__}: {error}. See its log.")
            raise flight.FlightServerError(encode_error(wrapped)) from None

    def _guarded_batches(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except AnabranchError as error:
            raise flight.FlightServerError(encode_error(error)) from None
