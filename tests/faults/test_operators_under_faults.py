"""Every operator's state is rescaled, recovered and migrated as all state is: what comes out stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from soak.operators import EVENTS, Pipeline, duplicates, matches, sessions, visits, windows

from anabranch.testing import KillWorker, Rescale, Restart, Rows, Step, StreamTest
from sidebyside import rows_of, side_by_side

NOON = datetime(2026, 1, 1, 12)


def epoch(number: int) -> Rows:
    """Rows of many users, each with one that comes again, and an order of times that is not quite that of arrival."""
    rows = []
    for user in range(40):
        at = NOON + timedelta(seconds=20 * number + (user * 7) % 13 - (9 if user % 5 == 0 else 0))
        rows.append(("view" if user % 2 else "click", f"user{user % 23}", at, user + number))
    return Rows([*rows, rows[number]])


#: Far enough in the future to let everything go out that waits for event time.
LAST = Rows([("view", "nobody", NOON + timedelta(hours=2), 1), ("click", "nobody", NOON + timedelta(hours=2), 1)])
INPUTS = [*map(epoch, range(5)), LAST]
#: After each of the inputs but the last.
DISTURBANCES: list[list[Step]] = [
    [Rescale(workers=3, parallelism=3)],
    [KillWorker(1)],
    [Rescale(workers=1)],
    [Restart(crash=True, settings={"workers": 2})],
    [Rescale(workers=3), KillWorker(2)],
]


def outputs(spark: SparkSession, builds: Sequence[Pipeline], steps: Sequence[Step], store: str) -> list[Any]:
    def build(events: Any) -> Any:
        return side_by_side({each.__name__: each(events) for each in builds})

    with StreamTest(spark, EVENTS, build, outputMode="append", store=store) as test:
        return [row for rows in test.play(steps) for row in rows]


@pytest.mark.parametrize(
    ("builds", "store"),
    [((windows, duplicates, visits), "memory"), ((sessions, matches), "rocksdb")],
    ids=["memory", "rocksdb"],
)
def test_what_comes_out_is_what_an_undisturbed_run_gives(
    spark: SparkSession, builds: Sequence[Pipeline], store: str
) -> None:
    quiet = outputs(spark, builds, INPUTS, store)
    steps: list[Step] = []
    for position, rows in enumerate(INPUTS):
        steps += [rows, *(DISTURBANCES[position] if position < len(DISTURBANCES) else [])]
    disturbed = outputs(spark, builds, steps, store)
    for build in builds:
        expected = rows_of(build.__name__, quiet)
        assert rows_of(build.__name__, disturbed) == expected, build.__name__
        assert len(expected) > 20, build.__name__
