"""Places as Spark understands them: absolute, and with their file system."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from anabranch.core.errors import AnabranchError

FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
FILE_SYSTEM_BASED = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


class TemporaryFolder:
    """A folder of this machine for one query's checkpoint. It goes with the query, or with the process."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="anabranch-checkpoint-")
        #: Removes it; the second time nothing happens.
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def qualified(spark: SparkSession, path: str, *, what: str, error: type[AnabranchError]) -> str:
    """The path with its scheme, relative ones from the working directory; or an error that names what it is for."""
    jvm: Any = spark._jvm
    try:
        location = jvm.org.apache.hadoop.fs.Path(path)
        configuration = spark._jsc.hadoopConfiguration()
        text: str = location.getFileSystem(configuration).makeQualified(location).toString()
    except Exception as failure:
        reason = str(getattr(failure, "java_exception", failure)).splitlines()[0]
        raise error(f"{what} {path!r} cannot be used: {reason}. Use another location.") from None
    return text


@contextmanager
def fast_log_files(spark: SparkSession, location: str) -> Iterator[None]:
    """Queries that start meanwhile on a checkpoint of the local file system write Spark's own logs without a fork.

    By default Spark sets the permissions of each file with the command ``chmod``, which takes longer than all else
    that is done for a small epoch. Both ways write a temporary file and rename it. A user's own choice stays.
    """
    if not location.startswith("file:") or spark.conf.get(FILE_MANAGER, None) is not None:
        yield
        return
    spark.conf.set(FILE_MANAGER, FILE_SYSTEM_BASED)
    try:
        yield
    finally:
        spark.conf.unset(FILE_MANAGER)
