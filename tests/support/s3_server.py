"""A real S3 server over HTTP, with buckets in memory, that notes every request and can be made to misbehave."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import WSGIRequestHandler, make_server

#: A WSGI application: it takes the request and a function that begins the answer, and returns the answer's content.
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

ACCESS_KEY = "AKIAANABRANCHTESTS"
SECRET_KEY = "correct-horse-battery-staple"


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: object, **__: object) -> None:
        pass


@dataclass
class S3Server:
    """Answers one request at a time, so that a condition and what depends on it are one step, as they are on S3."""

    port: int = 0
    #: What was asked so far: method, path, and the headers that make it conditional or partial.
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    #: Answers in place of the server, which it may ask.
    meddler: Callable[[dict[str, Any], Any, Application], Iterable[bytes]] | None = None

    def __post_init__(self) -> None:
        self._buckets: Application = DomainDispatcherApplication(create_backend_app)
        self._one_at_a_time = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __call__(self, request: dict[str, Any], begin: Any) -> Iterable[bytes]:
        with self._one_at_a_time:
            conditions = request.get("HTTP_IF_NONE_MATCH"), request.get("HTTP_RANGE")
            self.requests.append((request["REQUEST_METHOD"], request["PATH_INFO"], *conditions))
            if self.meddler is not None:
                return self.meddler(request, begin, self._buckets)
            return self._buckets(request, begin)

    def new_bucket(self) -> str:
        """The URL of a bucket of its own."""
        name = f"bucket-{uuid4().hex}"
        S3FileSystem().call_s3("create_bucket", Bucket=name)
        return f"s3://{name}"


def refusal(begin: Any, status: str, code: str) -> Iterable[bytes]:
    """An error as S3 answers it."""
    begin(status, [("Content-Type", "application/xml")])
    return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """A server that this process and those it starts find by their environment."""
    server = S3Server()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    http = make_server("127.0.0.1", 0, server, threaded=True, request_handler=_Quiet)
    server.port = http.server_port
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(server.endpoint).items():
                patch.setenv(name, value)
            S3FileSystem.clear_instance_cache()
            yield server
    finally:
        S3FileSystem.clear_instance_cache()
        http.shutdown()
        thread.join()
        http.server_close()


def environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_CONFIG_FILE": "/nowhere",
    }
