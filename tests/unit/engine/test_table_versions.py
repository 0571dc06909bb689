"""Versions of broadcast tables: sent once, kept while an epoch may need them, then gone from driver and disk."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from py4j.protocol import Py4JError

from anabranch.engine.tables import TableKeeper

KEYS = {"rules": ("id",)}


class Content:
    """Stands for Spark's broadcast variable."""

    def __init__(self, sent: list["Content"]) -> None:
        self.is_destroyed = False
        sent.append(self)

    def unpersist(self, *, blocking: bool) -> None:
        """Its file stays."""

    def destroy(self, *, blocking: bool) -> None:
        assert not blocking
        assert not self.is_destroyed
        self.is_destroyed = True
        raise FileNotFoundError("Spark's JVM was faster")


class Stage:
    """A stage with one table, whose rows are the numbers that have arrived."""

    spec = SimpleNamespace(number=1)
    table_keys = KEYS
    sources = (0, 1)
    key_hash = 0

    def __init__(self) -> None:
        self.state = pa.table({"id": pa.array([], pa.int64())})

    def rows_of_tables(self, rows: Any) -> Any:
        return SimpleNamespace(toArrow=lambda: pa.table({"id": pa.array(rows, pa.int64())}))

    def stored(self, _state: Any) -> dict[str, pa.Table]:
        return {"rules": self.state}

    def update(self, before: Mapping[str, pa.Table], arrived: pa.Table) -> Any:
        return {"rules": pa.concat_tables([before["rules"], arrived])}, {}


class Driver:
    """Runs epochs with tables."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.keeper = TableKeeper(self.stage, bytes_max=1 << 20)  # type: ignore[arg-type]
        self.sent: list[Content] = []
        context = SimpleNamespace(broadcast=lambda _: Content(self.sent))
        self.spark: Any = SimpleNamespace(sparkContext=context)

    def begin(self, epoch: int, rows: list[int]) -> Content:
        """An epoch whose tasks read the table; what they are sent."""
        state = SimpleNamespace(write=lambda _: None)
        access = SimpleNamespace(key_groups=1, parallelism=1, partitions=np.array([0]), open=lambda **_: state)
        task_epoch: Any = SimpleNamespace(epoch=epoch, run=0)
        self.keeper.begin(rows, {1: access}, task_epoch, may_change=True)  # type: ignore[arg-type, dict-item]
        assert self.keeper.current is not None
        content: Content = self.keeper.current.shared(self.spark, "rules").content
        return content

    def run(self, epoch: int, rows: list[int]) -> Content:
        content = self.begin(epoch, rows)
        self.keeper.committed(epoch)
        return content

    @property
    def left(self) -> list[Content]:
        return [content for content in self.sent if not content.is_destroyed]


def test_a_version_is_gone_when_another_one_is_committed() -> None:
    driver = Driver()
    for epoch in range(10):
        newest = driver.run(epoch, [epoch])
        assert driver.left == [newest]
    assert driver.run(10, []) is newest, "as long as nothing changes, it is the same"
    assert driver.left == [newest]


def test_the_version_before_is_there_as_long_as_the_epoch_may_run_again() -> None:
    driver = Driver()
    before = driver.run(0, [1])
    for _ in range(5):
        failed = driver.begin(1, [2])
        assert driver.left == [before, failed], "nothing is left of the runs before"
    assert driver.begin(1, []) is before
    assert driver.left == [before]


def test_an_epoch_before_the_committed_one_reads_its_tables_again() -> None:
    driver = Driver()
    driver.run(0, [1])
    driver.run(1, [2])
    again = driver.run(1, [2])
    assert driver.left == [again]


@pytest.mark.parametrize("error", [None, Py4JError("Spark is gone"), ConnectionRefusedError()])
def test_nothing_is_left_when_the_query_ends(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    driver = Driver()
    driver.run(0, [1])
    driver.begin(1, [2])
    if error is not None:
        monkeypatch.setattr(Content, "destroy", lambda *_, **__: (_ for _ in ()).throw(error))
    driver.keeper.close()
    assert driver.keeper.current is None
    assert len(driver.left) == (0 if error is None else 2)
