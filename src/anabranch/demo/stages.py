"""What the stages of the demonstration do with their rows. Runs in tasks, so it imports little."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

#: The result of the counting stage.
COUNTED = "server_name STRING, count LONG, ingestion_time TIMESTAMP"

_BLOCK = bytes(256)
_counted = Row("server_name", "count", "ingestion_time")


def burn_cpu(cpu_s: float) -> None:
    """Compute until this thread has used this CPU time, however long that takes by the clock on the wall."""
    end_s = time.thread_time() + cpu_s
    digest = b""
    while time.thread_time() < end_s:
        digest = hashlib.sha256(digest + _BLOCK).digest()


def prepare_task(batches: Iterable[Any]) -> Iterator[Any]:
    """Import what tasks of a stateful stage need, in a process that Spark will use again."""
    import anabranch.operators.process.rows
    import anabranch.operators.process.stage  # noqa: F401

    yield from batches


@dataclass(frozen=True)
class Work:
    """Stage 2: rows pass unchanged, and each costs CPU time."""

    cpu_s_per_row: float

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            burn_cpu(self.cpu_s_per_row * batch.num_rows)
            yield batch


class CountPerServer(StatefulProcessor):
    """Stage 3: says for each row how many rows its server has had so far.

    Each row may cost CPU time, and may leave junk in the state, to see what heavy state does.
    """

    def __init__(self, *, cpu_s_per_row: float = 0.0, junk_bytes: int = 0) -> None:
        self._cpu_s_per_row = cpu_s_per_row
        self._junk_bytes = junk_bytes

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count LONG")
        if self._junk_bytes:
            self._junk = handle.getListState("junk", "junk BINARY")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: ARG002
        (server,) = key
        stored = self._count.get()
        count = stored[0] if stored else 0
        for row in rows:
            count += 1
            if self._cpu_s_per_row:
                burn_cpu(self._cpu_s_per_row)
            if self._junk_bytes:
                # Does not compress, and is the same again when the epoch is run again.
                self._junk.appendValue((random.Random(f"{server} {count}").randbytes(self._junk_bytes),))
            yield _counted(server, count, row.ingestion_time)
        self._count.update((count,))

    def close(self) -> None:
        pass
