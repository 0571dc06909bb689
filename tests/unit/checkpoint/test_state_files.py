"""Which files hold the state of an epoch, and what is said when one of them is not what it should be."""

from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.checkpoint import paths
from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.job import JobDescription, create_or_check, save_shape
from anabranch.checkpoint.manifests import (
    Manifest,
    Snapshot,
    remove_after,
    snapshot_epochs,
    write_manifest,
    write_snapshot,
)
from anabranch.checkpoint.statefiles import Documents, newest_whole_epoch, state_files
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch, Generation, JobId, RouteVersion, Run, StageNumber, WorkerId
from anabranch.core.schemas import StageSpec
from anabranch.core.state_files import ChangeFile, SnapshotFile
from support.written_checkpoint import WrittenCheckpoint


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "checkpoint"), durable=False)


def write_epochs(storage: Storage, *epochs: int, generation: int = 1) -> None:
    """Each with one file, whose content does not matter here."""
    for epoch in epochs:
        path = f"{paths.CHANGES}/stage2/value/epoch={epoch:012d}/g{generation:08d}-r{epoch}-w1.parquet"
        storage.write(path, b"data")
        file = ChangeFile(StageNumber(2), "value", WorkerId("w1"), path, 1, 4, "xxh3:0")
        write_manifest(storage, manifest_of(epoch, generation, (file,)))


def manifest_of(epoch: int, generation: int = 1, files: tuple[ChangeFile, ...] = ()) -> Manifest:
    return Manifest(Epoch(epoch), Generation(generation), Run(epoch), RouteVersion(0), files)


def snapshot_at(storage: Storage, epoch: int, *, generation: int = 1, run: int | None = None) -> Snapshot:
    snapshot = Snapshot(Epoch(epoch), Generation(generation), Run(epoch if run is None else run), 0.0, ())
    write_snapshot(storage, snapshot)
    return snapshot


def forget(storage: Storage, *epochs: int) -> None:
    for epoch in epochs:
        storage.delete(paths.manifest_file(Epoch(epoch), Generation(1)))


def spoil(storage: Storage, path: str) -> None:
    storage.write(path, storage.read(path).replace(b'"run"', b'"rum"'))


def test_without_a_snapshot_the_state_is_all_manifests(storage: Storage) -> None:
    write_epochs(storage, 0, 1, 2)
    files = state_files(storage, Epoch(1))
    assert files.snapshot is None
    assert [manifest.epoch for manifest in files.manifests] == [0, 1]
    assert files.committed_by == (1, 1)


def test_files_of_a_variable_from_before_it_was_deleted_are_no_state(storage: Storage, stage: StageSpec) -> None:
    deleting = replace(stage, variables=stage.variables[1:], deleted=("value",))
    for first_epoch, version in ((0, stage), (2, deleting), (4, stage)):
        job = create_or_check(storage, JobDescription(FORMAT_VERSION, JobId("job"), 16, (version,)))
        generation = claim_generation(storage, {})
        save_shape(storage, job, generation)
        write_epochs(storage, first_epoch, first_epoch + 1, generation=generation)
        storage.write(f"commits/{first_epoch + 1}", b"v1")

    def epochs_of_files(up_to: int) -> list[int]:
        return [int(file.path.split("epoch=")[1][:12]) for file in state_files(storage, Epoch(up_to)).data_files]

    assert epochs_of_files(5) == [2, 3, 4, 5]
    assert epochs_of_files(1) == [0, 1], "it was there then"
    file = SnapshotFile(StageNumber(2), "value", 0, 15, f"{paths.SNAPSHOTS}/value/epoch={1:012d}/x", 1, 4, "xxh3:0")
    write_snapshot(storage, Snapshot(Epoch(1), Generation(1), Run(1), 0.0, (file,)))
    assert epochs_of_files(1) == [1]
    assert epochs_of_files(3) == [2, 3]


def test_there_is_nothing_before_the_first_epoch(storage: Storage) -> None:
    files = state_files(storage, NO_EPOCH)
    assert (files.snapshot, files.manifests, files.committed_by, files.data_files) == (None, (), None, [])


def test_the_newest_snapshot_that_is_not_too_new_replaces_what_lies_before(storage: Storage) -> None:
    write_epochs(storage, *range(8))
    snapshots = {epoch: snapshot_at(storage, epoch) for epoch in (1, 4, 6)}
    forget(storage, 0, 2, 3)
    for up_to, base, manifests in [(1, 1, []), (4, 4, []), (5, 4, [5]), (6, 6, []), (7, 6, [7])]:
        files = state_files(storage, Epoch(up_to))
        assert files.snapshot == snapshots[base]
        assert [manifest.epoch for manifest in files.manifests] == manifests
        assert files.committed_by == (1, up_to)


def test_a_snapshot_of_a_run_that_was_rolled_back_does_not_count(storage: Storage) -> None:
    write_epochs(storage, 0, 1)
    snapshot_at(storage, 1, run=77)
    assert state_files(storage, Epoch(1)).snapshot is None
    counts = snapshot_at(storage, 1)
    assert state_files(storage, Epoch(1)).snapshot == counts


def test_rolling_back_removes_later_snapshots(storage: Storage) -> None:
    write_epochs(storage, 0, 1, 2)
    for epoch in (0, 1, 2):
        snapshot_at(storage, epoch)
    assert remove_after(storage, Epoch(1)) == [2]
    assert snapshot_epochs(storage) == [0, 1]


def test_a_missing_manifest_is_named_and_so_is_the_newest_whole_epoch(storage: Storage) -> None:
    write_epochs(storage, *range(7))
    forget(storage, 4)
    with pytest.raises(CheckpointError, match=r"manifest of epoch 4 is missing.*older epoch that is whole is 3:"):
        state_files(storage, Epoch(6))
    assert newest_whole_epoch(Documents(storage), Epoch(6)) == 3
    assert newest_whole_epoch(Documents(storage), Epoch(3)) == 2


def test_a_damaged_manifest_is_named_and_so_is_the_newest_whole_epoch(storage: Storage) -> None:
    write_epochs(storage, 0, 1, 2)
    spoil(storage, paths.manifest_file(Epoch(1), Generation(1)))
    with pytest.raises(CheckpointError, match=r"000000000001\.g00000001\.json is damaged.* whole is 0:"):
        state_files(storage, Epoch(2))


def test_an_epoch_whose_files_are_missing_or_cut_off_is_not_whole(storage: Storage) -> None:
    write_epochs(storage, 0, 1, 2, 3)
    forget(storage, 3)
    (file,) = state_files(storage, Epoch(2)).manifests[2].files
    storage.delete(file.path)
    assert newest_whole_epoch(Documents(storage), Epoch(3)) == 1
    (file,) = state_files(storage, Epoch(1)).manifests[1].files
    storage.write(file.path, b"dat")
    assert newest_whole_epoch(Documents(storage), Epoch(3)) == 0


def test_a_damaged_snapshot_is_never_passed_over_in_silence(storage: Storage) -> None:
    write_epochs(storage, *range(6))
    snapshot_at(storage, 1)
    snapshot_at(storage, 4)
    spoil(storage, paths.snapshot_document(Epoch(4)))
    with pytest.raises(CheckpointError, match=r"snapshots/000000000004\.json is damaged.*whole is 3:") as error:
        state_files(storage, Epoch(5))
    advice = f"delete {storage.full_path(paths.snapshot_document(Epoch(4)))} to use them"
    assert advice in str(error.value)
    storage.delete(paths.snapshot_document(Epoch(4)))
    assert state_files(storage, Epoch(5)).snapshot == snapshot_at(storage, 1)


def test_deleting_a_damaged_snapshot_is_not_advised_where_nothing_else_holds_its_state(storage: Storage) -> None:
    write_epochs(storage, *range(6))
    snapshot_at(storage, 4)
    forget(storage, 0)
    spoil(storage, paths.snapshot_document(Epoch(4)))
    with pytest.raises(CheckpointError, match="is damaged") as error:
        state_files(storage, Epoch(5))
    assert "delete" not in str(error.value)
    assert "whole" not in str(error.value)


def test_a_snapshot_by_a_newer_driver_than_the_epoch_after_it_is_an_error(storage: Storage) -> None:
    write_epochs(storage, 2)
    snapshot_at(storage, 1, generation=2)
    with pytest.raises(CheckpointError, match="Two drivers"):
        state_files(storage, Epoch(2))


def test_a_document_in_the_place_of_another_is_noticed(storage: Storage) -> None:
    snapshot_at(storage, 1)
    storage.write(paths.snapshot_document(Epoch(2)), storage.read(paths.snapshot_document(Epoch(1))))
    with pytest.raises(CheckpointError, match="it is of epoch 1"):
        state_files(storage, Epoch(2))


def test_files_are_listed_in_the_order_in_which_they_apply(storage: Storage, stage: StageSpec) -> None:
    written = WrittenCheckpoint(storage, stage)
    written.write_random(range(3))
    files = state_files(storage, Epoch(2))
    assert files.change_files == [file for manifest in files.manifests for file in manifest.files]
    assert files.snapshot_files == []
