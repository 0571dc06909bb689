"""Places as Spark's file systems see them: absolute, with their scheme; and how Spark writes its own log files."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from anabranch.core.errors import AnabranchError
from anabranch.engine.spark.java import error_text

FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
FILE_SYSTEM_BASED = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


class TemporaryFolder:
    """A folder of this machine for one query's checkpoint. It goes with the query, or with the process."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="anabranch-checkpoint-")
        #: Removes the folder; the second time nothing happens.
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def qualified(spark: SparkSession, path: str, *, what: str, error: type[AnabranchError]) -> str:
    """Returns the path with its scheme, relative ones from the working directory.

    Raises an error of the given kind, which names what the path is for, if no file system knows it.
    """
    try:
        place, files = _found(spark, path)
        text: str = files.makeQualified(place).toString()
    except Exception as failure:
        raise error(f"{what} {path!r} cannot be used: {error_text(failure)}. Use another location.") from None
    return text


def exists(spark: SparkSession, path: str) -> bool:
    """Tells whether there is a file or a folder of this path."""
    place, files = _found(spark, path)
    return bool(files.exists(place))


def any_exists(spark: SparkSession, pattern: str) -> bool:
    """Tells whether any path matches a pattern such as ``folder/epoch=*``."""
    place, files = _found(spark, pattern)
    return bool(files.globStatus(place))


def delete_folder(spark: SparkSession, path: str) -> None:
    """Deletes a folder and all that is in it; one that is gone already is as good."""
    place, files = _found(spark, path)
    files.delete(place, True)


def make_folder(spark: SparkSession, path: str) -> list[str]:
    """Makes a folder, with those above it, unless it exists, and returns the names of what is in it."""
    place, files = _found(spark, path)
    files.mkdirs(place)
    return [str(entry.getPath().getName()) for entry in files.listStatus(place)]


def _found(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """Returns Hadoop's path, and the file system that it is on."""
    jvm: Any = spark._jvm
    place = jvm.org.apache.hadoop.fs.Path(path)
    return place, place.getFileSystem(spark._jsc.hadoopConfiguration())


@contextmanager
def fast_log_files(spark: SparkSession, location: str) -> Iterator[None]:
    """Lets queries that start meanwhile on a checkpoint of the local file system write Spark's own logs without a fork.

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
