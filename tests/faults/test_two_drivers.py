"""Two drivers on one checkpoint: the older one stops and says why, whatever it was doing, and the result is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from soak import crashpoints
from soak.driver import FAILED, source, start, state_of
from soak.jobs import JOBS, InputRow, epochs_of, make_files
from soak.places import Places, write_json
from soak.processes import Driver, Processes, wait_until
from soak.verdict import judge

import anabranch
from anabranch.control import resume

WAIT_S = 120.0
JOB = JOBS["aggregate"]
FILES = make_files(4, files=5, rows=60, keys=60)
#: What comes later.
MORE = make_files(4, files=7, rows=60, keys=60)[len(FILES) :]
HELD_IN = 2


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places(tmp_path)
    places.write_input(FILES)
    return places


@pytest.fixture
def processes(places: Places) -> Iterator[Processes]:
    processes = Processes(places)
    yield processes
    processes.end()


def start_older(processes: Processes, places: Places, point: str) -> Driver:
    """A driver that is held up at a point of an epoch."""
    processes.environment[crashpoints.HOLD_VARIABLE] = f"{point}:{HELD_IN}"
    driver = processes.start_driver(["--job", JOB.name])
    assert wait_until(lambda: places.held.exists() or driver.ended() is not None, WAIT_S)
    assert driver.ended() is None, driver.error()
    return driver


def finish(spark: SparkSession, places: Places, started: Any = None) -> None:
    query = started or start(spark, JOB, places, files_per_epoch=1)
    try:
        query.processAllAvailable()
        write_json(places.state, state_of(query, JOB))
    finally:
        query.stop()


def assert_right(spark: SparkSession, places: Places, files: list[list[InputRow]] = FILES) -> None:
    assert JOB.model is not None
    assert judge(spark, places, JOB.model(epochs_of(files, 1))).findings == ()


def assert_fenced(older: Driver) -> None:
    assert older.process.wait(WAIT_S) == FAILED
    error = older.error()
    assert error is not None
    assert error["kind"] == "FencedError", error
    assert "A newer driver has taken over the job: it claimed generation 2" in error["message"]


def start_idle(processes: Processes, places: Places, *arguments: str) -> Driver:
    """A driver that has taken all input and waits for more."""
    driver = processes.start_driver(["--job", JOB.name, "--stay", *arguments])
    assert wait_until(lambda: places.state.exists() or driver.ended() is not None, WAIT_S)
    assert driver.ended() is None, driver.error()
    return driver


# The older one finds out where it commits either way, of which test_coordinator_epochs has the case without processes.
@pytest.mark.parametrize("point", ["sink:before", pytest.param("manifest:before", marks=pytest.mark.slow)])
def test_the_older_of_two_drivers_is_fenced(
    spark: SparkSession, places: Places, processes: Processes, point: str
) -> None:
    older = start_older(processes, places, point)
    query = start(spark, JOB, places, files_per_epoch=1)
    places.go.touch()
    finish(spark, places, query)
    assert_fenced(older)
    assert_right(spark, places)


def test_a_driver_that_has_nothing_to_do_notices_that_it_is_fenced(
    spark: SparkSession, places: Places, processes: Processes
) -> None:
    older = start_idle(processes, places)
    query = start(spark, JOB, places, files_per_epoch=1)
    try:
        assert_fenced(older)
        places.add_input(MORE, first=len(FILES))
    except BaseException:
        query.stop()
        raise
    finish(spark, places, query)
    assert_right(spark, places, FILES + MORE)


def test_the_newer_of_two_drivers_survives_what_the_older_writes_into_the_logs_of_spark(
    spark: SparkSession, places: Places, processes: Processes
) -> None:
    """Both wait for input. The older one, which does not look who else is there, finds it first."""
    older = start_idle(processes, places, "--option", "anabranch.heartbeat=3600")
    stream = JOB.build(anabranch.stream(source(spark, places, 1)))
    writer = stream.writeStream.outputMode(JOB.mode).format("parquet").option("path", str(places.output))
    query = writer.option("checkpointLocation", str(places.checkpoint)).trigger(processingTime="5 seconds").start()
    try:
        query.processAllAvailable()
        places.add_input(MORE, first=len(FILES))
        assert_fenced(older)
        query.processAllAvailable()
        assert query.isActive
        assert query.exception() is None
    except BaseException:
        query.stop()
        raise
    finish(spark, places, query)
    assert_right(spark, places, FILES + MORE)


def test_an_epoch_that_spark_commits_while_a_newer_driver_starts_is_not_lost(
    spark: SparkSession, places: Places, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older driver has written the manifest of an epoch when the newer one looks at what Spark has committed."""
    older = start_older(processes, places, "spark-commit:before")
    state_files = resume.state_files

    def after_spark_has_committed(*arguments: Any) -> Any:
        places.go.touch()
        wait_until(lambda: places.committed_epochs() == HELD_IN + 1, WAIT_S)
        return state_files(*arguments)

    monkeypatch.setattr(resume, "state_files", after_spark_has_committed)
    try:
        finish(spark, places)
    except Exception as error:
        # It may give up, but then the next one has to find everything.
        write_json(places.root / "gave-up.json", str(error))
    monkeypatch.undo()
    assert older.has_ended(within_s=WAIT_S)
    if not places.state.exists():
        finish(spark, places)
    assert_right(spark, places)
