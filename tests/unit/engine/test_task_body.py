"""The body of a task: which partition it is, what it skips, and that state is written before rows go out."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from anabranch.core.errors import EpochError
from anabranch.engine.tasks import run_task


class Access:
    """Stands for a StageAccess; remembers what was opened."""

    def __init__(self, parallelism: int = 4, done: frozenset[int] = frozenset()) -> None:
        self.parallelism = parallelism
        self.done = done
        self.opened: list[tuple[int, int]] = []

    def open(self, *, partition: int, attempt: int) -> Any:
        self.opened.append((partition, attempt))
        return self


class EchoTask:
    """Gives back its rows, and remembers them."""

    def __init__(self) -> None:
        self.finished = False
        self.names: list[str] = []

    def __call__(self, batches: Sequence[pa.RecordBatch], state: Any) -> Iterator[pa.RecordBatch]:
        del state
        for batch in batches:
            self.names = batch.schema.names
            yield batch
        self.finished = True


@pytest.fixture
def _in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(partitionId=lambda: 1, taskAttemptId=lambda: 77)
    monkeypatch.setattr(TaskContext, "get", lambda: context)


def rows_of(partition: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"_partition": pa.array([partition] * count, pa.int32()), "k": pa.array(["a"] * count)})


@pytest.mark.usefixtures("_in_a_task")
def test_rows_tell_the_partition_whatever_number_the_task_has() -> None:
    access, task = Access(), EchoTask()
    out = list(run_task(access, task, [rows_of(3, 0), rows_of(3, 2), rows_of(3, 1)]))
    assert access.opened == [(3, 77)]
    assert task.names == ["k"]
    assert sum(batch.num_rows for batch in out) == 3


@pytest.mark.usefixtures("_in_a_task")
def test_a_partition_without_rows_is_the_task_s_own() -> None:
    access, task = Access(), EchoTask()
    assert list(run_task(access, task, [rows_of(0, 0)])) == []
    assert access.opened == [(1, 77)]
    assert task.finished


@pytest.mark.usefixtures("_in_a_task")
def test_state_is_written_before_the_first_row_goes_out() -> None:
    task = EchoTask()
    rows = run_task(Access(), task, [rows_of(2, 1), rows_of(2, 1)])
    next(rows)
    assert task.finished


@pytest.mark.usefixtures("_in_a_task")
def test_partitions_that_are_done_or_do_not_exist_are_left_alone() -> None:
    for access in (Access(done=frozenset({1})), Access(parallelism=1)):
        assert list(run_task(access, EchoTask(), [])) == []
        assert access.opened == []
    done = Access(done=frozenset({2}))
    assert list(run_task(done, EchoTask(), [rows_of(2, 5)])) == []
    assert done.opened == []


def test_outside_a_task_it_refuses() -> None:
    with pytest.raises(EpochError, match=r"outside a Spark task.*Use writeStream"):
        list(run_task(Access(), EchoTask(), []))
