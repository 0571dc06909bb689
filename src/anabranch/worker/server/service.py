"""The Flight service of a state worker: requests in, answers out, errors as text that says what to do."""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import flight

from anabranch.core.errors import AnabranchError, WorkerError
from anabranch.core.ids import WorkerId
from anabranch.wire import messages
from anabranch.wire.client import encode_error
from anabranch.wire.credentials import Credentials
from anabranch.wire.descriptors import LOG_VARIABLE
from anabranch.wire.frames import MAX_HEADER_BYTES, Parts, answers, read_json, unpack
from anabranch.worker.server.job import Batches
from anabranch.worker.server.jobs import WorkerJobs
from anabranch.worker.stores.options import StoreOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Turns away whoever does not know the token, before anything of the call is looked at."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def start_call(self, _info: Any, headers: Mapping[str, list[bytes | str]]) -> None:
        sent = [value.encode() if isinstance(value, str) else value for value in headers.get(messages.TOKEN_HEADER, [])]
        if len(sent) != 1 or not hmac.compare_digest(sent[0], self._token):
            error = WorkerError(
                "The worker asks for another token. Give driver and workers the same anabranch.token, or start both as "
                "the same user of this machine."
            )
            raise flight.FlightUnauthenticatedError(encode_error(error))


class StateService(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the state of several jobs."""

    def __init__(self, address: str, *, worker: WorkerId, stores: StoreOptions, credentials: Credentials) -> None:
        """`address` is where to listen, host:port."""
        super().__init__(
            credentials.location(address, serves=True),
            middleware={"token": _TokenCheck(credentials.token)},
            **credentials.flight_server(),
        )
        self._worker = worker
        self._jobs = WorkerJobs(worker, stores, credentials)

    def leave(self, *, patience_s: float, urgent: threading.Event) -> None:
        """Tells drivers that this worker is to go, and waits until others have all that it holds."""
        self._jobs.leave(patience_s=patience_s, urgent=urgent)

    def do_action(self, _context: Any, action: flight.Action) -> Iterator[flight.Result]:
        header, parts = self._guarded(lambda: self._handle(action.type, action.body))
        return self._guarded_stream(map(flight.Result, answers(header, parts)))

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        schema, batches = self._guarded(lambda: self._scan(ticket.ticket))
        return flight.GeneratorStream(schema, self._guarded_stream(batches))

    def close(self) -> None:
        """Stop serving and free everything."""
        self.shutdown()
        self._jobs.close()

    def _handle(self, kind: str, body: pa.Buffer) -> tuple[dict[str, Any], Parts]:
        document, tables = unpack(body, thorough=True)
        answer, parts = self._jobs.answer(messages.decode(kind, document), tables)
        return messages.encode(answer), parts

    def _scan(self, ticket: bytes) -> Batches:
        if len(ticket) > MAX_HEADER_BYTES:
            raise WorkerError(f"The ticket is larger than {MAX_HEADER_BYTES >> 20} MiB. Ask for less at a time.")
        try:
            document = read_json(ticket)
        except (ValueError, RecursionError):
            raise WorkerError("The ticket cannot be read. Run the same version of anabranch everywhere.") from None
        return self._jobs.stream(messages.decode_ticket(document))

    @property
    def is_free(self) -> bool:
        """Whether the worker takes part in no job."""
        return self._jobs.is_free

    @property
    def on_dismissed(self) -> Callable[[str], None]:
        """Called with the id of a job that goes on without this worker."""
        return self._jobs.on_dismissed

    @on_dismissed.setter
    def on_dismissed(self, call: Callable[[str], None]) -> None:
        self._jobs.on_dismissed = call

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise self._told(error) from None

    def _guarded_stream(self, answer: Iterator[T]) -> Iterator[T]:
        try:
            yield from answer
        except Exception as error:
            raise self._told(error) from None

    def _told(self, error: Exception) -> flight.FlightServerError:
        """The error in the form in which it travels."""
        if not isinstance(error, AnabranchError):
            logger.error("a request failed", exc_info=error)
            log = f"its log, {path}" if (path := os.environ.get(LOG_VARIABLE)) else "its log"
            error = WorkerError(f"The worker {self._worker} failed: {type(error).__name__}: {error}. See {log}.")
        return flight.FlightServerError(encode_error(error))
