"""A connection to one state worker: typed requests out, typed answers or errors back, within a time limit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import flight

from anabranch.core.errors import (
    AnabranchError,
    CheckpointError,
    EpochError,
    FencedError,
    LostWorkerError,
    WorkerError,
)
from anabranch.wire.frames import pack, unpack
from anabranch.wire.messages import Request

#: The kinds of error that travel from a worker to the application as what they are.
_ERROR_KINDS: dict[str, type[AnabranchError]] = {
    kind.__name__: kind for kind in (WorkerError, FencedError, CheckpointError, EpochError)
}


class WorkerClient:
    """Talks to the worker at `address` ("host:port"). Belongs to the process that made it."""

    def __init__(self, address: str, *, timeout_s: float, token: str = "") -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s
        self._flight = self._connect()

    def _connect(self) -> flight.FlightClient:
        return flight.FlightClient(f"grpc://{self.address}")

    def call(
        self,
        request: Request,
        tables: Mapping[str, pa.Table] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, pa.Table]]:
        """Send a request and return the answer's header and tables."""
        action = flight.Action(request.kind(), pack(self._header(request), tables))
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            results = list(self._flight.do_action(action, flight.FlightCallOptions(timeout=limit_s)))
        except (flight.FlightError, pa.ArrowException) as error:
            raise self._translate(error, request, limit_s) from None
        return unpack(results[0].body)

    def stream(self, request: Request) -> Iterator[pa.RecordBatch]:
        """Send a request as a ticket and yield the record batches of the answer."""
        ticket = flight.Ticket(json.dumps({"kind": request.kind(), **self._header(request)}).encode())
        try:
            for chunk in self._flight.do_get(ticket, flight.FlightCallOptions(timeout=self._timeout_s)):
                yield chunk.data
        except (flight.FlightError, pa.ArrowException) as error:
            raise self._translate(error, request, self._timeout_s) from None

    def close(self) -> None:
        self._flight.close()

    def _header(self, request: Request) -> dict[str, Any]:
        return {**request.header(), "token": self._token}

    def _translate(self, error: Exception, request: Request, limit_s: float) -> AnabranchError:
        text = str(error)
        if (payload := _error_payload(text)) is not None:
            return _ERROR_KINDS.get(payload["kind"], WorkerError)(payload["message"])
        if isinstance(error, flight.FlightTimedOutError):
            return LostWorkerError(
                f"The state worker at {self.address} did not answer {request.kind()!r} within {limit_s:g} s. "
                "See whether it is overloaded or stopped, or raise anabranch.requestTimeout."
            )
        # Nobody cancels a call here: it was cut off by the worker's end.
        if isinstance(error, flight.FlightUnavailableError | flight.FlightCancelledError):
            # A channel that has failed to connect refuses calls for up to two minutes without trying; by then another
            # worker may have the address. Calls that others make on the old channel end by themselves.
            self._flight = self._connect()
            return LostWorkerError(
                f"The state worker at {self.address} cannot be reached. See whether its process runs and whether the "
                "address is right. A running query goes on without it; one that has ended resumes from its checkpoint."
            )
        first_line = text.splitlines()[0] if text else type(error).__name__
        return WorkerError(f"The state worker at {self.address} failed on {request.kind()!r}: {first_line}")


def encode_error(error: AnabranchError) -> str:
    """The form in which a worker's error travels."""
    return "anabranch:" + json.dumps({"kind": type(error).__name__, "message": str(error)}) + ":anabranch"


def _error_payload(text: str) -> dict[str, str] | None:
    start, end = text.find("anabranch:{"), text.find("}:anabranch")
    if start < 0 or end < start:
        return None
    try:
        payload: dict[str, str] = json.loads(text[start + len("anabranch:") : end + 1])
    except ValueError:
        return None
    return payload


class Connections:
    """The clients of this process, one for each worker, reused across epochs.

    Spark forks and reuses Python task processes, and a gRPC channel must not be used across a fork: a forked child
    starts with connections of its own.
    """

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._clients: dict[tuple[str, str, float], WorkerClient] = {}

    def get(self, address: str, *, timeout_s: float, token: str = "") -> WorkerClient:
        if self._owner_pid != os.getpid():
            self._owner_pid = os.getpid()
            self._clients = {}
        key = (address, token, timeout_s)
        if key not in self._clients:
            self._clients[key] = WorkerClient(address, timeout_s=timeout_s, token=token)
        return self._clients[key]

    def forget(self, address: str) -> None:
        for key in [key for key in self._clients if key[0] == address]:
            self._clients.pop(key).close()


#: Shared by all tasks that run in this process.
connections = Connections()
