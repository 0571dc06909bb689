"""A connection to one state worker: typed requests out, typed answers or errors back, within a time limit."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

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
from anabranch.core.requests import Exchange, Request, RowRequest
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import Tables, joined, pack
from anabranch.wire.messages import TOKEN_HEADER, decode_answer, encode, encode_ticket, kind_of

A = TypeVar("A")

#: Connections that nobody has asked for in so long are closed.
_IDLE_S = 300.0
#: Of an error on its way. It travels in headers, as it is and once more in base64, and gRPC takes 8 KiB of these.
_ERROR_BYTES_MAX = 3000
#: What a call fails with: a status that Flight has no class for is an OSError.
_FAILURES = (flight.FlightError, pa.ArrowException, OSError)
#: The kinds of error that travel from a worker to the application as what they are.
_ERROR_KINDS: dict[str, type[AnabranchError]] = {
    kind.__name__: kind for kind in (WorkerError, FencedError, CheckpointError, EpochError)
}


NO_CREDENTIALS = Credentials()
#: How gRPC tells why a handshake failed.
_HANDSHAKE_FAILED = re.compile(
    r"Peer name \S+ is not in peer certificate|Ssl handshake failed.*?(?:verify failed: (?P<reason>[\w ,-]+)|[\w ]+$)",
    re.MULTILINE,
)


class WorkerClient:
    """Talks to the worker at `address` ("host:port"). Belongs to the process that made it."""

    def __init__(self, address: str, *, timeout_s: float, credentials: Credentials = NO_CREDENTIALS) -> None:
        self.address = address
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._flight = self._connect()

    def _connect(self) -> flight.FlightClient:
        return flight.FlightClient(self._credentials.location(self.address), **self._credentials.flight_client())

    def _options(self, timeout_s: float) -> flight.FlightCallOptions:
        headers = [(TOKEN_HEADER.encode(), self._credentials.token.encode())]
        return flight.FlightCallOptions(timeout=timeout_s, headers=headers)

    def call(self, request: Request[A], *, timeout_s: float | None = None) -> A:
        """Send a request and return the answer."""
        document, _ = self._ask(request, None, self._timeout_s if timeout_s is None else timeout_s)
        return decode_answer(request, document)

    def exchange(self, request: Exchange, tables: Mapping[str, pa.Table]) -> Tables:
        """Send a request with tables and return the tables of the answer."""
        return self._ask(request, tables, self._timeout_s)[1]

    def stream(self, request: RowRequest) -> Iterator[pa.RecordBatch]:
        """Send a request as a ticket and yield the record batches of the answer."""
        ticket = flight.Ticket(encode_ticket(request))
        try:
            for chunk in self._flight.do_get(ticket, self._options(self._timeout_s)):
                yield chunk.data
        except _FAILURES as error:
            raise self._translate(error, request, self._timeout_s) from None

    def _ask(
        self, request: Request[Any], tables: Mapping[str, pa.Table] | None, timeout_s: float
    ) -> tuple[dict[str, Any], Tables]:
        action = flight.Action(kind_of(type(request)), pack(encode(request), tables))
        try:
            answer = [result.body for result in self._flight.do_action(action, self._options(timeout_s))]
        except _FAILURES as error:
            raise self._translate(error, request, timeout_s) from None
        return joined(answer)

    def close(self) -> None:
        self._flight.close()

    def _translate(self, error: Exception, request: Request[Any], limit_s: float) -> AnabranchError:
        text, kind = str(error), kind_of(type(request))
        if (payload := _error_payload(text)) is not None:
            return _ERROR_KINDS.get(payload["kind"], WorkerError)(payload["message"])
        if isinstance(error, flight.FlightTimedOutError):
            return LostWorkerError(
                f"The state worker at {self.address} did not answer {kind!r} within {limit_s:g} s. "
                "See whether it is overloaded or stopped, or raise anabranch.requestTimeout."
            )
        # Nobody cancels a call here: it was cut off by the worker's end.
        if isinstance(error, flight.FlightUnavailableError | flight.FlightCancelledError):
            # A channel that has failed to connect refuses calls for up to two minutes without trying; by then another
            # worker may have the address. Calls that others make on the old channel end by themselves.
            self._flight = self._connect()
            why = _tls_failure(text, self._credentials)
            return LostWorkerError(
                f"The state worker at {self.address} cannot be reached{why}. See whether its process runs and whether "
                "the address is right. A running query goes on without it; one that has ended resumes from its "
                "checkpoint."
            )
        first_line = text.splitlines()[0] if text else type(error).__name__
        return WorkerError(f"The state worker at {self.address} failed on {kind!r}: {first_line}")


def _tls_failure(text: str, credentials: Credentials) -> str:
    """What to do about a connection that failed because of TLS; nothing if it failed otherwise."""
    if found := _HANDSHAKE_FAILED.search(text):
        if "wrong version number" in found[0]:
            return ": it does not speak TLS. Start it with --tls-certificate and --tls-key"
        return (
            f" by TLS: {found['reason'] or found[0]}. Give the worker a certificate (--tls-certificate) that names "
            "this address and is valid, and name who has signed it with anabranch.tlsAuthority"
        )
    if "failed to connect" in text and "Socket closed" in text:
        if credentials.uses_tls:
            return (
                ": it broke off the TLS handshake. If it asks for certificates (--tls-authority), set "
                "anabranch.tlsCertificate and anabranch.tlsKey to what that authority has signed"
            )
        return ": it broke off the connection. If it speaks TLS, set anabranch.tlsAuthority"
    if "empty address list" in text and credentials.uses_tls:
        return ": the files of TLS cannot be used. See anabranch.tlsCertificate, anabranch.tlsKey and tlsAuthority"
    return ""


def encode_error(error: AnabranchError) -> str:
    """The form in which a worker's error travels. Of a long one, the middle is left out."""
    text = whole = str(error)
    kept = len(whole) // 2
    while len(payload := json.dumps({"kind": type(error).__name__, "message": text})) > _ERROR_BYTES_MAX:
        kept //= 2
        text = f"{whole[:kept]} … {whole[-kept:]}"
    return f"anabranch:{payload}:anabranch"


def _error_payload(text: str) -> dict[str, str] | None:
    start, end = text.find("anabranch:{"), text.find("}:anabranch")
    if start < 0 or end < start:
        return None
    try:
        payload: dict[str, str] = json.loads(text[start + len("anabranch:") : end + 1])
    except ValueError:
        return None
    return payload


#: Whom a client talks to, and how: address, credentials, and seconds to wait for an answer.
_Place = tuple[str, Credentials, float]


class Connections:
    """The clients of this process, one for each worker, reused across epochs.

    Spark forks and reuses Python task processes, and a gRPC channel must not be used across a fork: a forked child
    starts with connections of its own.
    """

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        #: Held while these change; not while connections are closed, which takes a while.
        self._lock = threading.Lock()
        self._clients: dict[_Place, WorkerClient] = {}
        #: By client: when it was asked for last.
        self._used_s: dict[_Place, float] = {}

    def get(self, address: str, *, timeout_s: float, credentials: Credentials = NO_CREDENTIALS) -> WorkerClient:
        if self._owner_pid != os.getpid():
            self._owner_pid = os.getpid()
            self._lock, self._clients, self._used_s = threading.Lock(), {}, {}
        place = (address, credentials, timeout_s)
        with self._lock:
            self._used_s[place] = time.monotonic()
            idle = self._take_idle()
            if place not in self._clients:
                self._clients[place] = WorkerClient(address, timeout_s=timeout_s, credentials=credentials)
            client = self._clients[place]
        for each in idle:
            each.close()
        return client

    def _take_idle(self) -> list[WorkerClient]:
        """Let go of workers that no route names any more: nobody has asked for them for a long time."""
        now_s = time.monotonic()
        # A call that still runs has ended by then.
        idle = [place for place, used_s in self._used_s.items() if now_s - used_s > max(_IDLE_S, 2 * place[-1])]
        for place in idle:
            del self._used_s[place]
        return [self._clients.pop(place) for place in idle if place in self._clients]

    def forget(self, address: str) -> None:
        """Close the connections to a worker that is known to be gone."""
        with self._lock:
            gone = [self._clients.pop(place) for place in list(self._clients) if place[0] == address]
            self._used_s = {place: used_s for place, used_s in self._used_s.items() if place[0] != address}
        for client in gone:
            client.close()


#: Shared by all tasks that run in this process.
connections = Connections()
