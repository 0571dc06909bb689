"""The HTTP API of a job: a server in a thread of the driver, which leaves the driver's signals and logging alone."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from anabranch.control.http.access import Access, ip_address, is_loopback
from anabranch.control.http.app import ControlApp
from anabranch.control.http.endpoints import JobControl
from anabranch.core.errors import SettingsError
from anabranch.wire.credentials import Credentials
from anabranch.wire.keyring import Entry, announce

__all__ = ["ControlServer", "JobControl"]

logger = logging.getLogger(__name__)

_BACKLOG = 128
#: Connections at a time; more are turned away.
_CONNECTIONS_MAX = 128
_START_TIMEOUT_S = 10.0
#: How long clients that do not take their answers hold up the end of the server.
_CLOSE_TIMEOUT_S = 1
#: Well above what closing takes, so that a driver never waits for it forever.
_JOIN_TIMEOUT_S = 10.0


class ControlServer:
    """Serves the API from the moment it is made until `close`."""

    def __init__(
        self, control: JobControl, *, host: str, port: int, credentials: Credentials, strict_port: bool
    ) -> None:
        context = credentials.server_context() if credentials.serves_tls else None
        self._socket = _listen(host, port, credentials=credentials, strict_port=strict_port)
        self.port = int(self._socket.getsockname()[1])
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{_shown_host(host)}:{self.port}"
        if port not in (0, self.port):
            logger.warning("port %d on %s is in use; the HTTP API of the job is at %s instead", port, host, self.url)
        self._server = _Server(ControlApp(control, Access(token=credentials.token, host=host)), context)
        # Before anybody is answered: whoever finds the API finds the token as well, if it is theirs.
        self._announced = announce(Entry(scheme, str(self._socket.getsockname()[0]), self.port, credentials))
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="anabranch-http", daemon=True)
        self._thread.start()
        if not self._server.has_begun.wait(_START_TIMEOUT_S) or not self._server.started:
            self.close()
            raise SettingsError(f"The HTTP API could not be started at {self.url}. The log of the driver says why.")

    def close(self) -> None:
        """Stop answering. Requests that are under way are refused; what they asked for may still happen."""
        self._announced.remove()
        self._server.should_exit = True
        if threading.current_thread() is self._thread:
            return
        with self._closing:
            self._thread.join(_JOIN_TIMEOUT_S)
            self._socket.close()
        if self._thread.is_alive():
            logger.warning("the HTTP API at %s does not end", self.url)

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            logger.exception("the HTTP API at %s has ended", self.url)
        finally:
            self._server.has_begun.set()


class _Config(uvicorn.Config):
    #: With which TLS is spoken, if it is.
    context: ssl.SSLContext | None = None

    def load(self) -> None:
        super().load()
        self.ssl = self.context

    def configure_logging(self) -> None:
        """Handlers, levels and level names are the driver's."""


class _Server(uvicorn.Server):
    """Says when it has begun, and lets go of requests that are under way when it ends."""

    def __init__(self, app: ControlApp, context: ssl.SSLContext | None) -> None:
        config = _Config(
            app.asgi,
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            # Otherwise a header, or a variable of the environment, would decide who is on this machine.
            proxy_headers=False,
            server_header=False,
            workers=1,
            backlog=_BACKLOG,
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
        config.context = context
        super().__init__(config)
        self._control_app = app
        self.has_begun = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.has_begun.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._control_app.abandon()
        await super().shutdown(sockets=sockets)


class _Protocol(H11Protocol):
    """HTTP as uvicorn speaks it, but no request is logged, and what is no HTTP gets JSON too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # uvicorn decides by the handlers of its logger, which are the driver's.
        self.access_log = False

    def send_400_response(self, msg: str) -> None:
        body = (
            b'{"error": "This is not an HTTP request that can be read. Send HTTP/1.1, and less than 64 KiB of it."}\n'
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events: list[Any] = [h11.Response(status_code=400, headers=headers, reason=msg.encode())]
        for event in [*events, h11.Data(data=body), h11.EndOfMessage()]:
            self.transport.write(self.conn.send(event))
        self.transport.close()


def _listen(host: str, port: int, *, credentials: Credentials, strict_port: bool) -> socket.socket:
    """A socket that listens: from here on nobody else gets the port."""
    if not 0 <= port <= 65535:
        raise SettingsError(f"Port {port} does not exist. Set anabranch.controlPort to 1 to 65535, or 0 for any.")
    family, address = _resolve(host)
    if not is_loopback(address) and not credentials.serves_tls:
        logger.warning(
            "the HTTP API on %s is reached from other machines without TLS: whoever listens in on the way reads the "
            "token, and can then change and stop the job; set anabranch.tlsCertificate and anabranch.tlsKey",
            host,
        )
    if not credentials.token.strip() and not is_loopback(address):
        raise SettingsError(
            f"The HTTP API on {host} can be reached from other machines, so it needs a token: set anabranch.token. Or "
            "set anabranch.controlHost to 127.0.0.1."
        )
    try:
        return _bind(family, address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise SettingsError(
                f"The HTTP API cannot listen on {host}:{port}: {error.strerror}. Set anabranch.controlHost or "
                "anabranch.controlPort to others."
            ) from None
    if strict_port:
        raise SettingsError(
            f"Port {port} on {host} is in use. Stop what uses it, or set anabranch.controlPort, the port of the HTTP "
            "API, to another one, or 0 for any that is free."
        )
    return _bind(family, address, 0)


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        # Not before it listens is a port taken.
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """The address to listen on; of several, an IPv4 one, as workers have."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        found = []
    if not found:
        raise SettingsError(f"{host!r} is not an address of this machine. Set anabranch.controlHost to 127.0.0.1.")
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(address[0])


def _shown_host(host: str) -> str:
    address = ip_address(host)
    if address is not None and address.is_unspecified:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
