"""What tests of every kind may ask for: a small Spark, started once."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long an example takes says more about the machine than about the code.
settings.register_profile("anabranch", deadline=None)
settings.load_profile("anabranch")


@pytest.fixture(scope="session")
def _utc() -> Iterator[None]:
    """The time zone of this process and of those it starts: Spark's Python side converts times with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def _home_of_spark(folder: Path) -> Path:
    """Spark without its zipped Python packages: each Python process would compile them, rather than import its own."""
    import pyspark

    folder.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name != "python":
            (folder / part.name).symlink_to(part)
    return folder


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, _utc: None) -> "Iterator[SparkSession]":
    """A local Spark with two cores, which runs a failing task four times, as a cluster does."""
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        patch.setenv("SPARK_HOME", str(_home_of_spark(folder / "home")))
        session = (
            SparkSession.builder.master("local[2,4]")
            .appName("anabranch-tests")
            .config("spark.ui.enabled", False)
            .config("spark.ui.showConsoleProgress", False)
            .config("spark.driver.memory", "2g")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            # Queries here live for seconds: all of it is faster without the second compiler. Without it, the JVM has
            # room for 48 MiB of compiled code, which hundreds of queries fill, and then takes it away again and again.
            .config(
                "spark.driver.extraJavaOptions",
                "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -Xms1g -Xmn600m "
                f'-Djdk.lang.Process.launchMechanism=VFORK -Duser.timezone=UTC "-Dderby.system.home={folder}"',
            )
            .config("spark.local.dir", str(folder / "local"))
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .config("spark.sql.shuffle.partitions", 2)
            # For a few rows, to compile an expression takes longer than to interpret it. (The drivers of tests with
            # processes of their own compile.)
            .config("spark.sql.codegen.wholeStage", False)
            .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("ERROR")
        yield session
        session.stop()
