"""Damaged files in a checkpoint: the query says which file it is, or does not need it; nothing is silently wrong."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from soak.driver import start, state_of
from soak.jobs import JOBS, epochs_of, make_files
from soak.places import Places
from soak.processes import Processes

import anabranch
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import verify

JOB = JOBS["process"]
EPOCHS, EPOCHS_BEFORE = 5, 3
FILES = make_files(9, files=EPOCHS, rows=40, keys=30)


@dataclass(frozen=True)
class Copy(Places):
    """With the input of another: Spark's log of the input names its files by their full paths."""

    original: Places

    @property
    def input(self) -> Path:
        return self.original.input


@dataclass(frozen=True)
class Before:
    """A query that was stopped, with input left to take."""

    places: Places
    addresses: str

    def copy(self, root: Path) -> Places:
        """A query of its own in the same condition. Its sink is new, and gets the epochs that are left."""
        places = Copy(root, self.places)
        shutil.copytree(self.places.checkpoint, places.checkpoint)
        return places


@pytest.fixture(scope="module")
def before(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Before]:
    places = Places(tmp_path_factory.mktemp("damaged"))
    places.write_input(FILES[:EPOCHS_BEFORE])
    processes = Processes(places)
    try:
        workers = [processes.start_worker(name, "memory")["address"] for name in ("one", "two")]
        before = Before(places, ",".join(workers))
        run(spark, before, places)
        places.add_input(FILES[EPOCHS_BEFORE:], first=EPOCHS_BEFORE)
        yield before
    finally:
        processes.end()


def run(spark: SparkSession, before: Before, places: Places) -> dict[str, list[Any]]:
    """Take all input; the state in the end."""
    options = {"anabranch.workerAddresses": before.addresses}
    query = start(spark, JOB, places, files_per_epoch=1, options=options)
    try:
        query.processAllAvailable()
        return state_of(query, JOB)
    finally:
        query.stop()


def assert_right(places: Places, state: dict[str, list[Any]]) -> None:
    expected = JOB.model(epochs_of(FILES, 1))
    assert state == expected.state
    rows = Counter(tuple(row.values()) for file in written(places) for row in pq.read_table(file).to_pylist())
    assert rows == Counter(row for row in expected.rows if row[-1] >= EPOCHS_BEFORE)


def written(places: Places) -> Iterator[str]:
    """The files of the sink that count, by its log; Spark itself does not read a log that begins in the middle."""
    for log in (places.output / "_spark_metadata").glob("[0-9]*"):
        for line in log.read_text().splitlines()[1:]:
            yield json.loads(line)["path"].removeprefix("file:")


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def flip(file: Path) -> None:
    """One bit of a byte, which stays a letter or digit if it was one."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def lose(file: Path) -> None:
    file.unlink()


DOCUMENTS = {
    "job": "job.json",
    "newest route": "routes/*.json",
    "first manifest": "manifests/000000000000.*.json",
    "last manifest": f"manifests/{EPOCHS_BEFORE - 1:012d}.*.json",
}


@pytest.mark.parametrize("damage", [cut, flip, empty])
@pytest.mark.parametrize("pattern", DOCUMENTS.values(), ids=list(DOCUMENTS))
def test_a_query_with_a_damaged_document_does_not_start_and_names_it(
    spark: SparkSession, before: Before, tmp_path: Path, pattern: str, damage: Callable[[Path], None]
) -> None:
    places = before.copy(tmp_path)
    file = sorted((places.checkpoint / "anabranch").glob(pattern))[-1]
    damage(file)
    with pytest.raises(anabranch.AnabranchError) as failure:
        run(spark, before, places)
    assert str(file) in str(failure.value)
    assert "Restore it from a copy" in str(failure.value)
    if "routes" not in pattern:  # which are not part of the state
        assert str(file.relative_to(places.checkpoint)) in [
            problem.path for problem in verify(Storage(str(places.checkpoint))).problems
        ]


@pytest.mark.parametrize(
    ("variable", "epoch", "damage"), [("sums", 0, cut), ("recent", 1, flip), ("tags", 2, empty), ("sums", 1, lose)]
)
def test_an_epoch_that_needs_a_damaged_change_file_fails_and_names_it(
    spark: SparkSession, before: Before, tmp_path: Path, variable: str, epoch: int, damage: Callable[[Path], None]
) -> None:
    places = before.copy(tmp_path)
    folder = places.checkpoint / "anabranch" / "changes" / "stage1" / variable / f"epoch={epoch:012d}"
    file = sorted(folder.iterdir())[0]
    intact = file.read_bytes()
    damage(file)
    with pytest.raises(anabranch.AnabranchError) as failure:
        run(spark, before, places)
    assert str(file) in str(failure.value)
    assert [problem.path for problem in verify(Storage(str(places.checkpoint))).problems] == [
        str(file.relative_to(places.checkpoint))
    ]
    assert places.committed_epochs() == EPOCHS_BEFORE
    if damage is lose:  # put back, it does no harm
        file.write_bytes(intact)
        assert_right(places, run(spark, before, places))


@pytest.mark.parametrize("pattern", ["manifests/000000000001.*", "job.json"])
def test_a_query_whose_document_is_lost_does_not_start(
    spark: SparkSession, before: Before, tmp_path: Path, pattern: str
) -> None:
    places = before.copy(tmp_path)
    (file,) = (places.checkpoint / "anabranch").glob(pattern)
    file.unlink()
    with pytest.raises(anabranch.AnabranchError, match=r"The manifest of epoch 1 is missing|job\.json"):
        run(spark, before, places)


@pytest.mark.parametrize("damage", [flip, empty])
def test_the_content_of_a_generation_does_not_matter(
    spark: SparkSession, before: Before, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    places = before.copy(tmp_path)
    (file,) = (places.checkpoint / "anabranch" / "generations").iterdir()
    damage(file)
    state = run(spark, before, places)
    assert_right(places, state)
    assert sorted(path.name for path in file.parent.iterdir()) == ["00000001.json", "00000002.json"]


def test_the_documents_of_a_checkpoint_are_json(before: Before) -> None:
    for file in (before.places.checkpoint / "anabranch").rglob("*.json"):
        assert json.loads(file.read_text())["content"]
