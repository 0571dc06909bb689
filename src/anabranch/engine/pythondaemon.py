"""Which daemon Spark forks its Python task processes from: ours has imported what the tasks of a query need."""

from __future__ import annotations

import logging
import os
import subprocess
from typing import Any

from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

MODULE = "anabranch.operators.daemon"
_SETTING = "spark.python.daemon.module"
_FIND_MODULE = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({MODULE.split('.')[0]!r}) is None)"
_LIMIT_S = 10.0


def use_own_daemon(spark: SparkSession) -> None:
    """Let task processes start from our daemon from now on, if Spark runs them on this machine, for this driver only.

    Executors elsewhere have settings of their own, from when they were started: only the user can set it there. What
    the user has set stays.
    """
    jvm: Any = spark._jvm
    context = spark._jsc.sc()
    if not context.isLocal():
        return
    conf = context.conf()
    if conf.contains(_SETTING):
        return
    if _can_import(str(spark.sparkContext.pythonExec), jvm.System.getenv("PYTHONPATH")):
        conf.set(_SETTING, MODULE)


def _can_import(python: str, path: str | None) -> bool:
    """Whether a daemon of that Python finds this package. It may have been given to Spark as a file, for tasks only."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = path
    try:
        done = subprocess.run([python, "-c", _FIND_MODULE], env=environment, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("%s cannot be asked for this package: %s", python, error)
        return False
    return done.returncode == 0
