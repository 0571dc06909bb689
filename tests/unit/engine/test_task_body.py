"""The body of a task: which partition it is, what it skips, and that state is written before rows go out."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from anabranch.core.errors import EpochError
from anabranch.engine.tasks import TaskEpoch, run_task


class Access:
    """Stands for a StageAccess; remembers what was opened."""

    def __init__(self, parallelism: int = 4) -> None:
        self.parallelism = parallelism
        self.stage = SimpleNamespace(number=5)
        self.opened: list[tuple[int, int, int, int]] = []
        self.noted: list[Any] = []

    def open(self, *, epoch: int, run: int, partition: int, attempt: int) -> Any:
        self.opened.append((epoch, run, partition, attempt))
        return self

    def note_rows(self, hashes: list[Any]) -> None:
        self.noted = hashes


class EchoTask:
    """Gives back its rows, and remembers them."""

    def __init__(self) -> None:
        self.finished = False
        self.names: list[str] = []

    def __call__(self, batches: Sequence[pa.RecordBatch], state: Any, epoch: TaskEpoch) -> Iterator[pa.RecordBatch]:
        del state, epoch
        for batch in batches:
            self.names = batch.schema.names
            yield batch
        self.finished = True


class Spark:
    """Stands for Spark on both sides of a local property: the session that sets it, and the task that reads it."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.properties: dict[str, str] = {}

    def setLocalProperty(self, name: str, value: str) -> None:
        self.properties[name] = value

    def getLocalProperty(self, name: str) -> str | None:
        return self.properties.get(name)

    def partitionId(self) -> int:
        return 1

    def taskAttemptId(self) -> int:
        return 77


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Any:
    spark = Spark()
    monkeypatch.setattr(TaskContext, "get", lambda: spark)
    return spark


@pytest.fixture
def _in_a_task(spark: Any) -> None:
    TaskEpoch(epoch=8, run=3, processing_time_ms=0).announce(spark)


def rows_of(partition: int, count: int) -> pa.RecordBatch:
    columns = {"_partition": pa.array([partition] * count, pa.int32()), "_hash": pa.array(range(count), pa.int64())}
    return pa.record_batch({**columns, "k": pa.array(["a"] * count)})


@pytest.mark.usefixtures("_in_a_task")
def test_rows_tell_the_partition_whatever_number_the_task_has() -> None:
    access, task = Access(), EchoTask()
    out = list(run_task(access, task, [rows_of(3, 0), rows_of(3, 2), rows_of(3, 1)]))
    assert access.opened == [(8, 3, 3, 77)]
    assert task.names == ["_hash", "k"]
    assert [hashes.tolist() for hashes in access.noted] == [[0, 1], [0]]
    assert sum(batch.num_rows for batch in out) == 3


@pytest.mark.usefixtures("_in_a_task")
def test_a_partition_without_rows_is_the_task_s_own() -> None:
    access, task = Access(), EchoTask()
    assert list(run_task(access, task, [rows_of(0, 0)])) == []
    assert access.opened == [(8, 3, 1, 77)]
    assert task.finished


@pytest.mark.usefixtures("_in_a_task")
def test_state_is_written_before_the_first_row_goes_out() -> None:
    task = EchoTask()
    rows = run_task(Access(), task, [rows_of(2, 1), rows_of(2, 1)])
    next(rows)
    assert task.finished


def test_partitions_that_are_done_or_do_not_exist_are_left_alone(spark: Any) -> None:
    TaskEpoch(epoch=8, run=3, processing_time_ms=0, done={5: frozenset({1, 2}), 6: frozenset({3})}).announce(spark)
    access, few = Access(), Access(parallelism=1)
    assert list(run_task(access, EchoTask(), [])) == []
    assert list(run_task(access, EchoTask(), [rows_of(2, 5)])) == []
    assert list(run_task(few, EchoTask(), [])) == []
    assert access.opened == few.opened == []
    list(run_task(access, EchoTask(), [rows_of(3, 1)]))
    assert access.opened == [(8, 3, 3, 77)]


def test_a_task_is_told_all_about_its_epoch(spark: Any) -> None:
    epoch = TaskEpoch(epoch=8, run=3, processing_time_ms=1_700_000_000_000, watermark_ms=5, done={5: frozenset({1, 2})})
    epoch.announce(spark)
    assert TaskEpoch.of(spark) == epoch


@pytest.mark.usefixtures("spark")
def test_outside_its_epoch_it_refuses() -> None:
    with pytest.raises(EpochError, match=r"outside its epoch.*foreachBatch"):
        list(run_task(Access(), EchoTask(), []))
    with pytest.raises(EpochError, match="outside its epoch"):
        TaskEpoch.of(None)
