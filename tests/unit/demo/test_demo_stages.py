"""What the stages do with their rows: CPU time that is really used, counts that go on, junk that stays."""

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

from anabranch.demo.stages import CountPerServer, Work, burn_cpu


class FakeValue:
    def __init__(self) -> None:
        self.value: tuple[Any, ...] | None = None

    def get(self) -> tuple[Any, ...] | None:
        return self.value

    def update(self, value: tuple[Any, ...]) -> None:
        self.value = value


class FakeList:
    def __init__(self) -> None:
        self.elements: list[tuple[Any, ...]] = []

    def appendValue(self, element: tuple[Any, ...]) -> None:
        self.elements.append(element)


class FakeHandle:
    """The state of one key."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}

    def getValueState(self, name: str, schema: str) -> FakeValue:
        del schema
        return self.variables.setdefault(name, FakeValue())

    def getListState(self, name: str, schema: str) -> FakeList:
        del schema
        return self.variables.setdefault(name, FakeList())


TIME = datetime(2024, 1, 1)


def rows(count: int) -> Iterator[Row]:
    return iter([Row(server_name="a", ingestion_time=TIME)] * count)


def counts(processor: CountPerServer, count: int) -> list[int]:
    return [row.count_ for row in map(_renamed, processor.handleInputRows(("a",), rows(count), None))]


def _renamed(row: Any) -> Row:
    # A Row is a tuple, whose method `count` hides the field of that name.
    return Row(count_=row["count"])


def test_burning_uses_cpu_time() -> None:
    began_s = time.process_time()
    burn_cpu(0.05)
    assert time.process_time() - began_s >= 0.05


def test_burning_nothing_takes_no_time() -> None:
    began_s = time.process_time()
    for _ in range(1000):
        burn_cpu(0.0)
    assert time.process_time() - began_s < 0.05


def test_work_passes_rows_on_and_burns_for_each() -> None:
    batches = [pa.record_batch({"id": list(range(size))}) for size in (10, 0, 30)]
    began_s = time.process_time()
    assert list(Work(0.001)(batches)) == batches
    assert 0.04 <= time.process_time() - began_s < 0.2


def test_counts_go_on_from_the_state_with_a_row_for_each_row() -> None:
    processor, handle = CountPerServer(), FakeHandle()
    processor.init(handle)  # type: ignore[arg-type]
    assert counts(processor, 3) == [1, 2, 3]
    assert counts(processor, 2) == [4, 5]
    assert set(handle.variables) == {"count"}
    (row,) = processor.handleInputRows(("a",), rows(1), None)
    assert (row.server_name, row["count"], row.ingestion_time) == ("a", 6, TIME)


def test_counting_burns_cpu_for_each_row() -> None:
    processor = CountPerServer(cpu_s_per_row=0.005)
    processor.init(FakeHandle())  # type: ignore[arg-type]
    began_s = time.process_time()
    counts(processor, 10)
    assert time.process_time() - began_s >= 0.05


@pytest.mark.parametrize("junk_bytes", [1, 100])
def test_each_row_leaves_junk_that_is_the_same_when_an_epoch_is_run_again(junk_bytes: int) -> None:
    kept = []
    for _ in range(2):
        processor, handle = CountPerServer(junk_bytes=junk_bytes), FakeHandle()
        processor.init(handle)  # type: ignore[arg-type]
        counts(processor, 3)
        kept.append(handle.variables["junk"].elements)
    assert [len(junk) for (junk,) in kept[0]] == [junk_bytes] * 3
    assert kept[0] == kept[1]
    assert len(set(kept[0])) == 3 or junk_bytes == 1
