"""Every operator's state is rescaled, recovered and migrated as all state is: what comes out stays the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from soak.operators import (
    EVENTS,
    Pipeline,
    absences,
    answered,
    balances,
    duplicates,
    firsts,
    matches,
    pairs,
    sessions,
    totals,
    visits,
    windows,
)

from anabranch.testing import Clock, KillWorker, Rescale, Restart, Rows, Step, StreamTest
from support.seeds import seeds
from support.side_by_side import rows_of, side_by_side

NOON = datetime(2026, 1, 1, 12)
#: All operators there are, in as few queries as possible, each on one of the stores.
QUERIES: dict[str, tuple[Pipeline, ...]] = {
    "memory": (windows, duplicates, firsts, visits, absences, totals),
    "rocksdb": (sessions, matches, pairs, answered, balances),
}


def epoch(number: int) -> Rows:
    """Rows of many users, each with one that comes again, and an order of times that is not quite that of arrival."""
    rows = []
    for user in range(40):
        at = NOON + timedelta(seconds=20 * number + (user * 7) % 13 - (9 if user % 5 == 0 else 0))
        rows.append(("view" if user % 2 else "click", f"user{user % 23}", at, user + number))
    return Rows([*rows, rows[number]])


#: Far enough in the future to let everything go out that waits for event time.
LAST = Rows([("view", "nobody", NOON + timedelta(hours=2), 1), ("click", "nobody", NOON + timedelta(hours=2), 1)])
#: Between two of them something happens.
INPUTS: list[list[Step]] = [
    [epoch(0), Clock(12)],
    [epoch(1), Clock(15)],
    [epoch(2)],
    [LAST, Clock(60)],
]


def disturbances(seed: int) -> list[list[Step]]:
    """After each of the inputs but the last: one of each kind, in any order, with what else there is to choose."""
    draw = random.Random(f"disturbances {seed}")
    steps: list[Step] = [
        Rescale(workers=draw.randint(1, 3), parallelism=draw.randint(1, 4)),
        KillWorker(draw.randrange(3)),
        Restart(settings={"workers": draw.randint(1, 3)}),
        Restart(crash=True, settings={"workers": draw.randint(1, 3)}),
    ]
    draw.shuffle(steps)
    # Two of them in a row somewhere: four kinds between four inputs.
    places = draw.sample([0, 1, 2, draw.randrange(3)], 4)
    return [[step for step, place in zip(steps, places, strict=True) if place == number] for number in range(3)]


def outputs(spark: SparkSession, builds: Sequence[Pipeline], steps: Sequence[Step], store: str) -> list[Any]:
    def build(events: Any) -> Any:
        return side_by_side({each.__name__: each(events) for each in builds})

    with StreamTest(spark, EVENTS, build, outputMode="append", store=store) as test:
        return [row for rows in test.play(steps) for row in rows]


# A minute on a quiet machine. On a busy one an epoch of six queries takes a quarter of a minute.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("store", QUERIES)
def test_what_comes_out_is_what_an_undisturbed_run_gives(spark: SparkSession, store: str, seed: int) -> None:
    builds = QUERIES[store]
    quiet: list[Step] = []
    disturbed: list[Step] = []
    for steps, then in zip(INPUTS, [*disturbances(seed), []], strict=True):
        # Time passes only for those who notice: it costs an epoch each time.
        inputs = [step for step in steps if balances in builds or not isinstance(step, Clock)]
        quiet += inputs
        disturbed += [*inputs, *then]
    expected = outputs(spark, builds, quiet, store)
    found = outputs(spark, builds, disturbed, store)
    for build in builds:
        rows = rows_of(build.__name__, expected)
        assert rows_of(build.__name__, found) == rows, (build.__name__, disturbed)
        assert len(rows) > 20, build.__name__


def test_each_seed_draws_all_kinds_of_disturbances() -> None:
    drawn = [disturbances(seed) for seed in range(50)]
    assert drawn == [disturbances(seed) for seed in range(50)]
    for groups in drawn:
        assert sorted(map(len, groups)) == [1, 1, 2]
        kinds = [type(step).__name__ for group in groups for step in group]
        assert sorted(kinds) == ["KillWorker", "Rescale", "Restart", "Restart"]
    assert len({str(groups) for groups in drawn}) > 40
