from anabranch.checkpoint.sparklog import has_offsets, last_committed_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import NO_EPOCH


def test_an_empty_checkpoint_has_no_committed_epoch_and_no_offsets(storage: Storage) -> None:
    assert last_committed_epoch(storage) == NO_EPOCH
    assert not has_offsets(storage)


def test_the_largest_batch_id_counts_as_a_number(storage: Storage) -> None:
    for batch in (0, 9, 10, 100):
        storage.write(f"commits/{batch}", b"v1\n{}")
    assert last_committed_epoch(storage) == 100


def test_checksums_temporary_files_and_folders_are_no_commits(storage: Storage) -> None:
    storage.write("commits/3", b"v1\n{}")
    for name in [".7.crc", ".7.5f6a.tmp", "7.tmp", "8/nested", "metadata"]:
        storage.write(f"commits/{name}", b"")
    assert last_committed_epoch(storage) == 3


def test_planned_batches_are_offsets_but_no_commits(storage: Storage) -> None:
    storage.write("offsets/0", b"v1\n{}")
    assert has_offsets(storage)
    assert last_committed_epoch(storage) == NO_EPOCH
