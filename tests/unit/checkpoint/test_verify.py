"""Verifying finds what is wrong with a checkpoint, says where, and which epochs it concerns."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.checkpoint import paths
from anabranch.checkpoint.cleanup import clean_up
from anabranch.checkpoint.documents import checksum_of
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.manifests import read_manifest, read_snapshot, write_manifest, write_snapshot
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import Report, describe, verify
from anabranch.core.ids import Epoch, Generation
from anabranch.core.schemas import StageSpec
from anabranch.core.state_files import SnapshotFile
from anabranch.worker.compaction import compact
from support.written_checkpoint import WrittenCheckpoint

FIRST = Generation(1)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "checkpoint"), durable=False)


@pytest.fixture
def written(storage: Storage, stage: StageSpec) -> WrittenCheckpoint:
    """Epochs 0 to 6, all committed, and a snapshot of 3."""
    written = WrittenCheckpoint(storage, stage)
    claim_generation(storage, {})
    written.write_random(range(7))
    written.commit_in_spark(6)
    compact(storage, Epoch(3), generation=FIRST)
    return written


def concerned(report: Report, path: str) -> list[tuple[int, ...]]:
    return [problem.epochs for problem in report.problems if problem.path == path]


def spoil(storage: Storage, path: str) -> None:
    content = storage.read(path)
    middle = len(content) // 2
    storage.write(path, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def test_an_intact_checkpoint_has_no_problems(written: WrittenCheckpoint) -> None:
    report = verify(written.storage)
    assert report.problems == ()
    assert (report.epochs, report.leftovers, report.newest_whole) == (tuple(range(7)), (), 6)
    snapshot = read_snapshot(written.storage, Epoch(3))
    assert report.files == 7 * 3 * 2 + len(snapshot.files)
    on_disk = [size for path, size, _ in written.storage.walk(paths.ROOT) if path.endswith(".parquet")]
    assert report.bytes == sum(on_disk)
    json.dumps(report.to_json())


def test_an_empty_checkpoint_has_no_problems(storage: Storage, stage: StageSpec) -> None:
    WrittenCheckpoint(storage, stage)
    report = verify(storage)
    assert (report.problems, report.epochs, report.newest_whole) == ((), (), None)


def test_a_cleaned_up_checkpoint_has_no_problems(written: WrittenCheckpoint) -> None:
    clean_up(written.storage, committed=Epoch(6), keep_epochs=1, keep_seconds=0, now=2e9, min_age_s=0)
    report = verify(written.storage)
    assert (report.problems, report.epochs, report.newest_whole) == ((), (3, 4, 5, 6), 6)


@pytest.mark.parametrize(("epoch", "unusable"), [(1, (1, 2)), (3, ()), (5, (5, 6))])
@pytest.mark.parametrize("damage", [spoil, Storage.delete])
def test_a_bad_change_file_concerns_the_epochs_up_to_the_next_snapshot(
    written: WrittenCheckpoint, epoch: int, unusable: tuple[int, ...], damage: Callable[[Storage, str], None]
) -> None:
    file = read_manifest(written.storage, Epoch(epoch)).files[-1]
    damage(written.storage, file.path)
    report = verify(written.storage)
    assert concerned(report, file.path) == [unusable]
    assert len(report.problems) == 1
    assert report.newest_whole == (4 if 6 in unusable else 6)


def test_a_bad_snapshot_file_concerns_all_epochs_that_start_from_it(written: WrittenCheckpoint) -> None:
    file = read_snapshot(written.storage, Epoch(3)).files[0]
    written.storage.write(file.path, written.storage.read(file.path) + b"x")
    report = verify(written.storage)
    assert concerned(report, file.path) == [(3, 4, 5, 6)]
    assert "bytes instead of" in report.problems[0].reason
    assert report.newest_whole == 2


def test_a_bad_snapshot_document_concerns_all_epochs_that_start_from_it(written: WrittenCheckpoint) -> None:
    path = paths.snapshot_document(Epoch(3))
    written.storage.write(path, written.storage.read(path).replace(b'"run"', b'"rum"'))
    report = verify(written.storage)
    assert concerned(report, path) == [(3, 4, 5, 6)]
    assert "is damaged" in report.problems[0].reason
    assert report.newest_whole == 2


@pytest.mark.parametrize(("epoch", "unusable"), [(1, (1, 2)), (3, (3, 4, 5, 6)), (5, (5, 6))])
def test_a_damaged_manifest_concerns_the_epochs_after_it(
    written: WrittenCheckpoint, epoch: int, unusable: tuple[int, ...]
) -> None:
    path = paths.manifest_file(Epoch(epoch), FIRST)
    written.storage.write(path, b"{")
    assert concerned(verify(written.storage), path) == [unusable]


def test_a_missing_manifest_is_a_problem_where_a_clean_up_cannot_have_deleted_it(written: WrittenCheckpoint) -> None:
    written.storage.delete(paths.manifest_file(Epoch(5), FIRST))
    report = verify(written.storage)
    assert concerned(report, paths.MANIFESTS) == [(6,)]
    assert "manifest of epoch 5 is missing" in report.problems[0].reason
    assert report.newest_whole == 4


def test_what_an_interrupted_clean_up_left_is_no_problem(written: WrittenCheckpoint) -> None:
    written.storage.delete(paths.manifest_file(Epoch(0), FIRST))
    report = verify(written.storage)
    assert (report.problems, report.leftovers, report.epochs) == ((), (1, 2), (3, 4, 5, 6))


def test_without_any_snapshot_a_missing_manifest_is_always_a_problem(written: WrittenCheckpoint) -> None:
    written.storage.delete(paths.snapshot_document(Epoch(3)))
    written.storage.delete(paths.manifest_file(Epoch(0), FIRST))
    report = verify(written.storage)
    assert concerned(report, paths.MANIFESTS) == [(1, 2, 3, 4, 5, 6)]
    assert report.newest_whole is None


def test_an_epoch_that_only_spark_knows_is_a_problem(written: WrittenCheckpoint) -> None:
    written.commit_in_spark(7)
    report = verify(written.storage)
    assert concerned(report, paths.MANIFESTS) == [(7,)]
    assert report.newest_whole == 6


def test_a_damaged_job_concerns_everything(written: WrittenCheckpoint) -> None:
    spoil(written.storage, paths.JOB)
    report = verify(written.storage)
    assert concerned(report, paths.JOB) == [tuple(range(7))]
    assert len(report.problems) == 1
    assert report.newest_whole is None


def rewrite(written: WrittenCheckpoint, change: Callable[[pa.Table], pa.Table], *, snapshot: bool) -> tuple[str, str]:
    """Other content for a file under a right checksum: its path, and what is said about it."""
    storage = written.storage
    of = read_snapshot(storage, Epoch(3)) if snapshot else read_manifest(storage, Epoch(5))
    file = next(file for file in of.files if file.variable == "value")
    sink = io.BytesIO()
    pq.write_table(change(pq.read_table(pa.BufferReader(storage.read(file.path)))), sink, row_group_size=3)
    content = sink.getvalue()
    storage.write(file.path, content)
    other = replace(file, bytes=len(content), checksum=checksum_of(content))
    files = tuple(other if each is file else each for each in of.files)
    if snapshot:
        write_snapshot(storage, replace(of, files=files))
    else:
        write_manifest(storage, replace(of, files=files))
    problems = verify(storage).problems
    assert [problem.path for problem in problems] in ([], [file.path])
    return file.path, problems[0].reason if problems else ""


def column(table: pa.Table, index: int, values: object) -> pa.Table:
    return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.types[index]))


def swapped(table: pa.Table) -> pa.Table:
    """Two neighbours of one key group, in the other order."""
    groups = table.column(0).to_numpy()
    place = int(np.flatnonzero(groups[1:] == groups[:-1])[0])
    order = np.arange(len(groups))
    order[[place, place + 1]] = order[[place + 1, place]]
    return table.take(pa.array(order))


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t, ""),
        (lambda t: t.slice(1), "rows instead of"),
        (lambda t: t.take(pa.array(range(len(t)))[::-1]), "not sorted by key group"),
        (lambda t: column(t, 0, (t.column(0).to_numpy() + 1) % 16), "another key group than that of their hash"),
        (lambda t: column(t, 1, [None] * len(t)), "without key group or hash"),
        (lambda t: t.remove_column(1), "and not _group and _hash first"),
        (lambda t: t.rename_columns([*t.schema.names[:-1], "other"]), "does not fit this query: column other"),
        (lambda t: column(t, 0, t.column(0)).remove_column(len(t.schema) - 3), "its first columns are"),
    ],
)
def test_content_that_is_not_what_it_claims_is_found(
    written: WrittenCheckpoint, change: Callable[[pa.Table], pa.Table], reason: str, snapshot: bool
) -> None:
    _, said = rewrite(written, change, snapshot=snapshot)
    assert reason in said
    assert bool(reason) == bool(said)


def test_only_snapshots_have_to_be_sorted_by_hash(written: WrittenCheckpoint) -> None:
    assert rewrite(written, swapped, snapshot=False)[1] == ""
    assert "not sorted by hash" in rewrite(written, swapped, snapshot=True)[1]


def test_unknown_changes_are_found(written: WrittenCheckpoint) -> None:
    said = rewrite(written, lambda table: column(table, 2, [7] * len(table)), snapshot=False)[1]
    assert "unknown kind" in said


def test_rows_outside_of_the_claimed_key_groups_are_found(written: WrittenCheckpoint) -> None:
    snapshot = read_snapshot(written.storage, Epoch(3))

    def narrower(file: SnapshotFile) -> SnapshotFile:
        return replace(file, last_group=file.last_group - 1)

    write_snapshot(written.storage, replace(snapshot, files=tuple(map(narrower, snapshot.files))))
    report = verify(written.storage)
    assert len(report.problems) == len(snapshot.files)
    assert all("it has key groups outside of" in problem.reason for problem in report.problems)


def test_files_of_a_variable_that_the_job_no_longer_has_are_checked_as_far_as_that_goes(
    storage: Storage, stage: StageSpec
) -> None:
    written = WrittenCheckpoint(storage, stage)
    manifest = written.write(0, {"value": [(0, 1, None, (1, 2))]})
    other = tuple(replace(file, variable="gone") for file in manifest.files)
    write_manifest(storage, replace(manifest, files=other))
    assert verify(storage).problems == ()
    spoil(storage, other[0].path)
    assert concerned(verify(storage), other[0].path) == [(0,)]


def test_a_description_lists_epochs_snapshots_and_sizes(written: WrittenCheckpoint) -> None:
    description = describe(written.storage)
    assert (description.job_id, description.key_groups, description.committed) == ("job", 16, 6)
    assert [epoch.epoch for epoch in description.epochs] == list(range(7))
    manifest = read_manifest(written.storage, Epoch(4))
    (epoch,) = (each for each in description.epochs if each.epoch == 4)
    assert (epoch.generation, epoch.run, epoch.route_version) == (1, 4, 0)
    assert [variable.variable for variable in epoch.variables] == ["seen", "value", "visits"]
    assert [variable.files for variable in epoch.variables] == [2, 2, 2]
    assert sum(variable.rows for variable in epoch.variables) == sum(file.rows for file in manifest.files)
    (snapshot,) = description.snapshots
    rows = {variable.variable: variable.rows for variable in snapshot.variables}
    assert rows == {name: len(entries) for name, entries in written.states[3].items()}
    assert set(description.sizes) == {"changes", "generations", "job.json", "manifests", "snapshots"}
    assert description.sizes["changes"] == sum(v.bytes for each in description.epochs for v in each.variables)
    assert description.damaged == ()
    json.dumps(description.to_json())


def test_a_description_goes_on_after_a_damaged_document(written: WrittenCheckpoint) -> None:
    written.storage.write(paths.manifest_file(Epoch(2), FIRST), b"{")
    written.storage.write(paths.snapshot_document(Epoch(3)), b"{")
    description = describe(written.storage)
    assert len(description.epochs) == 6
    assert description.snapshots == ()
    assert len(description.damaged) == 2
