"""The error that ended a query: as Anabranch raised it, which says what to do, and caught as Spark's is."""

from __future__ import annotations

import functools
import re
from typing import Any

from pyspark.errors.exceptions.captured import StreamingQueryException

from anabranch.core import errors
from anabranch.core.errors import AnabranchError
from anabranch.engine.loop import EpochLoop

#: How an error of ours that a task raised begins within Spark's report of it, and what comes after its message.
_TASK_ERROR = re.compile(r"anabranch\.core\.errors\.(\w+): ")
#: What Spark says where it finds another query's entry in its log of offsets or commits, or in that of a source.
_ANOTHER_QUERY = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "Multiple streaming jobs detected",
    "Multiple streaming queries are concurrently using",
)
_END_OF_MESSAGE = re.compile(r"\s+SQLSTATE: |\n\tat |\n=== |\n\nDuring handling of |\n\nThe above exception was ")


def explained(loop: EpochLoop, error: Exception) -> Exception:
    """The error as Anabranch raised it; Spark's own wraps it in stack traces."""
    ours = loop.error if isinstance(loop.error, AnabranchError) else _raised_in_task(str(error))
    if ours is None and is_of_another_query(error):
        ours = loop.fenced()
    return error if ours is None else as_failure(ours, error)


def is_of_another_query(error: Exception) -> bool:
    """Whether Spark's query failed because another one on the same checkpoint has written into its logs."""
    return any(text in str(error) for text in _ANOTHER_QUERY)


def as_failure(ours: AnabranchError, report: Exception | None = None) -> Exception:
    """An error of ours that ends a query, which is caught as Spark's as well; with Spark's report, if there is one."""
    kind: Any = type(ours)
    failure: Exception = _both(kind)(str(ours), report)
    return failure


class _SparkFailure(StreamingQueryException):
    """Spark's error of a failed query, with a text of ours. Its cause, condition and traces are Spark's."""

    def __init__(self, message: str, report: Any) -> None:
        Exception.__init__(self, message)
        self._desc: str = getattr(report, "_desc", message)
        self._stackTrace: str = getattr(report, "_stackTrace", "")
        self._cause: Any = getattr(report, "_cause", None)
        self._origin: Any = getattr(report, "_origin", None)
        self._text = message

    def __str__(self) -> str:
        return self._text


@functools.cache
def _both(kind: Any) -> Any:
    """The same kind of error, which programs that were written for Spark catch as well."""
    return type(kind.__name__, (kind, _SparkFailure), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _raised_in_task(report: str) -> AnabranchError | None:
    """The error of ours that ended a task, if it was one; of several in a chain, the last."""
    for found in reversed(list(_TASK_ERROR.finditer(report))):
        kind = getattr(errors, found[1], None)
        if isinstance(kind, type) and issubclass(kind, AnabranchError):
            return kind(_END_OF_MESSAGE.split(report[found.end() :], maxsplit=1)[0].strip())
    return None
