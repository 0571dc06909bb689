"""Stands for the connection to a state worker: answers as a worker would, remembers everything, fails when told to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from anabranch.control.members import Member, Membership
from anabranch.core.ids import WorkerId
from anabranch.wire import messages


class StandIn:
    """A worker that has sealed every task that it is asked about."""

    def __init__(self, name: str, sealed: list[list[int]] | None = None) -> None:
        self.name = name
        self.address = f"{name}:1"
        self.sealed = sealed or []
        self.requests: list[messages.Request] = []
        #: What to raise, by the kind of request; taken out when it was raised.
        self.failures: dict[str, Exception] = {}
        self.rows: list[pa.RecordBatch] = []
        self.closed = False

    def call(self, request: messages.Request, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        del timeout_s
        self.requests.append(request)
        if request.kind() in self.failures:
            raise self.failures.pop(request.kind())
        match request:
            case messages.Health():
                return {"worker": self.name, "pid": 7}, {}
            case messages.Seals():
                return {"attempts": self.sealed}, {}
            case messages.Prepare():
                return {"files": [self.file(request)] if request.chosen else []}, {}
            case messages.Describe():
                return {"variables": [{"stage": 1, "variable": "v", "rows": 2, "bytes": 30}]}, {}
        return {}, {}

    def stream(self, request: messages.Scan) -> Iterator[pa.RecordBatch]:
        self.requests.append(request)
        if "scan" in self.failures:
            raise self.failures.pop("scan")
        yield from self.rows

    def close(self) -> None:
        self.closed = True

    def file(self, request: messages.Prepare) -> dict[str, Any]:
        path = f"anabranch/changes/{self.name}-{request.epoch}.parquet"
        return {
            "stage": 1,
            "variable": "v",
            "worker": self.name,
            "path": path,
            "rows": 3,
            "bytes": 100,
            "checksum": "x",
        }

    def kinds(self) -> list[str]:
        return [request.kind() for request in self.requests]


def membership(*workers: StandIn) -> Membership:
    return Membership([Member(WorkerId(w.name), w.address, 7, w) for w in workers])  # type: ignore[arg-type]
