"""What tests of every kind may ask for: a small Spark, started once."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# How long an example takes says more about the machine than about the code.
settings.register_profile("anabranch", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("anabranch")


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens of the jobs of tests are not among those of the user who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def _utc() -> Iterator[None]:
    """The time zone of this process and of those it starts: Spark's Python side converts times with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(scope="session")
def _quick_java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """JVMs of this process, and of those it starts, find Spark's classes in an archive."""
    from support import class_archive

    with pytest.MonkeyPatch.context() as patch:
        for name, value in class_archive.environment(tmp_path_factory.mktemp("java")).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def _remembered_classes() -> Iterator[None]:
    """Names of the JVM that were looked up once: PySpark asks for the same few with every column and every query, and
    the JVM searches each of its 300 jars for some of them."""
    from py4j.java_gateway import JavaClass, JVMView

    look_up = JVMView.__getattr__
    # What is no class is taken for a package, also if it is a class that is imported later; these are packages.
    packages = {"java", "org", "py4j"}

    def remember(self: JVMView, name: str) -> object:
        found = look_up(self, name)
        if isinstance(found, JavaClass) or name in packages:
            self.__dict__[name] = found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JVMView, "__getattr__", remember)
        yield


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory, _utc: None, _quick_java: None, _remembered_classes: None
) -> "Iterator[SparkSession]":
    """A local Spark with two cores, which runs a failing task four times, as a cluster does."""
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
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
            # An idle query looks for new files every 10 ms otherwise, which takes a quarter of a core.
            .config("spark.sql.streaming.pollingDelay", "40ms")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("ERROR")
        yield session
        session.stop()
