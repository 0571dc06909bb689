"""Spark's Python daemon, with everything that a task needs imported before it forks.

Spark forks a process for a Python task when none is free, and gives up one whose task has failed. Each then imports
NumPy, Arrow and this package anew, for some tenths of a second: in the first epoch, and in one that loses a worker.
With ``spark.python.daemon.module=anabranch.operators.daemon`` it finds them there. In local mode, queries see to that
themselves (engine/spark/python_daemon.py).
"""

from __future__ import annotations

import gc

import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import anabranch.operators.aggregate.stage
import anabranch.operators.dedup
import anabranch.operators.join.task
import anabranch.operators.process.groupstate
import anabranch.operators.process.rows
import anabranch.operators.process.stage
import anabranch.operators.session
import anabranch.operators.vectorised  # noqa: F401

if __name__ == "__main__":
    # Shared by all children: what is here is never garbage, and must not be copied by a look for it.
    gc.collect()
    gc.freeze()
    manager()
