"""The Flight service of a state worker: requests in, answers out, errors as text that says what to do."""

from __future__ import annotations

import hmac
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from anabranch.core.errors import AnabranchError, WorkerError
from anabranch.core.ids import WorkerId
from anabranch.wire import messages
from anabranch.wire.client import encode_error
from anabranch.wire.frames import pack, unpack
from anabranch.worker.job import WorkerJob
from anabranch.worker.staging import Tables

logger = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], Tables]


class StateService(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the state of several jobs."""

    def __init__(self, location: str, *, worker: WorkerId, store: str, directory: Path | None, token: str = "") -> None:
        super().__init__(location)
        self._worker = worker
        self._store = store
        self._directory = directory
        self._token = token
        self._lock = threading.Lock()
        self._jobs: dict[str, WorkerJob] = {}

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
            case messages.Read():
                return {}, self._job(request).read(request, tables)
            case messages.Write():
                return self._job(request).write(request, tables), {}
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
        if not isinstance(request, messages.Scan):
            raise WorkerError(f"{kind!r} is not a ticket. Only scans are.")
        return self._job(request).scan(request)

    def _health(self) -> dict[str, Any]:
        return {"worker": self._worker, "pid": os.getpid(), "store": self._store, "jobs": sorted(self._jobs)}

    def _open(self, request: messages.OpenJob) -> dict[str, Any]:
        with self._lock:
            if request.job not in self._jobs:
                self._jobs[request.job] = WorkerJob(self._worker, request.job, self._store, self._folder(request.job))
            job = self._jobs[request.job]
        return job.open(request)

    def _close(self, request: messages.CloseJob) -> dict[str, Any]:
        with self._lock:
            job = self._jobs.get(request.job)
            if job is None:
                return {}
            job.check_generation(request)
            del self._jobs[request.job]
        job.close()
        if (folder := self._folder(request.job)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return {}

    def _folder(self, job: str) -> Path | None:
        return None if self._directory is None else self._directory / job

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
