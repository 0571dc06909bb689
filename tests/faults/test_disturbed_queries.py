"""Queries that lose workers, tasks and drivers on the way: what comes out is what an undisturbed run gives."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession
from soak.jobs import JOBS, MODELS, Expected, epochs_taken, plain
from soak.places import Places
from soak.reference import rows_by_spark, timed_by_spark
from soak.run import modelled, play
from soak.scenarios import Fault, Kind, Scenario, draw
from soak.timed import times_logged
from soak.verdict import compare, state_findings

QUIET = Scenario(
    seed=1,
    job="aggregate",
    files=6,
    rows=40,
    keys=60,
    files_per_epoch=2,
    workers=2,
    store="memory",
    apart=False,
    faults=(),
    crashes=(),
)


@pytest.mark.parametrize("job", MODELS)
def test_the_model_of_a_job_says_what_spark_says(spark: SparkSession, tmp_path: Path, job: str) -> None:
    scenario = replace(QUIET, job=job)
    places = Places(tmp_path)
    places.write_input(scenario.input())
    assert rows_by_spark(spark, job, places, scenario.files_per_epoch) == Counter(modelled(scenario).rows)


@pytest.mark.slow  # it waits for timers of Spark's own, and the models have tests of their own
@pytest.mark.parametrize("job", [name for name, job in JOBS.items() if job.timed is not None])
def test_the_model_of_a_job_says_what_spark_says_if_it_is_told_when_epochs_were(
    spark: SparkSession, tmp_path: Path, job: str
) -> None:
    scenario = replace(QUIET, job=job, keys=15)
    places = Places(tmp_path)
    files = scenario.input()
    places.write_input(files)
    model = JOBS[job].timed
    assert model is not None
    # One row for each key of each epoch, and at least one for each key that has been away.
    until = sum(len({row[0] for row in file}) for file in files) + len({row[0] for file in files for row in file})
    rows, checkpoint = timed_by_spark(spark, JOBS[job], places, until=until)
    assert rows.total() >= until
    epochs = list(zip(times_logged(checkpoint), epochs_taken(files, checkpoint), strict=True))
    assert rows == Counter(model(epochs)[0])


#: Every kind of fault, in as few starts of Spark as possible.
SCENARIOS = {
    "workers and tasks die while the driver stays": Scenario(
        seed=11,
        job="two-stages",
        files=14,
        rows=60,
        keys=400,
        files_per_epoch=1,
        workers=3,
        store="memory",
        apart=False,
        faults=(
            Fault((Kind.WORKER,), after_s=0.5, choice=1, early=True),
            Fault((Kind.TASK,), after_s=1.0, choice=2),
            Fault((Kind.FREEZE,), after_s=0.3, choice=3, pause_s=4.0),
            Fault((Kind.WORKER, Kind.WORKER, Kind.TASK), after_s=0.5, choice=4),
        ),
        crashes=(),
    ),
    "the driver's machine is lost together with a worker": Scenario(
        seed=12,
        job="process",
        files=24,
        rows=60,
        keys=400,
        files_per_epoch=2,
        workers=2,
        store="rocksdb",
        apart=False,
        faults=(
            Fault((Kind.WORKER,), after_s=1.0, choice=1),
            Fault((Kind.FREEZE, Kind.MACHINE), after_s=0.5, choice=2, pause_s=3.0),
            Fault((Kind.WORKER,), after_s=0.5, choice=3),
        ),
        crashes=(),
    ),
    "a driver that stood still is replaced and comes back": Scenario(
        seed=13,
        job="aggregate",
        files=36,
        rows=60,
        keys=400,
        files_per_epoch=3,
        workers=3,
        store="memory",
        apart=True,
        faults=(
            Fault((Kind.FREEZE,), after_s=0.5, choice=1, pause_s=3.0),
            Fault((Kind.WORKER, Kind.ZOMBIE), after_s=1.0, choice=2),
        ),
        crashes=(),
    ),
    "workers come, go and die while the query is rescaled": Scenario(
        seed=14,
        job="two-stages",
        files=44,
        rows=60,
        keys=400,
        files_per_epoch=2,
        workers=2,
        store="memory",
        apart=False,
        faults=(
            Fault((Kind.RESCALE,), after_s=0.2, choice=1),
            Fault((Kind.FORK_SERVER, Kind.JOIN, Kind.RESCALE, Kind.WORKER), after_s=1.0, choice=2),
            Fault((Kind.LEAVE,), after_s=0.5, choice=3),
            Fault((Kind.RESCALE, Kind.DRIVER), after_s=0.5, choice=4),
            Fault((Kind.RESCALE, Kind.WORKER), after_s=0.2, choice=5),
        ),
        crashes=(),
    ),
}


#: The rest is for those who have more time, and for the soak.
SHORT = ["workers come, go and die while the query is rescaled"]


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, id=name, marks=[] if name in SHORT else [pytest.mark.slow])
        for name, scenario in SCENARIOS.items()
    ],
)
def test_a_disturbed_query_gives_what_an_undisturbed_one_gives(
    spark: SparkSession, tmp_path: Path, scenario: Scenario
) -> None:
    outcome = play(spark, scenario, Places(tmp_path))
    assert outcome.verdict.findings == ()
    assert outcome.errors == (), "a query must not end by itself, whatever happens to workers and tasks"
    assert outcome.epochs == scenario.epochs
    assert outcome.verdict.rows == len(modelled(scenario).rows)
    assert outcome.faults.total() >= 2


@pytest.mark.parametrize("job", MODELS)
def test_the_verdict_tells_lost_doubled_and_wrong_rows(job: str) -> None:
    expected = modelled(replace(QUIET, job=job))
    first, second, *rest = expected.rows
    assert compare(Counter(expected.rows), expected).is_right
    disturbed = compare(Counter([*rest, *rest[:3], (*second[:-1], -1)]), expected)
    assert (disturbed.lost, disturbed.doubled, disturbed.wrong) == (2, 3, 1)
    assert repr(first) in disturbed.findings[0]


def test_the_verdict_tells_state_that_is_lost_wrong_or_there_twice() -> None:
    expected = Expected([], {"seen": [("a", 1), ("b", 2)]})
    assert state_findings({"seen": [("b", 2), ("a", 1)]}, expected) == []
    for found in ([("a", 1)], [("a", 1), ("b", 3)], [("a", 1), ("a", 1), ("b", 2)]):
        (finding,) = state_findings({"seen": found}, expected)
        assert f"{len(found)} rows instead of 2" in finding


def test_rows_are_compared_without_what_is_chance() -> None:
    window = Row(start=datetime(2026, 1, 1), end=datetime(2026, 1, 2))
    row = plain(Row(window=window, mean=0.1 + 0.2, kinds=["view", "click"], n=None))
    assert row == plain((window, 0.3, ["click", "view"], None))
    assert row != plain((window, 0.3, ["click", "view", "view"], None))
    assert tuple(json.loads(json.dumps(row))) == row


def test_a_seed_always_gives_the_same_scenario() -> None:
    scenarios = [draw(seed) for seed in range(200)]
    assert scenarios == [draw(seed) for seed in range(200)]
    assert {scenario.job for scenario in scenarios} == set(JOBS)
    drawn = {kind for scenario in scenarios for fault in scenario.faults for kind in fault.kinds}
    assert drawn == set(Kind) - {Kind.CRASH}
    assert any(scenario.crashes for scenario in scenarios)
