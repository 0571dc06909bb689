"""A plain HTTP client for tests: everything about a request can be said, also what no client would say."""

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The sentence of a refusal, which must be all that there is."""
        document = self.json
        assert list(document) == ["error"]
        assert document["error"].endswith((".", "?"))
        return str(document["error"])


def ask(
    url: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, raw: bytes = b""
) -> Answer:
    """Ask once, over a connection of its own; `body` is sent as JSON, `raw` as it is."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        data = raw if body is None else json.dumps(body).encode()
        connection.request(method, path, data or None, {**(headers or {})})
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def send_bytes(port: int, data: bytes) -> bytes:
    """What the server answers to bytes that need not be HTTP."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(data)
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    return answer
