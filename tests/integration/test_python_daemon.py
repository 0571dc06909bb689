"""The daemon that Spark forks its Python task processes from: ours in local mode, unless the user has another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from anabranch.core.errors import SettingsError
from anabranch.engine.spark import python_daemon as pythondaemon

_SETTING = "spark.python.daemon.module"


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Any]:
    """The settings that Spark's runners of Python tasks go by, without the one in question, which comes back later."""
    conf = spark._jsc.sc().conf()
    before = conf.get(_SETTING, "")
    conf.remove(_SETTING)
    yield conf
    conf.set(_SETTING, before) if before else conf.remove(_SETTING)


def parents_of_tasks(spark: SparkSession) -> set[str]:
    """The command lines of the processes that task processes were forked from."""

    def body(batches: Any) -> Any:
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"parent": [Path(f"/proc/{os.getppid()}/cmdline").read_text()]})

    return {row.parent for row in spark.range(4).mapInArrow(body, "parent string").collect()}


def test_task_processes_come_from_our_daemon(spark: SparkSession, conf: Any) -> None:
    pythondaemon.use_own_daemon(spark)
    assert conf.get(_SETTING) == pythondaemon.MODULE
    assert all(pythondaemon.MODULE in parent for parent in parents_of_tasks(spark))


def test_what_the_user_has_set_stays(spark: SparkSession, conf: Any) -> None:
    conf.set(_SETTING, "pyspark.daemon")
    pythondaemon.use_own_daemon(spark)
    assert conf.get(_SETTING) == "pyspark.daemon"
    assert not any(pythondaemon.MODULE in parent for parent in parents_of_tasks(spark))


def bare_python(path: Path) -> Path:
    """A Python that has no packages at all."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    path.chmod(0o755)
    return path


#: With a watermark, so that Spark also asks a source that is written in Python for epochs without rows; with a function
#: of the user's, which keeps the Python that Spark has when it is first used; and with the same on a batch.
PROGRAM = """
import sys
import anabranch
from pyspark.sql import SparkSession, functions as F

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
spark.sparkContext.setLogLevel("OFF")
events = spark.readStream.schema("at timestamp, k string").parquet(sys.argv[1])
twice = F.udf(lambda text: text + text, "string")
windows = anabranch.stream(events).withColumn("k", twice("k")).withWatermark("at", "1 second")
counts = windows.groupBy(F.window("at", "1 minute"), "k").count()
query = counts.writeStream.outputMode("update").format("memory").queryName("counts").trigger(availableNow=True).start()
query.awaitTermination()
batch = anabranch.stream(spark.read.parquet(sys.argv[1])).groupBy("k").count().toDF()
print("found", *sorted((row.k, row["count"]) for row in [*spark.table("counts").collect(), *batch.collect()]))
"""


def test_tasks_run_with_the_python_of_the_program_though_its_environment_is_not_activated(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    bare_python(tmp_path / "bin" / "python3")
    (tmp_path / "input").mkdir()
    rows = pa.table({"at": [datetime(2026, 1, 1, tzinfo=UTC)] * 3, "k": ["a", "b", "a"]})
    pq.write_table(rows, tmp_path / "input" / "1.parquet")
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "program.py", str(tmp_path / "input")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "found ('a', 2) ('aa', 2) ('b', 1) ('bb', 1)"


def test_a_python_that_the_user_has_chosen_stays(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, conf: Any
) -> None:
    chosen_by_setting = "spark.pyspark.python"
    assert not conf.contains(chosen_by_setting)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "chosen by variable")
    monkeypatch.setenv("PYSPARK_PYTHON", "chosen by variable")
    try:
        conf.set(chosen_by_setting, "chosen by setting")
        pythondaemon.use_own_python(spark)
        assert spark.sparkContext.pythonExec == "chosen by variable"
        monkeypatch.delenv("PYSPARK_PYTHON")
        pythondaemon.use_own_python(spark)
        assert spark.sparkContext.pythonExec == "chosen by setting"
    finally:
        conf.remove(chosen_by_setting)
    pythondaemon.use_own_python(spark)
    assert spark.sparkContext.pythonExec == sys.executable


def test_a_python_without_the_package_is_refused(
    spark: SparkSession, conf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = bare_python(tmp_path / "python")
    for python in (bare, tmp_path / "nothing"):
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        with pytest.raises(SettingsError, match=f"PYSPARK_PYTHON={sys.executable}"):
            pythondaemon.use_own_daemon(spark)
    # Tasks may find it in a file that they are given; the daemon, which starts before, would not.
    monkeypatch.setattr(spark.sparkContext, "_python_includes", ["anabranch.zip"])
    pythondaemon.use_own_daemon(spark)
    assert not conf.contains(_SETTING)
