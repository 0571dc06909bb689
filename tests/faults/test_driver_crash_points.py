"""Drivers that end between any two steps of an epoch: their successors lose and double nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from soak import crashpoints
from soak.crashpoints import POINTS
from soak.driver import start, state_of
from soak.jobs import JOBS, MODELS, epochs_of, make_files
from soak.places import Places, write_json
from soak.processes import Processes
from soak.verdict import judge

WAIT_S = 120.0
#: Nothing has happened yet, so that there is nothing to lose, when an epoch begins.
STEPS = [point for point in POINTS if not point.startswith("begin")]
#: Each job meets some of the points: the n-th of them in its n-th epoch.
CHAINS = {job: STEPS[number :: len(MODELS)] for number, job in enumerate(MODELS)}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[] if job == "process" else [pytest.mark.slow]) for job in CHAINS]
)
def test_a_driver_that_crashes_between_two_steps_of_an_epoch_loses_and_doubles_nothing(
    spark: SparkSession, places: Places, job: str
) -> None:
    points = CHAINS[job]
    files = make_files(5, files=len(points) + 3, rows=40, keys=60)
    places.write_input(files)
    processes = Processes(places)
    try:
        for epoch, point in enumerate(points, start=1):
            driver = processes.start_driver(["--job", job], crash=f"{point}:{epoch}")
            assert driver.process.wait(WAIT_S) == crashpoints.EXIT_CODE, driver.error()
            assert places.committed_epochs() == epoch + (point == "spark-commit:after")
    finally:
        processes.end()
    query = start(spark, JOBS[job], places, files_per_epoch=1)
    try:
        query.processAllAvailable()
        write_json(places.state, state_of(query, JOBS[job]))
    finally:
        query.stop()
    # Each row tells its epoch, and so the point at which the driver crashed in it.
    assert judge(spark, places, MODELS[job](epochs_of(files, 1))).findings == ()


def test_all_steps_are_crashed_at() -> None:
    assert sorted(point for points in CHAINS.values() for point in points) == sorted(STEPS)
    assert {step.partition(":")[0] for step in STEPS} == {
        "sink", "seal", "prepare", "manifest", "commit", "spark-commit",
    }  # fmt: skip


def test_an_unknown_point_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no crash point 'sink:beside:3'"):
        crashpoints.install("sink:beside:3", crashpoints.crash, tmp_path)
