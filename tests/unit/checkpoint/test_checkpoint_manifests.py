from pathlib import Path

import pytest

from anabranch.checkpoint.documents import FORMAT_VERSION, encode
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.manifests import Manifest, newest_writers, read_manifest, remove_after, write_manifest
from anabranch.checkpoint.paths import manifest_file
from anabranch.checkpoint.statefiles import state_files
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, FencedError
from anabranch.core.ids import NO_EPOCH, Epoch, Generation, RouteVersion, Run, StageNumber, WorkerId
from anabranch.core.state_files import ChangeFile


def manifest_of(epoch: int, generation: int = 1, **other: object) -> Manifest:
    file = ChangeFile(
        stage=StageNumber(2),
        variable="value",
        worker=WorkerId("w1"),
        path=f"anabranch/changes/stage2/value/epoch={epoch:012d}/g{generation:08d}-w1.parquet",
        rows=10,
        bytes=1000,
        checksum="xxh3:0123456789abcdef",
    )
    fields: dict[str, object] = {
        "epoch": Epoch(epoch),
        "generation": Generation(generation),
        "run": Run(epoch),
        "route_version": RouteVersion(4),
        "files": (file,),
        "watermarks": {"stage2": 1_700_000_000_000},
    }
    return Manifest(**(fields | other))  # type: ignore[arg-type]


def path_of(storage: Storage, epoch: int, generation: int = 1) -> Path:
    return Path(storage.full_path(manifest_file(Epoch(epoch), Generation(generation))))


def test_a_manifest_comes_back_as_it_was_written(storage: Storage) -> None:
    manifest = manifest_of(12)
    write_manifest(storage, manifest)
    assert read_manifest(storage, Epoch(12)) == manifest
    assert manifest.format_version == FORMAT_VERSION


def test_an_epoch_without_changes_or_watermarks_has_a_manifest_too(storage: Storage) -> None:
    manifest = manifest_of(0, files=(), watermarks={})
    write_manifest(storage, manifest)
    assert state_files(storage, Epoch(0)).manifests == (manifest,)


def test_the_chain_is_every_epoch_in_order(storage: Storage) -> None:
    for epoch in (2, 0, 11, *range(3, 11), 1):
        write_manifest(storage, manifest_of(epoch))
    assert [manifest.epoch for manifest in state_files(storage, Epoch(10)).manifests] == list(range(11))
    assert list(newest_writers(storage)) == list(range(12))
    assert state_files(storage, NO_EPOCH).manifests == ()


def test_a_gap_in_the_chain_is_an_error_that_names_the_epoch(storage: Storage) -> None:
    for epoch in (0, 2):
        write_manifest(storage, manifest_of(epoch))
    for up_to in (1, 2):
        with pytest.raises(CheckpointError, match=r"manifest of epoch 1 is missing in .*Restore"):
            state_files(storage, Epoch(up_to))
    with pytest.raises(CheckpointError, match="epoch 1 is missing"):
        read_manifest(storage, Epoch(1))


def test_a_newer_generation_writes_an_epoch_again_and_wins(storage: Storage) -> None:
    write_manifest(storage, manifest_of(0))
    write_manifest(storage, manifest_of(1, generation=1))
    write_manifest(storage, manifest_of(1, generation=10, files=()))
    assert read_manifest(storage, Epoch(1)) == manifest_of(1, generation=10, files=())
    assert [manifest.generation for manifest in state_files(storage, Epoch(1)).manifests] == [1, 10]
    assert list(newest_writers(storage)) == [0, 1]


def test_a_generation_may_write_an_epoch_again(storage: Storage) -> None:
    write_manifest(storage, manifest_of(0))
    write_manifest(storage, manifest_of(0, files=()))
    assert read_manifest(storage, Epoch(0)).files == ()


def test_a_replaced_driver_cannot_write_a_manifest(storage: Storage) -> None:
    older, newer = claim_generation(storage, {}), claim_generation(storage, {})
    with pytest.raises(FencedError, match="newer driver"):
        write_manifest(storage, manifest_of(0, generation=older))
    write_manifest(storage, manifest_of(0, generation=newer))
    assert read_manifest(storage, Epoch(0)).generation == newer


def test_a_replaced_driver_that_was_past_the_check_changes_nothing(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_generation(storage, {})
    write = Storage.write

    def while_the_successor_completes_the_epoch(self: Storage, path: str, content: bytes) -> None:
        monkeypatch.setattr(Storage, "write", write)
        claim_generation(storage, {})
        write_manifest(storage, manifest_of(0, generation=2))
        write(self, path, content)

    monkeypatch.setattr(Storage, "write", while_the_successor_completes_the_epoch)
    write_manifest(storage, manifest_of(0, generation=1))
    assert read_manifest(storage, Epoch(0)) == manifest_of(0, generation=2)


def test_rolled_back_epochs_are_removed_in_all_generations(storage: Storage) -> None:
    for epoch, generation in [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1)]:
        write_manifest(storage, manifest_of(epoch, generation))
    assert remove_after(storage, Epoch(1)) == [2, 3]
    assert list(newest_writers(storage)) == [0, 1]
    assert remove_after(storage, Epoch(1)) == []
    assert remove_after(storage, NO_EPOCH) == [0, 1]


def test_a_removal_that_is_interrupted_leaves_no_gap(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    for epoch in range(5):
        write_manifest(storage, manifest_of(epoch))
    delete, left = Storage.delete, [True, True]

    def only_twice(self: Storage, path: str) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        delete(self, path)

    monkeypatch.setattr(Storage, "delete", only_twice)
    with pytest.raises(KeyboardInterrupt):
        remove_after(storage, Epoch(0))
    assert list(newest_writers(storage)) == [0, 1, 2]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: raw.replace(b'"rows": 10', b'"rows": 11')])
def test_a_truncated_or_altered_manifest_is_an_error_that_names_the_file(storage: Storage, damage: object) -> None:
    write_manifest(storage, manifest_of(0))
    path = path_of(storage, 0)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged.*Restore"):
        state_files(storage, Epoch(0))


def test_a_manifest_in_the_place_of_another_is_noticed(storage: Storage) -> None:
    write_manifest(storage, manifest_of(0))
    path_of(storage, 1).write_bytes(path_of(storage, 0).read_bytes())
    with pytest.raises(CheckpointError, match="it is of epoch 0, generation 1"):
        state_files(storage, Epoch(1))


def test_a_manifest_without_its_fields_is_an_error(storage: Storage) -> None:
    storage.write(manifest_file(Epoch(0), Generation(1)), encode({"epoch": 0}))
    with pytest.raises(CheckpointError, match="not as expected"):
        read_manifest(storage, Epoch(0))


def test_a_manifest_of_a_newer_format_asks_for_an_upgrade(storage: Storage) -> None:
    write_manifest(storage, manifest_of(0, format_version=FORMAT_VERSION + 1))
    with pytest.raises(CheckpointError, match="Upgrade Anabranch"):
        read_manifest(storage, Epoch(0))


def test_a_chain_that_starts_from_a_snapshot_is_refused_rather_than_read_without_it(storage: Storage) -> None:
    write_manifest(storage, manifest_of(0, base="anabranch/snapshots/x"))
    assert read_manifest(storage, Epoch(0)).base == "anabranch/snapshots/x"
    with pytest.raises(CheckpointError, match="starts from the snapshot anabranch/snapshots/x"):
        state_files(storage, Epoch(0))


def test_a_chain_by_two_drivers_at_once_is_refused(storage: Storage) -> None:
    write_manifest(storage, manifest_of(0, generation=2))
    write_manifest(storage, manifest_of(1, generation=1))
    with pytest.raises(CheckpointError, match="Two drivers wrote"):
        state_files(storage, Epoch(1))


def test_files_that_are_no_manifests_are_left_alone(storage: Storage) -> None:
    storage.write("anabranch/manifests/notes.txt", b"mine")
    write_manifest(storage, manifest_of(0))
    remove_after(storage, NO_EPOCH)
    assert storage.list_names("anabranch/manifests") == ["notes.txt"]
