"""Rescaling Anabranch: its strategies, and the Redis that one of them needs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from pyspark.sql import functions as F

import anabranch
from bench.harness import BenchmarkError
from bench.rescale_load import Feed
from bench.rescale_run import LIMIT_S
from bench.session import Lab, check_interrupted
from bench.sides import totals

#: The source is stage 0.
_STAGE = 1
_POLL_INTERVAL_S = 0.1
_REDIS_LIMIT_S = 30.0


class AnabranchJob:
    """The same count and sum with its state in state workers."""

    def __init__(
        self, lab: Lab, feed: Feed, *, name: str, trigger: str, settings: Mapping[str, Any], moves_state: bool
    ) -> None:
        """Prepare the query. Without a drain a rescale has no end: it counts as done when the new route is in force."""
        self._feed = feed
        drains = settings.get("anabranch.drain", True)
        self._awaited = ("waiting", "migrating") if drains else ("waiting",)
        self._reached = ("done",) if drains else ("migrating", "done")
        self._rescales: list[tuple[Any, dict[str, Any]]] = []
        self._moves_state = moves_state
        self._name = name
        self._trigger = trigger
        self._settings = dict(settings)
        self._checkpoint = lab.new_folder(name)
        self._query: Any = None

    def start(self) -> None:
        writer = totals(anabranch.stream(self._feed.rows)).writeStream.outputMode("update").format("noop")
        writer = writer.trigger(processingTime=self._trigger).option("checkpointLocation", self._checkpoint)
        self._query = writer.options(**self._settings).start()

    def check(self) -> None:
        if not self._query.isActive:
            raise self._query.exception() or BenchmarkError(f"The query of {self._name!r} ended by itself.")

    def rescale(self, size: int) -> Mapping[str, Any]:
        deadline_s = time.monotonic() + LIMIT_S
        handle = self._query.rescale(workers=size, parallelism=size)
        while handle.progress()["state"] in self._awaited and time.monotonic() < deadline_s:
            check_interrupted()
            handle.wait(_POLL_INTERVAL_S)
        progress = dict(handle.progress())
        if progress["state"] not in self._reached:
            raise BenchmarkError(f"The rescale of {self._name!r} to {size} workers did not end: {progress}.")
        self._rescales.append((handle, progress))
        progress["rowsHeld"] = self._rows_held(size, deadline_s)
        return progress

    def _rows_held(self, size: int, deadline_s: float) -> Mapping[str, int]:
        """Return rows by worker. After a restart, state comes when it is needed: wait until every worker has some."""
        while True:
            check_interrupted()
            held = {worker["id"]: worker["rows"] for worker in self._query.workers() if worker["rows"]}
            if not self._moves_state or len(held) == size:
                return held
            if time.monotonic() > deadline_s:
                raise BenchmarkError(
                    f"After the rescale of {self._name!r} to {size} workers, these have state: {held}."
                )
            time.sleep(_POLL_INTERVAL_S)

    def finish(self) -> tuple[int, int]:
        # Without a drain, keys have gone on moving; to look at the state brings all that is left.
        for handle, facts in self._rescales:
            facts.update(handle.progress())
        found = self._query.state(_STAGE).agg(F.count(F.lit(1)), F.sum("rows")).first()
        self.stop()
        return int(found[0]), int(found[1])

    def stop(self) -> None:
        if self._query is not None and self._query.isActive:
            self._query.stop()


def has_redis() -> bool:
    """Return whether there is a Redis that can be started."""
    return shutil.which("redis-server") is not None


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a Redis in memory only, on a free port of this machine, and give its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True)
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--dir", str(folder)], stdout=log, stderr=log)
    try:
        _wait_for_redis(process, port, folder / "log")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def _wait_for_redis(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + _REDIS_LIMIT_S
    with redis.Redis(host="127.0.0.1", port=port) as client:
        while time.monotonic() < deadline_s:
            check_interrupted()
            with suppress(redis.ConnectionError):
                client.ping()
                return
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_INTERVAL_S)
                break
    raise BenchmarkError(f"redis-server did not start. Its log ends: {log.read_text(errors='replace')[-500:]}")
