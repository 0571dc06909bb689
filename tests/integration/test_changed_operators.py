"""An operator that has become another one is not given the state of what it was: its checkpoint says what that is."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import anabranch
from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.job import JobDescription, create_or_check
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import JobId

Build = Callable[[Any], Any]


class Counter(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        del key, rows, timerValues
        yield from ()

    def close(self) -> None:
        pass


def processed(mode: str, output_mode: str = "update") -> Build:
    return lambda rows: rows.groupBy("k").transformWithState(Counter(), "k long", output_mode, mode)


def grouped(timeout: str) -> Build:
    def nothing(key: Any, frames: Any, state: Any) -> Iterator[Any]:
        del key, frames, state
        yield from ()

    return lambda rows: rows.groupBy("k").applyInPandasWithState(nothing, "k long", "n long", "update", timeout)


def joined(how: str) -> Build:
    return lambda rows: rows.join(
        rows.select(F.col("k").alias("k2"), F.col("ts").alias("ts2")), F.expr("k = k2 and ts = ts2"), how
    )


def in_pandas(rows: Any) -> Any:
    return rows.groupBy("k").transformWithStateInPandas(Counter(), "k long", "UPDATE", "None")


def job_of(rows: Any, build: Build) -> JobDescription:
    stages = build(anabranch.stream(rows))._pipeline.stateful_stages
    return JobDescription(FORMAT_VERSION, JobId("job"), 16, tuple(stage.spec for stage in stages))


def without_traits(job: JobDescription) -> JobDescription:
    return replace(job, stages=tuple(replace(stage, traits={}) for stage in job.stages))


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Any:
    rows = spark.readStream.format("rate").load()
    return rows.select(F.col("value").alias("k"), F.col("timestamp").alias("ts")).withWatermark("ts", "1 second")


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            processed("processingTime"),
            processed("eventTime"),
            "the time mode of stage1 is processingTime in the checkpoint and eventTime in this query. It decides",
        ),
        (processed("none"), processed("processingTime"), "time mode of stage1 is none"),
        (processed("none"), processed("none", "append"), "output mode of stage1 is update"),
        (joined("inner"), joined("left_outer"), "join type of stage1 is Inner in the checkpoint and LeftOuter"),
        (
            lambda rows: rows.dropDuplicates(["k"]),
            lambda rows: rows.dropDuplicatesWithinWatermark(["k"]),
            "operator of stage1 is dropDuplicates in the checkpoint and dropDuplicatesWithinWatermark in this query",
        ),
        (grouped("ProcessingTimeTimeout"), grouped("EventTimeTimeout"), "time mode of stage1 is processingTime"),
        (grouped("NoTimeout"), processed("none"), "operator of stage1 is applyInPandasWithState"),
    ],
    ids=["timers", "no timers", "output mode", "join", "duplicates", "time-outs", "operator"],
)
def test_another_operator_is_refused_by_name(
    rows: Any, tmp_path: Path, before: Build, now: Build, message: str
) -> None:
    storage, changed = Storage(str(tmp_path / "new")), job_of(rows, now)
    create_or_check(storage, job_of(rows, before))
    with pytest.raises(CheckpointError, match=f"{message}.*Change it back or use a new checkpoint"):
        create_or_check(storage, changed)
    # A checkpoint that does not say what its operators are is taken at its word, as it was before it could.
    silent = Storage(str(tmp_path / "old"))
    create_or_check(silent, without_traits(job_of(rows, now)))
    create_or_check(silent, changed)


@pytest.mark.parametrize(
    ("before", "now"),
    [(processed("none"), in_pandas), (grouped("NoTimeout"), grouped("EventTimeTimeout"))],
    ids=["pandas", "a first time-out"],
)
def test_what_means_the_same_is_the_same_operator(rows: Any, tmp_path: Path, before: Build, now: Build) -> None:
    storage, changed = Storage(str(tmp_path)), job_of(rows, now)
    create_or_check(storage, job_of(rows, before))
    assert create_or_check(storage, changed) == changed
