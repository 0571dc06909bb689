"""Going back: which of Spark's log entries are put aside, that nothing is lost by a crash, and what is refused."""

from pathlib import Path

import pytest

from anabranch.checkpoint import rewind
from anabranch.checkpoint.manifests import Manifest, newest_writers, write_manifest
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch, Generation, RouteVersion, Run


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Epochs 0 to 5 committed by Spark, 6 planned; manifests of epochs 0 to 3."""
    storage = Storage(str(tmp_path), durable=False)
    for epoch in range(7):
        storage.write(f"offsets/{epoch}", f"offsets of {epoch}".encode())
        storage.write(f"offsets/.{epoch}.crc", b"checksum")
    for epoch in range(6):
        storage.write(f"commits/{epoch}", b"v1\n{}")
        storage.write(f"commits/.{epoch}.crc", b"checksum")
    for epoch in range(4):
        write_manifest(storage, Manifest(Epoch(epoch), Generation(1), Run(epoch), RouteVersion(0), ()))
    return storage


def names(storage: Storage, folder: str) -> list[str]:
    return sorted(path.name for path in Path(storage.full_path(folder)).iterdir())


def test_the_newest_durable_epoch_is_the_last_without_a_gap_before_it(storage: Storage) -> None:
    assert rewind.newest_durable_epoch(storage, Epoch(5)) == 3
    assert rewind.newest_durable_epoch(storage, Epoch(2)) == 2
    storage.delete("anabranch/manifests/000000000001.g00000001.json")
    assert rewind.newest_durable_epoch(storage, Epoch(5)) == 0
    assert rewind.newest_durable_epoch(Storage(storage.location + "/empty"), Epoch(5)) == -1


def test_later_epochs_are_put_aside_and_put_back_one_at_a_time(storage: Storage) -> None:
    assert rewind.rewind(storage, storage, Epoch(2)) == [3, 4, 5, 6]
    assert last_committed_epoch(storage) == 2
    assert names(storage, "offsets") == sorted([*(f".{n}.crc" for n in range(3)), *map(str, range(3))])
    assert names(storage, "commits") == sorted([*(f".{n}.crc" for n in range(3)), *map(str, range(3))])
    assert list(newest_writers(storage)) == [0, 1, 2]
    for epoch in (3, 4, 5, 6):
        assert rewind.pending(storage)[0] == epoch
        rewind.put_back(storage, Epoch(epoch))
        assert storage.read(f"offsets/{epoch}") == f"offsets of {epoch}".encode()
        with pytest.raises(CheckpointError, match=f"did not repeat epoch {epoch}"):
            rewind.done(storage, Epoch(epoch))
        storage.write(f"commits/{epoch}", b"v1\n{}")
        rewind.done(storage, Epoch(epoch))
    assert rewind.pending(storage) == []


@pytest.mark.parametrize("crash_after", range(20))
def test_a_crash_in_the_middle_is_made_good_by_doing_it_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, crash_after: int
) -> None:
    left = [crash_after]

    def or_crash(action: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt(action)

    delete, copy = Storage.delete, Storage.copy_to
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", lambda s, path: (or_crash("delete"), delete(s, path))[1])
        patch.setattr(Storage, "copy_to", lambda s, *to: (or_crash("copy"), copy(s, *to))[1])
        try:
            rewind.rewind(storage, storage, Epoch(2))
        except KeyboardInterrupt:
            assert crash_after < 20
    rewind.rewind(storage, storage, Epoch(2))
    assert rewind.pending(storage) == [3, 4, 5, 6]
    assert last_committed_epoch(storage) == 2
    assert [storage.read(f"anabranch/replay/{n}") for n in (3, 4, 5, 6)] == [
        f"offsets of {n}".encode() for n in (3, 4, 5, 6)
    ]


def test_epochs_whose_offsets_spark_has_forgotten_cannot_be_returned_to(storage: Storage) -> None:
    storage.delete("offsets/2")
    for epoch in (1, 2):
        with pytest.raises(CheckpointError, match=f"Epoch {epoch} cannot be returned to: .* offsets of epoch"):
            rewind.rewind(storage, storage, Epoch(epoch))
    assert last_committed_epoch(storage) == 5
    assert rewind.rewind(storage, storage, Epoch(3)) == [4, 5, 6]
