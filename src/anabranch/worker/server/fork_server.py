"""The process that workers are forked from, and those that make snapshots. It has loaded all that they need.

To load it takes a second of a core; a job that rescales because it is short of cores should not have to pay for that.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from anabranch.core.errors import AnabranchError
from anabranch.wire.credentials import Credentials
from anabranch.wire.descriptors import receive, send
from anabranch.worker import compaction
from anabranch.worker.server.process import WorkerOptions, run_worker
from anabranch.worker.stores import STORES, StorePlace

logger = logging.getLogger(__name__)


def serve(control: socket.socket, body: Callable[[dict[str, Any]], None]) -> None:
    """Start a process for every request, until the driver closes its end or is gone.

    ``{"start": options, "environment": variables}``, with files to use as standard input, output and error: fork a
    process that runs the body.
    ``{"bury": pid}``: wait for the end of one. Until then no other process can get its number.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the driver, which knows what is to be done
    gc.freeze()
    while (received := receive(control)) is not None:
        request, files = received
        if "bury" in request:
            with contextlib.suppress(ChildProcessError):  # a child of the fork server before this one
                os.waitpid(request["bury"], 0)
            send(control, {})
            continue
        _load_store(request["start"])
        try:
            pid = os.fork()
        except OSError as error:
            send(control, {"error": error.strerror})
        else:
            if pid == 0:
                control.close()
                os.environ |= request["environment"]
                _be_a_process(files, body, request["start"])
            send(control, {"pid": pid})
        for file in files:
            os.close(file)


def _load_store(options: dict[str, Any]) -> None:
    """Loads what the store of a new worker needs, for this one and for all that follow."""
    if options.get("store") in STORES:
        try:
            STORES[options["store"]].backend(StorePlace())
        except Exception as error:  # the worker that needs it says the same, and this process lives on
            logger.debug("the store %s is not loaded: %s", options["store"], error)


def _be_a_process(files: list[int], body: Callable[[dict[str, Any]], None], options: dict[str, Any]) -> None:
    """Never returns: what the process was forked from is nothing to it."""
    status = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        body(options)
        status = 0
    except AnabranchError as error:
        sys.stderr.write(f"Error: {error}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if "compaction" in options:
        compaction.main(options["compaction"])
    else:
        run_worker(WorkerOptions(**{**options, "credentials": Credentials(**options["credentials"])}))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), _run)
