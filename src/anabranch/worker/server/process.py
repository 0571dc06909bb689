"""The process of a state worker: starts the service, says that it is ready, and stops when it is told to."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas  # noqa: F401  Arrow loads it for the first array that it makes: let no epoch wait for that

from anabranch.core.errors import SettingsError, WorkerError
from anabranch.core.ids import WorkerId
from anabranch.wire.credentials import Credentials, is_loopback_host
from anabranch.wire.keyring import user_token
from anabranch.worker.server.registration import JOIN_TIMEOUT_S, find_job, join
from anabranch.worker.server.service import StateService
from anabranch.worker.stores import store_kind
from anabranch.worker.stores.options import StoreOptions

logger = logging.getLogger(__name__)

#: A worker that is to go waits for a driver to take its key groups, unless its next look is so late.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is started with."""

    host: str
    #: 0: any free one.
    port: int
    store: str
    redis_url: str = field(repr=False)
    #: Where local state goes; None: a temporary directory.
    state_path: str | None
    #: A token is needed, unless one is found that programs of the same user share.
    credentials: Credentials
    worker_id: str
    #: Stop when standard input ends, that is, when the process that started this one is gone.
    exit_with_parent: bool
    #: The control address of a job to take part in; empty: wait for a driver that knows this worker's address.
    join: str = ""


def run_worker(options: WorkerOptions) -> None:
    """Serve until SIGTERM, SIGINT, or the parent's end. Prints one line of JSON when ready."""
    store_kind(options.store).check_installed()
    _check_port(options.host, options.port)
    stop, urgent = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        # The first one is a wish, the second one an order.
        (urgent if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if options.exit_with_parent:
        threading.Thread(target=_wait_for_end_of_input, args=(stop, urgent), daemon=True).start()
    control, credentials = _job_and_credentials(options, stop)
    with _state_directory(options) as directory:
        service = StateService(
            _address(options.host, options.port),
            worker=WorkerId(options.worker_id),
            stores=StoreOptions(options.store, directory, options.redis_url),
            credentials=credentials,
        )
        service.on_dismissed = lambda job: _on_dismissed(options, service, job, stop)
        ready = {"worker": options.worker_id, "address": f"{options.host}:{service.port}", "pid": os.getpid()}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        logger.info("worker %s serves at %s:%d", options.worker_id, options.host, service.port)
        try:
            if options.join:
                join(control, address=_address(options.host, service.port), credentials=credentials, stop=stop)
            stop.wait()
            logger.info("worker %s stops", options.worker_id)
            service.leave(patience_s=_PATIENCE_S, urgent=urgent)
        finally:
            service.close()


def _on_dismissed(options: WorkerOptions, service: StateService, job: str, stop: threading.Event) -> None:
    """A job goes on without this worker. One that has joined by itself has nothing left to do; others may be named."""
    if options.exit_with_parent:
        return  # who has started it tells it what to do
    address = _address(options.host, service.port)
    then = f"It stays free for others at {address}: name that in anabranch.workerAddresses, or stop it with SIGTERM."
    if options.join and service.is_free:
        then = "It has no other job, and ends."
        stop.set()
    logger.warning("the worker %s has handed over all that it had of the job %s. %s", options.worker_id, job, then)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _job_and_credentials(options: WorkerOptions, stop: threading.Event) -> tuple[str, Credentials]:
    """Where the job is that the worker is to join, if there is one, and the credentials.

    Every worker has a token: the one that it was given, that of the job it is to join, or its user's own.
    """
    control, credentials = options.join, options.credentials
    credentials.check()
    is_near = is_loopback_host(options.host)
    if options.join:
        control, credentials = find_job(options.join, credentials, stop, timeout_s=JOIN_TIMEOUT_S)
    elif is_near and not credentials.token:
        credentials = replace(credentials, token=user_token())
    if not credentials.token:
        raise SettingsError(
            f"A worker that listens on {options.host} can be reached from other machines, so it needs a token. Give "
            "the same one to worker (ANABRANCH_TOKEN) and query (anabranch.token)."
        )
    if not is_near and not credentials.serves_tls:
        logger.warning(
            "worker %s listens on %s without TLS: whoever listens in on the way reads the token and all state; start "
            "it with --tls-certificate and --tls-key",
            options.worker_id,
            options.host,
        )
    return control, credentials


def _check_port(host: str, port: int) -> None:
    """gRPC shares ports between processes without a word, so whether one is free has to be asked first."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise WorkerError(f"Port {port} on {host} is in use. Choose another --port, or 0 for any.") from None
            raise WorkerError(f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --host.") from None


@contextlib.contextmanager
def _state_directory(options: WorkerOptions) -> Iterator[Path | None]:
    """A directory of this worker's own, gone with it: what it holds is a cache of the checkpoint."""
    if not store_kind(options.store).needs_directory:
        yield None
        return
    try:
        if options.state_path:
            Path(options.state_path).mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f"anabranch-{options.worker_id}-", dir=options.state_path or None))
    except OSError as error:
        raise SettingsError(
            f"Local state cannot be kept in {options.state_path}: {error.strerror}. Set anabranch.statePath to a "
            "directory that can be written."
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for_end_of_input(stop: threading.Event, urgent: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.buffer.read(1024):
            pass
    urgent.set()
    stop.set()
