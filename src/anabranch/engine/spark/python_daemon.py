"""The Python that Spark runs tasks with: it must have this package, and it forks from a daemon that has loaded it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

from pyspark.sql import SparkSession

from anabranch.core.errors import SettingsError

logger = logging.getLogger(__name__)

MODULE = "anabranch.operators.daemon"
_SETTING = "spark.python.daemon.module"
_FIND_MODULE = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({MODULE.split('.')[0]!r}) is None)"
_LIMIT_S = 10.0
#: How users choose the Python of tasks.
_CHOSEN_BY_VARIABLE = "PYSPARK_PYTHON"
_CHOSEN_BY_SETTING = "spark.pyspark.python"


def use_own_daemon(spark: SparkSession) -> None:
    """Lets task processes start from our daemon from now on, if Spark runs them on this machine.

    Executors elsewhere have settings of their own, from when they were started: only the user can set it there. A
    choice of the user's stays. SettingsError if tasks here would not find this package at all.
    """
    jvm: Any = spark._jvm
    context = spark._jsc.sc()
    if not context.isLocal():
        return
    use_own_python(spark)
    conf = context.conf()
    if conf.contains(_SETTING):
        return
    python = str(spark.sparkContext.pythonExec)
    if _can_import(python, jvm.System.getenv("PYTHONPATH")):
        conf.set(_SETTING, MODULE)
    elif not spark.sparkContext._python_includes:  # files that Spark gives to tasks may have it
        raise SettingsError(
            f"Spark runs the tasks of this session with {python!r}, which does not find the package anabranch. Start "
            f"Python with the environment variable PYSPARK_PYTHON={sys.executable}, or activate its environment first."
        )


def use_own_python(spark: SparkSession) -> None:
    """Lets tasks on this machine run with the Python that this program runs with, unless the user has chosen one.

    Spark takes the ``python3`` of the PATH, which is another one if the environment of this one is not activated. A
    function of the user's keeps the Python of the moment in which Spark first wraps it, so this comes early.
    """
    context = spark._jsc.sc()
    if os.environ.get(_CHOSEN_BY_VARIABLE) or not context.isLocal():
        return
    # Unless the program was started by spark-submit, Spark has this setting and does not look at it.
    chosen = str(context.conf().get(_CHOSEN_BY_SETTING, ""))
    spark.sparkContext.pythonExec = chosen or sys.executable or spark.sparkContext.pythonExec


def _can_import(python: str, path: str | None) -> bool:
    """Tells whether a daemon of that Python finds this package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = path
    try:
        done = subprocess.run([python, "-c", _FIND_MODULE], env=environment, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("%s cannot be asked for this package: %s", python, error)
        return False
    return done.returncode == 0
