"""Spark's log of a lost worker: without the stack traces of its tasks, because the query's own lines say what happened.

An epoch that loses a worker fails, and runs again. To Spark that is the failure of a job, of which executor, scheduler,
block manager and sink log all they know, each a hundred lines and more.
"""

from __future__ import annotations

import logging
from typing import Any

from pyspark.sql import SparkSession

from anabranch.engine.runner import LOST_WORKER
from anabranch.engine.spark.java import JvmCallError, is_a, java_class

logger = logging.getLogger(__name__)

_NAME = "AnabranchLossFilter"
#: Spark has a compiler for the code that it generates, and for this: a filter of its log must be a Java class.
_SOURCE = f"""
import org.apache.logging.log4j.core.LogEvent;
import org.apache.logging.log4j.core.filter.AbstractFilter;

public class {_NAME} extends AbstractFilter {{
    public Result filter(LogEvent event) {{
        // That a query has ended is told, whatever has ended it.
        if (event.getLoggerName().startsWith("org.apache.spark.sql.execution.streaming.")) return Result.NEUTRAL;
        if (tells(event.getMessage().getFormattedMessage())) return Result.DENY;
        int depth = 0;
        for (Throwable thrown = event.getThrown(); thrown != null && depth < 20; thrown = thrown.getCause()) {{
            if (tells(thrown.getMessage())) return Result.DENY;
            depth++;
        }}
        return Result.NEUTRAL;
    }}

    private static boolean tells(String text) {{
        return text != null && text.indexOf("{LOST_WORKER}") >= 0;
    }}
}}
"""
_LOGGER_CONTEXT = "org.apache.logging.log4j.core.LoggerContext"


def leave_out_lost_workers(spark: SparkSession) -> None:
    """Lets Spark's log in this driver leave out what failed because of a lost worker, if that is possible."""
    try:
        context = java_class("org.apache.logging.log4j.LogManager").getContext(False)
        if not is_a(context, _LOGGER_CONTEXT):
            return  # the user logs with something else
        root = context.getConfiguration().getRootLogger()
        if _NAME not in str(root.getFilter()):
            root.addFilter(_compiled(spark))
    except JvmCallError as error:
        logger.debug("Spark's log tells of lost workers at length: %s", error)


def _compiled(spark: SparkSession) -> Any:
    jvm: Any = spark._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook(_SOURCE)
    found = compiler.getClassLoader().loadClass(_NAME)
    gateway: Any = spark.sparkContext._gateway
    return found.getConstructors()[0].newInstance(gateway.new_array(jvm.Object, 0))
