"""Spark's JVM: its classes by name, its errors, and the session that it has for one of ours."""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from anabranch.core.errors import UnsupportedError

#: Anything that goes wrong with a call of the JVM: its own error, or that the JVM is gone.
JvmCallError = Py4JError
#: An error that was raised in the JVM.
JvmError = Py4JJavaError


class InterruptedBySparkError(Exception):
    """Spark has interrupted the wait of an epoch for its turn, to stop the query.

    Spark tells a stop from a failure by this very text. The original error has it too, but with a stack trace so long
    that Spark's search for the text overflows its own stack.
    """

    def __init__(self) -> None:
        super().__init__(
            "py4j.protocol.Py4JJavaError: An error occurred while calling sleep.\n: java.lang.InterruptedException"
        )


def java_class(name: str) -> Any:
    """Returns a class or Scala object by its full name.

    Py4J's own way to it, ``jvm.org.apache…``, asks the JVM about each part, and the JVM then looks for a class of that
    name in every jar: milliseconds, for each part.
    """
    gateway: Any = SparkContext._gateway
    if gateway is None:
        raise UnsupportedError("There is no active Spark context. Create a SparkSession first.")
    return JavaClass(name, gateway._gateway_client)


def is_a(node: Any, name: str) -> bool:
    """Tells whether an object is of a class or trait, by its full name."""
    return bool(java_class("py4j.reflection.TypeUtil").isInstanceOf(name, node))


def error_text(error: Exception) -> str:
    """Returns the first line of an error, as the JVM has it if it was raised there."""
    return str(getattr(error, "java_exception", error)).splitlines()[0]


def has_own_jvm(spark: SparkSession) -> bool:
    """Tells whether a session has its JVM here, as all have but those of Spark Connect."""
    return hasattr(spark, "_jsparkSession")


def jvm_session(spark: SparkSession) -> Any:
    """Returns Spark's own session, which is another one for each query that it starts."""
    return spark._jsparkSession


def jvm_number(spark: SparkSession) -> int:
    """Returns a number that tells apart the JVMs that this process has used."""
    return id(spark._jvm)


def wait_for_interrupt(spark: SparkSession, interval_ms: int) -> None:
    """Waits a moment; raises InterruptedBySparkError if Spark interrupts the thread meanwhile, to stop the query.

    The wait is in the JVM, in the very thread that Spark interrupts: a wait on this side would keep Spark from
    stopping.
    """
    jvm: Any = spark._jvm
    try:
        jvm.java.lang.Thread.sleep(interval_ms)
    except JvmError:
        raise InterruptedBySparkError from None
