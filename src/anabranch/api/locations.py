"""Places as Spark understands them: absolute, and with their file system."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from anabranch.core.errors import AnabranchError


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
