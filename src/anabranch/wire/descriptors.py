"""Short messages between two processes of this machine, with open files attached."""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

_MESSAGE_BYTES_MAX = 1 << 16
_FILES_MAX = 3

#: In the environment of a worker that a query has started: the file that it logs into.
LOG_VARIABLE = "_ANABRANCH_LOG"


def send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message. The other end gets copies of the open files: close them here if they are not needed."""
    content = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(connection, [content], list(files))
    connection.sendall(content[sent:])


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the files that came with it; None: the other end is closed.

    One message at a time: the next one is sent only after an answer to this one.
    """
    received, files = b"", array.array("i")
    while not received.endswith(b"\n"):
        part, attached, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, _FILES_MAX)
        if not part:
            return None
        received += part
        files.extend(attached)
    return json.loads(received), list(files)
