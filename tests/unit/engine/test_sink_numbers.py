"""Which numbers epochs get in the log of a file sink, and that they keep them."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch
from anabranch.engine.spark.sinks import shift_of


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "checkpoint"), durable=False)


def plan(storage: Storage, *epochs: int) -> None:
    for epoch in epochs:
        storage.write(f"offsets/{epoch}", b"v1\n{}\n{}")


def number_of(storage: Storage, epoch: int, *, committed: int, latest: int, place: str = "file:/out") -> int:
    return epoch + shift_of(storage, storage, place, committed=Epoch(committed), latest=latest)


def test_a_new_job_has_its_epochs_as_numbers(storage: Storage) -> None:
    assert number_of(storage, 0, committed=-1, latest=-1) == 0
    # The driver has crashed after the sink, before Spark's commit.
    plan(storage, 0)
    assert number_of(storage, 0, committed=-1, latest=0) == 0


@pytest.mark.parametrize("latest", [-1, 5, 22, 40])
def test_the_first_epoch_of_a_fork_follows_what_the_log_has(storage: Storage, latest: int) -> None:
    plan(storage, 21, 22)
    assert number_of(storage, 23, committed=22, latest=latest) == latest + 1
    plan(storage, 23)
    # Whatever is in the log by now.
    for now in (latest, latest + 1):
        assert number_of(storage, 23, committed=22, latest=now) == latest + 1


def test_each_directory_of_a_job_is_counted_on_its_own(storage: Storage) -> None:
    plan(storage, 21, 22)
    assert number_of(storage, 23, committed=22, latest=-1) == 0
    plan(storage, 23, 24)
    assert number_of(storage, 25, committed=24, latest=-1, place="file:/another") == 0
    assert number_of(storage, 25, committed=24, latest=1) == 2


def test_epochs_that_a_job_repeats_are_in_the_log_already(storage: Storage) -> None:
    """Of a checkpoint in which nobody has written down any numbers."""
    plan(storage, 0, 1, 2)
    storage.write("anabranch/replay/3", b"v1\n{}\n{}")
    assert number_of(storage, 3, committed=2, latest=4) == 3


def test_a_damaged_document_is_an_error(storage: Storage) -> None:
    number_of(storage, 0, committed=-1, latest=-1)
    (name,) = storage.list_names("anabranch/sinks")
    storage.write(f"anabranch/sinks/{name}", b"{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        number_of(storage, 0, committed=-1, latest=-1)
