"""Drivers that are lost with epochs that were not durable: their successors repeat those epochs, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from soak import crashpoints
from soak.driver import start, state_of
from soak.jobs import JOBS, epochs_taken, make_files, make_last_files
from soak.places import Places, write_json
from soak.processes import Processes
from soak.reference import undisturbed
from soak.verdict import judge

WAIT_S = 120.0
#: No epoch becomes durable before the query is stopped.
VOLATILE = {"anabranch.checkpointInterval": "3600", "anabranch.controlPort": "0"}
OPTIONS = [argument for name, value in VOLATILE.items() for argument in ("--option", f"{name}={value}")]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.fixture
def processes(places: Places) -> Iterator[Processes]:
    processes = Processes(places)
    yield processes
    processes.end()


def finish(spark: SparkSession, places: Places, job: str) -> None:
    query = start(spark, JOBS[job], places, files_per_epoch=1, options=VOLATILE)
    try:
        query.processAllAvailable()
        write_json(places.state, state_of(query, JOBS[job]))
    finally:
        query.stop()


@pytest.mark.timeout(300)
def test_epochs_without_rows_are_repeated_like_others(
    spark: SparkSession, places: Places, processes: Processes
) -> None:
    """Each repeated epoch is a query of Spark's own, in a session of its own, and so is the one that goes on."""
    files = make_files(3, files=4, rows=40, keys=60)
    files += make_last_files(3, after=len(files), files=2, rows=10, keys=5)
    places.write_input(files)
    # Each file has an epoch, and the last of these is followed by one without rows.
    driver = processes.start_driver(["--job", "windows", *OPTIONS], crash="sink:before:6")
    assert driver.process.wait(WAIT_S) == crashpoints.EXIT_CODE, driver.error()
    assert places.committed_epochs() == 6
    finish(spark, places, "windows")
    epochs = epochs_taken(files, places.checkpoint)
    assert [bool(rows) for rows in epochs[:7]] == [True] * 6 + [False]
    expected = undisturbed(spark, JOBS["windows"], epochs[:6], places.reference)
    assert judge(spark, places, expected).findings == ()
