"""The form of snapshots: what is written comes back, in order, and damage is noticed."""

from dataclasses import asdict
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.checkpoint import datafiles, paths
from anabranch.checkpoint.datafiles import read_snapshot_rows, write_snapshot_rows
from anabranch.checkpoint.documents import encode
from anabranch.checkpoint.manifests import Snapshot, read_snapshot, snapshot_epochs, write_snapshot
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch, Generation, Run
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import GROUP, HASH, POSITION, Layout, StageSpec, VariableKind, VariableSpec
from anabranch.core.state_files import SnapshotFile

GROUPS = 32


def value_rows(layout: Layout, hashes: np.ndarray) -> pa.Table:
    places = np.arange(len(hashes))
    return pa.table([hashes, places, places * 3, places * 5], schema=layout.rows)


def random_hashes(rows: int) -> np.ndarray:
    return np.random.default_rng(11).integers(-(2**63), 2**63 - 1, rows)


def write(storage: Storage, stage: StageSpec, rows: pa.Table, variable: str = "value") -> list[SnapshotFile]:
    return write_snapshot_rows(storage, stage, variable, rows, epoch=Epoch(7), key_groups=GROUPS)


def in_order(rows: pa.Table) -> pa.Table:
    hashes = rows.column(HASH).to_pylist()
    return rows.take(pa.array(sorted(range(len(hashes)), key=lambda i: (hashes[i] % GROUPS, hashes[i])), pa.int64()))


def snapshot_of(files: list[SnapshotFile], epoch: int = 7) -> Snapshot:
    return Snapshot(Epoch(epoch), Generation(3), Run(20), 1_700_000_000.5, tuple(files))


def test_rows_come_back_by_key_group_and_hash(storage: Storage, stage: StageSpec) -> None:
    layout = stage.layouts["value"]
    rows = value_rows(layout, random_hashes(3000))
    (file,) = write(storage, stage, rows)
    back = read_snapshot_rows(storage, file, layout, None)
    assert back.schema.equals(layout.rows)
    assert back.equals(in_order(rows))
    groups = rows.column(HASH).to_numpy() % GROUPS
    assert (file.rows, file.first_group, file.last_group) == (3000, groups.min(), groups.max())
    assert file.bytes == Path(storage.full_path(file.path)).stat().st_size


@pytest.mark.parametrize("groups", [set(), {0}, {31}, {3, 4, 20}, set(range(GROUPS))])
def test_only_the_rows_of_the_wanted_key_groups_come_back(storage: Storage, stage: StageSpec, groups: set[int]) -> None:
    layout = stage.layouts["value"]
    rows = in_order(value_rows(layout, random_hashes(2000)))
    (file,) = write(storage, stage, rows)
    wanted = [hash_ % GROUPS in groups for hash_ in rows.column(HASH).to_pylist()]
    assert read_snapshot_rows(storage, file, layout, groups).equals(rows.filter(pa.array(wanted, pa.bool_())))


def test_row_groups_are_small_and_skipped(storage: Storage, stage: StageSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafiles, "ROW_GROUP_ROWS", 100)
    rows = value_rows(stage.layouts["value"], random_hashes(1000))
    (file,) = write(storage, stage, rows)
    parquet = pq.ParquetFile(storage.full_path(file.path))
    assert parquet.num_row_groups == 10
    read: list[int] = []
    read_row_groups = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_groups", lambda self, which: read.extend(which) or read_row_groups(self, which)
    )
    back = read_snapshot_rows(storage, file, stage.layouts["value"], {31})
    assert back.num_rows == np.count_nonzero(rows.column(HASH).to_numpy() % GROUPS == 31) > 0
    assert 0 < len(read) < 3


def test_files_are_bounded_also_within_a_key_group(
    storage: Storage, stage: StageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datafiles, "FILE_ROWS_MAX", 300)
    layout = stage.layouts["value"]
    rows = value_rows(layout, np.concatenate([random_hashes(500), np.arange(900) * GROUPS + 5]))
    files = write(storage, stage, rows)
    assert [file.rows for file in files] == [300, 300, 300, 300, 200]
    assert len({file.path for file in files}) == 5
    assert any(file.first_group == file.last_group == 5 for file in files)
    parts = [read_snapshot_rows(storage, file, layout, None) for file in files]
    assert pa.concat_tables(parts).equals(in_order(rows))
    for file, part in zip(files, parts, strict=True):
        groups = key_groups_of(part.column(HASH).to_numpy(), GROUPS)
        assert (groups.min(), groups.max()) == (file.first_group, file.last_group)


def test_lists_are_in_order_within_a_key(storage: Storage, stage: StageSpec) -> None:
    layout = stage.layouts["seen"]
    positions = [5, 0, 3, 9, 1]
    rows = pa.table([[40, 8, 40, 40, 8], [4, 1, 4, 4, 1], positions, list("abcde")], schema=layout.rows)
    (file,) = write(storage, stage, rows, "seen")
    back = read_snapshot_rows(storage, file, layout, None)
    assert back.column(POSITION).to_pylist() == [0, 1, 3, 5, 9]
    assert back.column("page").to_pylist() == list("beca" + "d")


def test_no_rows_are_no_files(storage: Storage, stage: StageSpec) -> None:
    assert write(storage, stage, stage.layouts["value"].rows.empty_table()) == []


def test_other_tools_read_the_files_as_they_are(storage: Storage, stage: StageSpec) -> None:
    rows = value_rows(stage.layouts["value"], np.array([-5, 64, 3]))
    (file,) = write(storage, stage, rows)
    path = storage.full_path(file.path)
    assert file.path.startswith("anabranch/snapshots/stage2/value/epoch=000000000007/")
    found = duckdb.sql(f"select {GROUP}, {HASH}, user, count, total from read_parquet('{path}')").fetchall()
    assert found == [(0, 64, 1, 3, 5), (3, 3, 2, 6, 10), (27, -5, 0, 0, 0)]


def test_a_file_of_an_earlier_shape_is_read_in_the_shape_of_today(storage: Storage, stage: StageSpec) -> None:
    narrow = VariableSpec("value", VariableKind.VALUE, pa.schema([("total", pa.int32())]))
    before = StageSpec(stage.number, stage.name, stage.key, (narrow,))
    rows = pa.table([[1, 2], [10, 20], [7, 8]], schema=before.layouts["value"].rows)
    (file,) = write(storage, before, rows)
    wide = VariableSpec("value", VariableKind.VALUE, pa.schema([("more", pa.string()), ("total", pa.int64())]))
    back = read_snapshot_rows(storage, file, Layout(stage.key, wide), None)
    assert back.schema.equals(Layout(stage.key, wide).rows)
    assert back.column("total").to_pylist() == [7, 8]
    assert back.column("more").to_pylist() == [None, None]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hashes=st.lists(st.integers(-(2**63), 2**63 - 1)), groups=st.sets(st.integers(0, GROUPS - 1)))
def test_any_rows_come_back(storage: Storage, stage: StageSpec, hashes: list[int], groups: set[int]) -> None:
    layout = stage.layouts["value"]
    rows = value_rows(layout, np.array(hashes, dtype=np.int64))
    parts = [read_snapshot_rows(storage, file, layout, groups) for file in write(storage, stage, rows)]
    back = pa.concat_tables([layout.rows.empty_table(), *parts])
    wanted = {i for i, hash_ in enumerate(hashes) if hash_ % GROUPS in groups}
    assert set(back.column("user").to_pylist()) == wanted
    order = [(hash_ % GROUPS, hash_) for hash_ in back.column(HASH).to_pylist()]
    assert order == sorted(order)
    assert len(order) == len(wanted)


def test_a_snapshot_comes_back_as_it_was_written(storage: Storage, stage: StageSpec) -> None:
    snapshot = snapshot_of(write(storage, stage, value_rows(stage.layouts["value"], random_hashes(10))))
    assert snapshot_epochs(storage) == []
    write_snapshot(storage, snapshot)
    assert read_snapshot(storage, Epoch(7)) == snapshot
    assert snapshot_epochs(storage) == [7]
    assert snapshot.files_of(2, "value") == list(snapshot.files)
    assert snapshot.files_of(2, "seen") == snapshot.files_of(1, "value") == []
    assert snapshot.committed_by == (3, 20)


def test_a_snapshot_that_is_written_twice_is_one_of_the_two(storage: Storage, stage: StageSpec) -> None:
    layout = stage.layouts["value"]
    rows = value_rows(layout, random_hashes(10))
    first, second = write(storage, stage, rows), write(storage, stage, rows)
    assert first[0].path != second[0].path
    write_snapshot(storage, snapshot_of(first))
    write_snapshot(storage, snapshot_of(second))
    (file,) = read_snapshot(storage, Epoch(7)).files
    assert file == second[0]
    for each in (*first, *second):
        assert read_snapshot_rows(storage, each, layout, None).equals(in_order(rows))


def test_snapshots_are_listed_in_the_order_of_their_epochs(storage: Storage) -> None:
    for epoch in (12, 3, 100):
        write_snapshot(storage, snapshot_of([], epoch))
    storage.write(f"{paths.SNAPSHOTS}/notes.json", b"{}")
    assert snapshot_epochs(storage) == [3, 12, 100]


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "other"])
def test_a_damaged_file_is_named(storage: Storage, stage: StageSpec, damage: str) -> None:
    (file,) = write(storage, stage, value_rows(stage.layouts["value"], random_hashes(100)))
    content = storage.read(file.path)
    if damage == "gone":
        storage.delete(file.path)
    elif damage == "other":
        storage.write(file.path, b"not Parquet")
    else:
        storage.write(file.path, content[:-1] if damage == "cut" else content[:50] + b"\0\1\2" + content[53:])
    with pytest.raises(CheckpointError) as error:
        read_snapshot_rows(storage, file, stage.layouts["value"], None)
    assert storage.full_path(file.path) in str(error.value)
    assert "Restore it" in str(error.value)


@pytest.mark.parametrize("content", [{"epoch": 7}, {**asdict(snapshot_of([])), "files": [{"path": "x"}]}])
def test_a_document_with_other_content_is_named(storage: Storage, content: dict[str, object]) -> None:
    storage.write(paths.snapshot_document(Epoch(7)), encode(content))
    with pytest.raises(CheckpointError, match=r"000000000007\.json is damaged: its content is not as expected"):
        read_snapshot(storage, Epoch(7))


def test_a_missing_snapshot_is_named(storage: Storage) -> None:
    with pytest.raises(CheckpointError, match=r"000000000007\.json is missing"):
        read_snapshot(storage, Epoch(7))
