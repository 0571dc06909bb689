"""A query over input that is added while it runs, which is rescaled and disturbed, and then compared with a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import DataFrame, SparkSession
from soak.driver import source, state_of
from soak.jobs import JOBS, InputRow, make_files
from soak.places import Places
from soak.verdict import compare, state_findings

import anabranch
from support.waiting import WAIT_S, wait_until

_LOOK_INTERVAL_S = 0.02
#: Input files that wait for their epoch while rows flow.
_AHEAD = 3
_FILES = 2000


@cache
def _files(rows: int, keys: int) -> list[list[InputRow]]:
    """The same for all queries, because to draw so many rows takes a while."""
    return make_files(7, files=_FILES, rows=rows, keys=keys)


class LiveQuery:
    """One of the soak's jobs, one input file an epoch. The models of the jobs say what undisturbed runs give."""

    def __init__(
        self, spark: SparkSession, folder: Path, job: str = "two-stages", *, rows: int = 80, keys: int = 300
    ) -> None:
        self.spark = spark
        self.job = JOBS[job]
        self.places = Places(folder)
        self.places.input.mkdir(parents=True)
        self._files = list(_files(rows, keys))
        #: How many files have been added: by the test, and beside it by the thread that keeps rows flowing.
        self.fed = 0
        self._feeding = threading.Lock()
        #: The rows that came out of each epoch.
        self.epochs: dict[int, list[Any]] = {}
        self.query: Any = None
        #: Of the first run.
        self.run_id = ""

    @contextmanager
    def running(self, **options: Any) -> Iterator[Any]:
        """The query, from the beginning or from its checkpoint. Settings without their prefix; None: not set."""
        stream = self.job.build(anabranch.stream(source(self.spark, self.places, 1)))
        writer = stream.writeStream.outputMode("update").foreachBatch(self._keep)
        given = {"controlPort": 0, **options}
        settings = {f"anabranch.{name}": value for name, value in given.items() if value is not None}
        self.query = writer.options(checkpointLocation=str(self.places.checkpoint), **settings).start()
        self.run_id = self.query.runId
        try:
            yield self.query
        finally:
            self.query.stop()

    def _keep(self, rows: DataFrame, epoch: int) -> None:
        self.epochs[epoch] = [tuple(row) for row in rows.collect()]

    def add(self, count: int = 1) -> None:
        """Files for so many epochs."""
        with self._feeding:
            self.places.add_input(self._files[self.fed : self.fed + count], first=self.fed)
            self.fed += count

    def add_rows(self, rows: list[InputRow]) -> None:
        """An epoch of these rows."""
        self._files[self.fed] = rows
        self.add()

    def run(self, count: int = 1) -> None:
        """So many epochs, to their end."""
        self.add(count)
        self.query.processAllAvailable()

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Input that never runs out, until the end of the block; then all of it is processed."""
        stop = threading.Event()

        def feed() -> None:
            while not stop.wait(_LOOK_INTERVAL_S):
                if self.fed - len(self.epochs) < _AHEAD:
                    self.add()

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        self.query.processAllAvailable()

    def pass_epochs(self, count: int = 2) -> None:
        """Wait while rows flow."""
        goal = len(self.epochs) + count
        wait_until(lambda: len(self.epochs) >= goal or self.query.exception(), f"{count} more epochs are out")
        assert self.query.exception() is None

    def rescale(self, **wanted: Any) -> dict[str, Any]:
        """Rescale, and wait until all state has moved; how far it is then."""
        rescale = self.query.rescale(**wanted)
        assert rescale.wait(WAIT_S), rescale.progress()
        return dict(rescale.progress())

    def begin_rescale(self, **wanted: Any) -> Any:
        """A rescale of an idle query that is under way; with a long heartbeat, nothing moves before the next epoch."""
        rescale = self.query.rescale(**wanted)
        wait_until(lambda: rescale.state != "waiting", "the rescale has begun")
        assert rescale.state == "migrating", rescale.progress()
        assert rescale.progress()["groupsPending"] > 0, rescale.progress()
        return rescale

    def finish(self, rescale: Any) -> None:
        """Run epochs until all state has moved: with a long heartbeat, nothing else tells the driver."""
        deadline_s = time.monotonic() + WAIT_S
        while not rescale.wait(_LOOK_INTERVAL_S):
            assert time.monotonic() < deadline_s, rescale.progress()
            self.run()

    def assert_exact(self, *, same_run: bool = True) -> None:
        """Output and state are those of an undisturbed run; no epoch was skipped."""
        assert sorted(self.epochs) == list(range(self.fed))
        expected = self.job.model(self._files[: self.fed])
        found = Counter(row for rows in self.epochs.values() for row in rows)
        assert compare(found, expected).findings == ()
        assert state_findings(state_of(self.query, self.job), expected) == []
        assert self.query.exception() is None
        assert self.query.isActive
        if same_run:
            assert self.query.runId == self.run_id

    def pid_of(self, worker: str) -> int:
        return int(next(each["pid"] for each in self.query.workers() if each["id"] == worker))


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def worker_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A state worker that no query has started, and what it says about itself."""
    command = [sys.executable, "-m", "anabranch", "worker", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        # One that cannot begin says nothing.
        yield process, json.loads(process.stdout.readline() or "{}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
