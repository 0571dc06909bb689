"""The daemon that Spark forks its Python task processes from: ours in local mode, unless the user has another."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from anabranch.core.errors import SettingsError
from anabranch.engine import pythondaemon

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


def test_a_python_without_the_package_is_refused(
    spark: SparkSession, conf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    for python in (bare, tmp_path / "nothing"):
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        with pytest.raises(SettingsError, match=f"PYSPARK_PYTHON={sys.executable}"):
            pythondaemon.use_own_daemon(spark)
    # Tasks may find it in a file that they are given; the daemon, which starts before, would not.
    monkeypatch.setattr(spark.sparkContext, "_python_includes", ["anabranch.zip"])
    pythondaemon.use_own_daemon(spark)
    assert not conf.contains(_SETTING)
