"""Where a disturbed query keeps its things: one folder with input, checkpoint, output, and notes of its drivers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from soak.jobs import InputRow

_COLUMNS = pa.schema([("k", pa.string()), ("v", pa.int64()), ("tag", pa.string()), ("e", pa.int64())])
_FIRST_TIME_S = 1_700_000_000


@dataclass(frozen=True)
class Places:
    """The paths of one query."""

    root: Path

    @property
    def input(self) -> Path:
        return self.root / "input"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def state(self) -> Path:
        """The final state, which the driver that finishes writes."""
        return self.root / "state.json"

    @property
    def log(self) -> Path:
        return self.root / "drivers.log"

    @property
    def reference(self) -> Places:
        """Where a query that nobody disturbs keeps its things."""
        return Places(self.root / "undisturbed")

    @property
    def held(self) -> Path:
        """There once a driver waits at the point where it was to be held up."""
        return self.root / "held"

    @property
    def go(self) -> Path:
        """There once it may go on."""
        return self.root / "go"

    @property
    def storage(self) -> Path:
        """Says until when the storage of the checkpoint fails."""
        return self.root / "storage.json"

    def ready(self, pid: int) -> Path:
        """There once the query of this driver runs; holds the pids of its workers."""
        return self.root / f"ready-{pid}.json"

    def url(self, pid: int) -> Path:
        """Holds the place of this driver's HTTP API; there before it is ready."""
        return self.root / f"url-{pid}.json"

    def url_of(self, pid: int) -> str:
        """Where the HTTP API of a driver that is ready is."""
        return str(json.loads(self.url(pid).read_text()))

    def error(self, pid: int) -> Path:
        """Why the query of this driver ended, if it did so by itself."""
        return self.root / f"error-{pid}.json"

    def write_input(self, files: Sequence[Sequence[InputRow]]) -> None:
        self.input.mkdir(parents=True)
        self.add_input(files, first=0)

    def add_input(self, files: Sequence[Sequence[InputRow]], *, first: int) -> None:
        """More files; the first of them has this number."""
        for number, rows in enumerate(files, start=first):
            columns = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(_COLUMNS)]
            unfinished = self.input / f".{number:06d}"
            pq.write_table(pa.table(columns, schema=_COLUMNS), unfinished)
            # The file source takes files in the order of their times.
            os.utime(unfinished, (_FIRST_TIME_S + number, _FIRST_TIME_S + number))
            unfinished.rename(self.input / f"{number:06d}.parquet")

    def committed_epochs(self) -> int:
        """How many epochs Spark has committed."""
        commits = self.checkpoint / "commits"
        numbers = [int(path.name) for path in commits.iterdir() if path.name.isdigit()] if commits.is_dir() else []
        return max(numbers, default=-1) + 1


def write_json(path: Path, content: Any) -> None:
    """All of it or nothing, whenever the process is killed."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content))
    unfinished.rename(path)
