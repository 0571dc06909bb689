"""Spark's classes in the JVM, by name."""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaClass
from pyspark import SparkContext

from anabranch.core.errors import UnsupportedError


def java_class(name: str) -> Any:
    """A class or Scala object by its full name.

    Py4J's own way to it, ``jvm.org.apache…``, asks the JVM about each part, and the JVM then looks for a class of that
    name in every jar: milliseconds, for each part.
    """
    gateway: Any = SparkContext._gateway
    if gateway is None:
        raise UnsupportedError("There is no active Spark context. Create a SparkSession first.")
    return JavaClass(name, gateway._gateway_client)


def is_a(node: Any, name: str) -> bool:
    """Whether an object is of a class or trait, by its full name."""
    return bool(java_class("py4j.reflection.TypeUtil").isInstanceOf(name, node))
