"""How a worker that was started by itself joins a running job: it tells the job's HTTP API where it can be reached."""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass, replace

from anabranch.core.errors import LostWorkerError, SettingsError, WorkerError
from anabranch.wire import keyring
from anabranch.wire.credentials import Credentials, is_loopback_host, reason_of

logger = logging.getLogger(__name__)

#: How long a job is waited for that does not answer: a driver may start later than its workers.
JOIN_TIMEOUT_S = 60.0
#: Letting a worker in takes the job a few calls.
_ANSWER_TIMEOUT_S = 30.0
_FIRST_PAUSE_S = 0.2
_PAUSE_S_MAX = 3.0
_ANSWER_BYTES_MAX = 1024 * 1024
#: The job cannot do it at present: nobody has to change anything.
_MAY_PASS = frozenset({408, 409, 429, 500, 502, 503, 504})


def join(
    control: str,
    *,
    address: str,
    credentials: Credentials,
    timeout_s: float = JOIN_TIMEOUT_S,
    stop: threading.Event | None = None,
) -> None:
    """Let the job whose HTTP API is at `control` (host:port or URL) know of the worker that listens on `address`.

    The worker must be serving already: the job asks it who it is. Tries again while there is hope, for `timeout_s` at
    most, or until `stop` is set.
    """
    place = _Place.parse(control, credentials)
    stop = stop or threading.Event()
    deadline_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not stop.is_set():
        left_s = deadline_s - time.monotonic()
        try:
            announced = reachable_address(address, place.host, place.port)
            reason = _ask(place, announced, credentials, timeout_s=min(max(left_s, 1.0), _ANSWER_TIMEOUT_S))
        except ssl.SSLError as error:
            raise SettingsError(
                f"The job at {control} cannot be joined by TLS: {reason_of(error)}. Name who has signed its "
                "certificate with --tls-authority, and show one of your own with --tls-certificate and --tls-key if it "
                "asks for it."
            ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = _in_words(error)
            if place.is_encrypted and isinstance(error, ConnectionResetError | BrokenPipeError):
                reason += "; if it asks for certificates, show one with --tls-certificate and --tls-key"
        if reason is None:
            logger.info("the job at %s knows this worker as %s", control, announced)
            return
        if left_s - pause_s <= 0:
            raise LostWorkerError(
                f"The job at {control} could not be joined within {timeout_s:g} s: {reason.rstrip('.')}. See whether "
                "it runs and whether --join names its HTTP API, then start the worker again."
            )
        logger.info("the job at %s cannot be joined yet: %s", control, reason)
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def find_job(control: str, given: Credentials, stop: threading.Event, *, timeout_s: float) -> tuple[str, Credentials]:
    """Where to join a job, and with what: as it was given, or with the token of a job of the same user on this machine.

    The token of such a job goes to the address that the job has taken, whoever else goes by the name of this machine.
    Waits for a job that is not there yet. One that answers without having left its token is somebody else's.
    """
    place, pause_s = _Place.parse(control, given), _FIRST_PAUSE_S
    if given.token:
        entry = keyring.find(control)
        is_same = entry is not None and entry.credentials.token == given.token
        return place.of_job(control, entry) if is_same and entry is not None else control, given
    deadline_s = time.monotonic() + timeout_s
    while is_loopback_host(place.host) or keyring.is_own_name(place.host):
        is_there = _answers(place)
        if (entry := keyring.find(control)) is not None:
            found = replace(given if given.uses_tls else entry.credentials, token=entry.credentials.token)
            return place.of_job(control, entry), found
        if is_there or stop.is_set() or time.monotonic() > deadline_s:
            break
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)
    raise SettingsError(
        f"No job of this user on this machine answers at {control}, so the worker needs the token of the job: set "
        "ANABRANCH_TOKEN to it (query.token, or `anabranch token` where the job runs)."
    )


def _answers(place: _Place) -> bool:
    try:
        socket.create_connection((place.host, place.port), timeout=_FIRST_PAUSE_S).close()
    except OSError:
        return False
    return True


def reachable_address(address: str, control_host: str, control_port: int) -> str:
    """Where the job reaches a worker that listens on `address`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        listens_on = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return address
    if not listens_on.is_unspecified and not listens_on.is_loopback:
        return address
    family = socket.AF_INET6 if listens_on.version == 6 else socket.AF_INET
    if listens_on.is_unspecified and listens_on.version == 6:
        # Such a listener takes IPv4 too.
        family = socket.AF_UNSPEC
    own, theirs = _way_to(control_host, control_port, family)
    if listens_on.is_unspecified:
        return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
    if own != theirs and not ipaddress.ip_address(theirs).is_loopback:
        raise SettingsError(
            f"A worker that listens on {host} cannot be reached by the job at {control_host}. Start it with --host set "
            "to an address of this machine, or to 0.0.0.0, and with the token of the job."
        )
    return address


def _way_to(host: str, port: int, family: socket.AddressFamily) -> tuple[str, str]:
    """This machine's own address on the way to a host, and the host's. Nothing is sent."""
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_DGRAM)
    kind, _, _, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0]), str(target[0])


@dataclass(frozen=True)
class _Place:
    """Where the HTTP API is."""

    host: str
    port: int
    is_encrypted: bool

    @staticmethod
    def parse(control: str, credentials: Credentials) -> _Place:
        """Without a scheme, it is the one that a job with the same credentials has."""
        # A token may be in it.
        shown = "What --join names" if any(mark in control for mark in "?#@") else repr(control)
        advice = f"{shown} is not the address of a job. Write --join HOST:PORT, such as localhost:9008."
        default = "https" if credentials.serves_tls else "http"
        try:
            parts = urllib.parse.urlsplit(control if "://" in control else f"{default}://{control}")
            port = parts.port
        except ValueError:
            raise SettingsError(advice) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise SettingsError(advice)
        if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
            raise SettingsError(advice)
        return _Place(parts.hostname, port, parts.scheme == "https")

    def of_job(self, control: str, entry: keyring.Entry) -> str:
        """Where a job of this machine is: `control`, or the address that the job has taken, if that is sure to do."""
        is_known = is_loopback_host(self.host) or not entry.listens_everywhere
        return entry.url if is_known and entry.scheme == "http" else control

    def connect(self, credentials: Credentials, timeout_s: float) -> http.client.HTTPConnection:
        if not self.is_encrypted:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        context = credentials.client_context()
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)


def _ask(place: _Place, address: str, credentials: Credentials, *, timeout_s: float) -> str | None:
    """Ask the job once to let the worker in. None if it does, a reason if it may later; raises if it never will."""
    headers = {"content-type": "application/json"}
    if credentials.token:
        # Headers are sent as Latin-1, whatever the token is made of.
        headers["authorization"] = f"Bearer {credentials.token.strip()}".encode().decode("latin-1")
    connection = place.connect(credentials, timeout_s)
    try:
        connection.request("POST", "/workers", json.dumps({"address": address}), headers)
        response = connection.getresponse()
        status, sentence = response.status, _sentence(response.read(_ANSWER_BYTES_MAX))
    finally:
        connection.close()
    if status in (200, 201, 202):
        return None
    if status in _MAY_PASS:
        return sentence or f"it answered with {status}"
    if status == 401:
        raise SettingsError(
            f"The job refuses this worker: {sentence} Start the worker with --token or ANABRANCH_TOKEN."
        )
    if sentence:
        raise WorkerError(f"The job refuses the worker at {address}: {sentence}")
    raise WorkerError(
        f"What answers at {place.host}:{place.port} is not a job: it answered with {status}. Name the HTTP API of the "
        "job with --join."
    )


def _sentence(body: bytes) -> str:
    """The error in an answer of the API; nothing if it is something else."""
    try:
        document = json.loads(body)
    except ValueError:
        return ""
    return str(document.get("error", "")) if isinstance(document, dict) else ""


def _in_words(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, socket.gaierror):
        return "its host is not known"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "what answers there does not speak HTTP"
