"""A small counting job that many tests run: its epochs, its queries, and how often its state logic ran."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

# Tasks cannot import a test: what it defines travels with them.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "k string, v long"
RESULT = "k string, n long, total long"
KEYS = [f"k{number:02d}" for number in range(30)]
#: Each epoch changes other keys, and the last changes all: its rows show the whole state.
EPOCHS = [[(key, number) for key in KEYS[number % 3 :: 3]] + [(f"new{number}", 1)] for number in range(8)]
EPOCHS.append([(key, 100) for key in [*KEYS, *(f"new{number}" for number in range(8))]])
#: Epochs of (stage, partition) to the attempts of it that were sealed.
Attempts = dict[int, dict[tuple[int, int], set[int]]]


def counted(rows: Any) -> Any:
    return rows.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))


def multiset(rows: list[Any]) -> Counter[Any]:
    return Counter(tuple(row) for row in rows)


def writer_of(stream: Any, checkpoint: Path | str, **options: Any) -> Any:
    return stream.writeStream.outputMode("update").options(checkpointLocation=str(checkpoint), **options)


def assert_ran_once(attempts: Attempts, epochs: int, partitions: int = 2) -> None:
    """State logic ran exactly once for each partition in each epoch."""
    assert list(attempts) == list(range(epochs))
    for epoch, tasks in attempts.items():
        again = {task: numbers for task, numbers in tasks.items() if len(numbers) != 1}
        assert not again, f"epoch {epoch}: state logic ran more than once: {again}"
        assert len(tasks) == partitions, f"epoch {epoch}: {sorted(tasks)}"


class Tally(StatefulProcessor):
    """Counts rows and adds up values, and writes a line into a file for each key that it is called for."""

    def __init__(self, journal: str, fail_first: bool = False) -> None:
        self.journal = journal
        self.fail_first = fail_first

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("tally", "n long, total long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: ARG002
        count, total = self.state.get() if self.state.exists() else (0, 0)
        for row in rows:
            count, total = count + 1, total + row.v
        self.state.update((count, total))
        if self.fail_first and key[0] == "k03":
            fail_first_time(Path(self.journal + ".failed"))
        with Path(self.journal).open("a") as journal:
            journal.write(f"{key[0]}\n")
        yield Row(k=key[0], n=count, total=total)

    def close(self) -> None:
        pass


def fail_first_time(marker: Path) -> None:
    """Fails in the first task that comes here, whichever process it runs in."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    raise RuntimeError("this attempt fails")


def tallied(processor: Tally) -> Callable[[Any], Any]:
    return lambda rows: rows.groupBy("k").transformWithState(
        processor, "k string, n long, total long", "update", "none"
    )
