"""What a task does to the Python process that Spark runs it in, so that Spark's fixed cost per task stays small."""

from __future__ import annotations

import gc
import os
import socket
import stat
from functools import cache
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")
#: Rows are many objects and no cycles: looking for cycles among every 700 new ones, Python's default, finds nothing.
_GC_THRESHOLDS = (50_000, 20, 20)


def tune() -> None:
    """Makes the process cheap for Spark; called at the start of a task, before its first row is asked for."""
    _spare_the_collector()
    _acknowledge_at_once()


@cache
def _spare_the_collector() -> None:
    """Exempts what the process's imports made from garbage collection, once.

    Spark collects garbage after every task of a Python process. Looking through the objects of PySpark, pandas and
    Arrow takes some 40 ms each time, longer than a task of a small epoch.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _acknowledge_at_once() -> None:
    """Acknowledges what Spark has sent so far without delay.

    Spark's JVM sends a task's function and its rows in two writes. Over TCP, the second one waits until the first has
    been acknowledged, and a receiver with nothing to say acknowledges after 40 ms.
    """
    for descriptor in _tcp_connections():
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        except OSError:
            continue  # it is no longer open, or no longer a TCP connection


@cache
def _tcp_connections() -> tuple[int, ...]:
    """Returns the TCP connections that the process has before its first task: to Spark's JVM. None outside Linux."""
    if not hasattr(socket, "TCP_QUICKACK") or not _OPEN_FILES.is_dir():
        return ()
    return tuple(
        descriptor for descriptor in (int(entry.name) for entry in _OPEN_FILES.iterdir()) if _is_tcp(descriptor)
    )


def _is_tcp(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    except OSError:
        return False
