"""What the log says of a worker that is killed: that it is lost, who has its key groups, and who takes its place."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from soak.driver import start
from soak.jobs import JOBS, make_files
from soak.places import Places

from anabranch.engine.spark import loss_log as losslog
from anabranch.engine.tasks import TaskEpoch
from support.live_query import LiveQuery, wait_until

#: Nobody looks whether workers are alive: the tasks of an epoch find out.
OPTIONS = {"anabranch.workers": "2", "anabranch.heartbeat": "3600", "anabranch.controlPort": "0"}


@pytest.fixture
def log_of_spark(spark: SparkSession) -> Iterator[Any]:
    """A function that gives all that Spark has logged since, as it would at a level of WARN."""
    jvm: Any = spark._jvm
    root = jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration().getRootLogger()
    text = jvm.java.io.StringWriter()
    layout = jvm.org.apache.logging.log4j.core.layout.PatternLayout.createDefaultLayout()
    appender = jvm.org.apache.logging.log4j.core.appender.WriterAppender.createAppender(
        layout, None, text, "log of a test", False, True
    )
    appender.start()
    root.addAppender(appender, None, None)
    spark.sparkContext.setLogLevel("WARN")
    yield lambda: str(text.toString())
    spark.sparkContext.setLogLevel("ERROR")
    root.removeAppender("log of a test")


@contextmanager
def killing_during_an_epoch(query: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of a worker that is killed when the next epoch has begun, before its tasks have."""
    victim = query.workers()[0]
    announce = TaskEpoch.announce

    def kill_before(epoch: TaskEpoch, spark: SparkSession) -> None:
        monkeypatch.setattr(TaskEpoch, "announce", announce)
        os.kill(victim["pid"], signal.SIGKILL)
        announce(epoch, spark)

    monkeypatch.setattr(TaskEpoch, "announce", kill_before)
    yield victim["id"]
    wait_until(lambda: query.coordinator.cluster.members.workers == ("worker-2", "worker-3"), "it is replaced")


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def check(found: list[str], spark_says: str, victim: str) -> None:
    lost, moved, again, replaced = found
    assert lost.startswith(f"worker {victim} is lost: ")
    assert moved == f"worker {victim} is gone; its key groups go to others"
    assert "failed with a lost worker, and runs again" in again
    assert replaced == f"worker worker-3 takes the place of {victim}"
    assert "\tat " not in spark_says, spark_says
    assert "Traceback" not in spark_says, spark_says


def test_a_killed_worker_takes_a_line_for_each_thing_that_is_done_about_it(
    spark: SparkSession,
    tmp_path: Path,
    log_of_spark: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = LiveQuery(spark, tmp_path)
    with live.running(**{name.removeprefix("anabranch."): value for name, value in OPTIONS.items()}) as query:
        live.run(2)
        with killing_during_an_epoch(query, monkeypatch) as victim:
            live.run()
        check(own_lines(caplog), log_of_spark(), victim)


def test_so_it_does_where_files_are_written(
    spark: SparkSession,
    tmp_path: Path,
    log_of_spark: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark's file sink has a stack trace of its own for a job that fails."""
    places, files = Places(tmp_path), make_files(3, files=3, rows=40, keys=60)
    places.write_input(files[:2])
    query = start(spark, JOBS["aggregate"], places, files_per_epoch=1, options=OPTIONS)
    try:
        query.processAllAvailable()
        with killing_during_an_epoch(query, monkeypatch) as victim:
            places.add_input(files[2:], first=2)
            query.processAllAvailable()
        check(own_lines(caplog), log_of_spark(), victim)
    finally:
        query.stop()


def test_all_else_is_logged_as_before(spark: SparkSession, log_of_spark: Any) -> None:
    losslog.leave_out_lost_workers(spark)
    losslog.leave_out_lost_workers(spark)
    jvm: Any = spark._jvm
    lost = jvm.java.lang.RuntimeException("anabranch.core.errors.LostWorkerError: it cannot be reached")
    for name in ("org.apache.spark.executor.Executor", "org.apache.spark.sql.execution.streaming.runtime.Stream"):
        log = jvm.org.slf4j.LoggerFactory.getLogger(name)
        log.error(f"a task of {name} failed", jvm.java.lang.RuntimeException("a mistake"))
        log.error(f"{name} failed", jvm.java.lang.RuntimeException("Job aborted", lost))
    lines = [line for line in log_of_spark().splitlines() if not line.startswith("\t")]
    assert lines == [
        "a task of org.apache.spark.executor.Executor failed",
        "java.lang.RuntimeException: a mistake",
        "a task of org.apache.spark.sql.execution.streaming.runtime.Stream failed",
        "java.lang.RuntimeException: a mistake",
        # That a query has ended is told, whatever has ended it.
        "org.apache.spark.sql.execution.streaming.runtime.Stream failed",
        "java.lang.RuntimeException: Job aborted",
        "Caused by: java.lang.RuntimeException: anabranch.core.errors.LostWorkerError: it cannot be reached",
    ]
