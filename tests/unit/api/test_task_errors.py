"""Errors of ours come back from tasks as what they are, out of whatever Spark wraps around them."""

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.api.failures import _raised_in_task, explained
from anabranch.core.errors import AnabranchError, EpochError, FencedError, LostWorkerError, WorkerError

REPORT = """[STREAM_FAILED] Query [id = 1] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] An error
  File "tasks.py", line 40, in run_task
    yield from list(task(rows, state))
pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "client.py", line 52, in call
    raise self._translate(error, request, limit_s) from None
{error}
 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 1]
"""


@pytest.mark.parametrize("kind", [WorkerError, LostWorkerError, EpochError])
def test_an_error_keeps_its_kind_and_message(kind: type[AnabranchError]) -> None:
    found = _raised_in_task(REPORT.format(error=f"anabranch.core.errors.{kind.__name__}: The worker at a:1. Do this."))
    assert type(found) is kind
    assert str(found) == "The worker at a:1. Do this."


def test_a_message_of_several_lines_is_whole() -> None:
    text = (
        'Stage stage1: Tally failed in init: ValueError: no\n  File "job.py", line 3, in init\nCorrect the processor.'
    )
    found = _raised_in_task(REPORT.format(error=f"anabranch.core.errors.EpochError: {text}"))
    assert str(found) == text


def test_a_stack_of_the_jvm_ends_the_message() -> None:
    found = _raised_in_task(
        "x: anabranch.core.errors.EpochError: It failed.\n\n\tat org.apache.spark.Some.call(Some.scala:1)"
    )
    assert str(found) == "It failed."


def test_of_several_errors_the_last_counts() -> None:
    link = "\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback:\n  File x\n"
    chain = f"anabranch.core.errors.LostWorkerError: first.{link}anabranch.core.errors.EpochError: second."
    assert str(_raised_in_task(chain)) == "second."
    chain = f"anabranch.core.errors.LostWorkerError: first.{link}ValueError: anything"
    assert str(_raised_in_task(chain)) == "first."


@pytest.mark.parametrize(
    "error", ["ValueError: no", "anabranch.core.errors.annotations: x", "anabranch.core.errors.Gone: x"]
)
def test_other_errors_are_left_as_they_are(error: str) -> None:
    assert _raised_in_task(REPORT.format(error=error)) is None


def test_what_spark_finds_of_another_query_is_put_down_to_the_newer_driver() -> None:
    fenced = FencedError("A newer driver has taken over the job.")
    loop: Any = SimpleNamespace(error=None, fenced=lambda: fenced)
    another = RuntimeError("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log.")
    assert isinstance(explained(loop, another), FencedError)
    assert str(explained(loop, another)) == str(fenced)
    loop.fenced = lambda: None
    assert explained(loop, another) is another
    loop.fenced = lambda: fenced
    other = RuntimeError("The disk is full.")
    assert explained(loop, other) is other
