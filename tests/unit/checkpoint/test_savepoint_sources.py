"""What a savepoint takes along of the things that Spark's sources remember: all of it, up to its epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.checkpoint.savepoints import begin_savepoint
from anabranch.checkpoint.sparklog import read_entries
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import Epoch

FILE = b'v1\n{"path":"file:/input/1.parquet","timestamp":1,"batchId":%d}'
#: As Spark's Kafka and rate sources write where they began.
KAFKA = b'0v1\n{"orders":{"0":11,"1":5}}'
RATE = b"v1\n1763438400000"


@pytest.fixture
def spark(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "checkpoint"), durable=False)


@pytest.fixture
def target(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "savepoint"), durable=False)


def write_epoch(spark: Storage, epoch: int, *offsets: str, version: str = "v1") -> None:
    spark.write(f"offsets/{epoch}", "\n".join([version, '{"batchWatermarkMs":0}', *offsets]).encode())
    spark.write(f"commits/{epoch}", b"v1\n{}")


def saved(target: Storage) -> list[str]:
    return sorted(path for path, _, _ in target.walk("sources"))


@pytest.mark.parametrize("epoch", [22, 28, 29, 30])
def test_the_log_of_a_file_source_ends_where_the_epoch_does(spark: Storage, target: Storage, epoch: int) -> None:
    """Epochs without files make the log shorter than the number of epochs; ten entries are made one."""
    entries = ["19.compact", *map(str, range(20, 29)), "29.compact", "30", "31"]
    for name in entries:
        spark.write(f"sources/0/{name}", FILE % int(name.removesuffix(".compact")))
    spark.write("sources/0/.20.crc", b"checksum")
    write_epoch(spark, epoch + 99, '{"logOffset":21}')
    write_epoch(spark, epoch + 100, f'{{"logOffset":{epoch}}}')
    begin_savepoint(spark, target, Epoch(epoch + 100))
    expected = [name for name in entries if int(name.removesuffix(".compact")) <= epoch]
    assert saved(target) == sorted(f"sources/0/{name}" for name in expected)


def test_other_sources_keep_what_they_remember(spark: Storage, target: Storage) -> None:
    spark.write("sources/0/0", KAFKA)
    spark.write("sources/1/0", RATE)
    spark.write("sources/3/schema/2", b"whatever another source may keep")
    for number in range(3):
        spark.write(f"sources/2/{number}", FILE % number)
    write_epoch(spark, 0, "-", "-", "-")
    write_epoch(spark, 1, '{"orders":{"0":40,"1":7}}', "12", '{"logOffset":1}', '{"tick":1}')
    begin_savepoint(spark, target, Epoch(1))
    assert saved(target) == ["sources/0/0", "sources/1/0", "sources/2/0", "sources/2/1", "sources/3/schema/2"]
    # Before a source had anything to read, its offset does not tell of which kind it is.
    other = Storage(target.location + "-of-the-first", durable=False)
    begin_savepoint(spark, other, Epoch(0))
    assert saved(other) == ["sources/0/0", "sources/1/0", "sources/3/schema/2"]


def test_sources_may_have_names(spark: Storage) -> None:
    """In the second version of Spark's log of offsets."""
    write_epoch(spark, 4, 'orders:{"logOffset":7}', "payments:-", 'clicks:{"0":{"1":5}}', version="v2")
    assert read_entries(spark, Epoch(4)) == {"orders": 7, "payments": -1}
