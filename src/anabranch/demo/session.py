"""A Spark for the demonstration: quiet, and gone afterwards."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.core.errors import AnabranchError, SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MAJOR_MIN = 17

_MASTER = re.compile(r"local(\[(\d+|\*)(,\d+)?\])?|local-cluster\[\d+,\d+,\d+\]|spark://.+|k8s://.+|yarn")
_JAVA_VERSION = re.compile(r'version "(\d+)')
_JAVA_ADVICE = "Install it (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or set JAVA_HOME."


def check_master(master: str) -> None:
    if _MASTER.fullmatch(master.replace(" ", "")) is None:
        raise SettingsError(
            f"--master is '{master}', which is no Spark master. Give something like 'local[2]' or spark://host:7077."
        )


def check_java() -> None:
    """Spark's own message about a missing Java is a stack trace."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    if java is None:
        where = f"in JAVA_HOME, which is {home}" if home else "on the path"
        raise AnabranchError(f"Java {JAVA_MAJOR_MIN} or newer is needed, and there is none {where}. {_JAVA_ADVICE}")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = _JAVA_VERSION.search(said)
    if found is not None and int(found[1]) < JAVA_MAJOR_MIN:
        raise AnabranchError(f"Java {JAVA_MAJOR_MIN} or newer is needed, but {java} is Java {found[1]}. {_JAVA_ADVICE}")


@contextmanager
def open_spark(master: str, *, parallelism: int, log: Path) -> Iterator[SparkSession]:
    """Start Spark, with everything that it and its tasks say going to a log file."""
    with tempfile.TemporaryDirectory(prefix="anabranch-demo-") as folder:
        try:
            with _errors_to(log):
                spark = _start(master, parallelism, Path(folder))
        except Exception as error:
            reason = str(getattr(error, "java_exception", error)).splitlines()[0]
            raise AnabranchError(f"Spark could not be started: {reason}. See {log}.") from error
        try:
            with _messages_to(log):
                yield spark
        finally:
            spark.stop()


def _start(master: str, parallelism: int, folder: Path) -> SparkSession:
    from pyspark.sql import SparkSession

    from anabranch.engine.spark import python_daemon as pythondaemon

    builder = (
        SparkSession.builder.master(master)
        .appName("anabranch-demo")
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .config("spark.log.level", "ERROR")
        # Over TCP every Python task waits some 40 ms for a delayed acknowledgement.
        .config("spark.python.unix.domain.socket.enabled", True)
        .config("spark.python.daemon.module", pythondaemon.MODULE)
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", parallelism)
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.driver.extraJavaOptions", f'-Duser.timezone=UTC "-Dderby.system.home={folder}"')
    )
    if master.startswith("local"):
        # Tasks import this package, so they run in the Python that has it.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        builder = (
            builder.config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.local.dir", str(folder / "local"))
        )
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


@contextmanager
def _messages_to(path: Path) -> Iterator[None]:
    """What this package logs goes to a file: on the terminal it would run into the view."""
    ours = logging.getLogger("anabranch")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    former = ours.propagate
    ours.addHandler(handler)
    ours.propagate = False
    try:
        yield
    finally:
        ours.propagate = former
        ours.removeHandler(handler)
        handler.close()


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """What processes started meanwhile write as errors goes to a file: they keep the descriptor that they inherit."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
