"""The classes that Spark loads, in an archive: JVMs that tests start map it rather than search and read 300 jars.

A driver that runs one small query needs 8 instead of 13 seconds of a processor with it, and tests start dozens. The
archive is good for one class path, one Java and one Spark only, so it is made on this machine, once, beside the
packages of the virtual environment. It is not needed: whatever goes wrong, tests do without it and take longer.
Run as a program, this makes it, so that tests do not have to wait for it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: JVMs of tests live for seconds: they do more in them without the second compiler and without threads for garbage.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: One place for all JVMs, because the archive holds for one class path only.
_FOLDER = Path(sys.prefix) / "spark-of-tests"
_SPARK = Path(pyspark.__file__).parent
_TIME_LIMIT_S = 180


def environment(folder: Path) -> dict[str, str]:
    """What JVMs need in their environment to use the archive, which is made if there is none.

    Spark hands the options on without the line that Java itself prints if it takes options from the environment.
    """
    home, archive = _home_and_archive(folder)
    options = SHORT_LIVED if archive is None else f"{SHORT_LIVED} {_reading(archive)}"
    return {"SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": options}


def _reading(archive: Path) -> str:
    """Java says nothing of an archive that it cannot use, and does without it."""
    silent = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
    # At the address that it was made for: to move it to another one takes longer than to read some of the classes.
    return f"-XX:SharedArchiveFile={archive} {silent} -XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0"


def _home_and_archive(folder: Path) -> tuple[Path, Path | None]:
    # Options are separated by spaces; and what is no virtual environment is not ours to write into.
    if sys.prefix != sys.base_prefix and not any(map(str.isspace, str(_FOLDER))):
        with suppress(OSError, subprocess.SubprocessError):
            _FOLDER.mkdir(exist_ok=True)
            # Processes that run tests side by side start at once: one makes the archive, and the others wait for it.
            with (_FOLDER / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                home = _link_home(_FOLDER / "home")
                return home, _archive(home)
    return _link_home(folder / "home"), None


def _link_home(home: Path) -> Path:
    """Spark without its zipped Python packages: each Python process would compile them, rather than import its own."""
    home.mkdir(exist_ok=True)
    for part in _SPARK.iterdir():
        link = home / part.name
        if part.name != "python" and not (link.is_symlink() and link.readlink() == part):
            link.unlink(missing_ok=True)
            link.symlink_to(part)
    return home


def _archive(home: Path) -> Path | None:
    archive, made_of = _FOLDER / "classes.jsa", _FOLDER / "made-of.txt"
    versions = _versions()
    if not (archive.exists() and made_of.exists() and made_of.read_text() == _sized(archive, versions)):
        made_of.unlink(missing_ok=True)
        if not _make(archive, home):
            return None
        made_of.write_text(_sized(archive, versions))
    return archive


def _sized(archive: Path, versions: str) -> str:
    """Java looks into an archive before it uses it, but one that was cut off makes it crash."""
    return f"{archive.stat().st_size} bytes\n{versions}"


def _versions() -> str:
    """What the archive is good for, and made from: Java, Spark's jars, and the queries below."""
    java = Path(os.environ["JAVA_HOME"]) / "bin" / "java" if "JAVA_HOME" in os.environ else "java"
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True, timeout=_TIME_LIMIT_S)
    jars = [(jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in sorted((_SPARK / "jars").iterdir())]
    return "\n".join([said.stderr, *map(str, jars), Path(__file__).read_text()])


def _make(archive: Path, home: Path) -> bool:
    """Run small queries in a JVM that writes the classes it has loaded into the archive when it ends."""
    unfinished = archive.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "SPARK_HOME": str(home),
            "SPARK_SUBMIT_OPTS": f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={unfinished}",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "TZ": "UTC",
        }
        command = [sys.executable, __file__, folder]
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, check=False, timeout=_TIME_LIMIT_S
        )
    if done.returncode or not unfinished.exists():
        return False
    unfinished.rename(archive)
    return True


# ---------------------------------------------------------------------------------- what the JVM of the archive runs


def _run_queries(spark: SparkSession, folder: Path) -> None:
    """A bit of what most tests do: a source of files, a stage in Python, an aggregate of ours and one of Spark's."""
    from pyspark.sql import functions as F

    import anabranch

    spark.range(40).withColumn("k", F.col("id") % 7).write.parquet(str(folder / "input"))
    source = spark.readStream.schema("id long, k long").parquet(str(folder / "input"))

    def keep(found: DataFrame, epoch: int) -> None:  # noqa: ARG001
        found.collect()

    def same(frames: Any) -> Any:
        return frames

    def counted(stream: Any) -> Any:
        return stream.groupBy("k").agg(F.count("*").alias("n"), F.sum("id").alias("total"))

    ours = counted(anabranch.stream(source).mapInPandas(same, source.schema))
    for name, stream in {"ours": ours, "native": counted(source)}.items():
        writer = stream.writeStream.outputMode("update").foreachBatch(keep)
        query = writer.option("checkpointLocation", str(folder / name)).trigger(availableNow=True).start()
        query.awaitTermination(_TIME_LIMIT_S)
        query.stop()


def _main(folder: Path) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", False)
    settings = {"spark.local.dir": folder / "local", "spark.sql.warehouse.dir": folder / "warehouse"}
    for name, value in settings.items():
        builder = builder.config(name, str(value))
    spark = builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
    process = spark.sparkContext._gateway.proc
    _run_queries(spark, folder)
    spark.stop()
    # The JVM ends, and writes the archive, when nobody can write to it any more.
    process.stdin.close()
    sys.exit(process.wait(_TIME_LIMIT_S))


if __name__ == "__main__":
    if sys.argv[1:]:
        _main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as elsewhere:
            environment(Path(elsewhere))
