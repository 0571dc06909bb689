"""Compaction gives the state that the change files give, from whatever it starts, in however many ranges."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.checkpoint import paths
from anabranch.checkpoint.datafiles import read_snapshot_rows
from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.manifests import Snapshot, read_snapshot, snapshot_epochs
from anabranch.checkpoint.statefiles import state_files
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, FencedError
from anabranch.core.ids import NO_EPOCH, Epoch, Generation, StageNumber
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.worker import compaction
from anabranch.worker.compaction import compact, export, main, state_rows
from support.written_checkpoint import WrittenCheckpoint, entries_of

FIRST = Generation(1)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "checkpoint"), durable=False)


@pytest.fixture
def stage() -> StageSpec:
    """A stage with one state variable of each kind."""
    at = pa.schema([("at", pa.timestamp("us", tz="UTC"))])
    return StageSpec(
        StageNumber(2),
        "stage2",
        pa.schema([("user", pa.int64())]),
        (
            VariableSpec("value", VariableKind.VALUE, pa.schema([("count", pa.int64()), ("total", pa.int64())])),
            VariableSpec("seen", VariableKind.LIST, pa.schema([("page", pa.string())])),
            VariableSpec("visits", VariableKind.MAP, at, map_key=pa.schema([("page", pa.string())])),
        ),
    )


@pytest.fixture
def written(storage: Storage, stage: StageSpec) -> WrittenCheckpoint:
    written = WrittenCheckpoint(storage, stage)
    claim_generation(storage, {})
    written.write_random(range(8))
    return written


def assert_holds(written: WrittenCheckpoint, snapshot: Snapshot, storage: Storage | None = None) -> None:
    """The snapshot is the state of its epoch, each file of its key groups, and no key group in two ranges."""
    for variable, layout in written.stage.layouts.items():
        files = snapshot.files_of(written.stage.number, variable)
        parts = [read_snapshot_rows(storage or written.storage, file, layout, None) for file in files]
        rows = pa.concat_tables([layout.rows.empty_table(), *parts])
        assert entries_of(layout, rows) == written.states[snapshot.epoch][variable]
        ranges = [(file.first_group, file.last_group) for file in files]
        assert all(earlier[1] < later[0] for earlier, later in pairwise(ranges))


def test_a_snapshot_holds_the_state_of_its_epoch(written: WrittenCheckpoint) -> None:
    for epoch in (0, 3, 7):
        snapshot = compact(written.storage, Epoch(epoch), generation=FIRST)
        assert snapshot == read_snapshot(written.storage, Epoch(epoch))
        assert snapshot.committed_by == (1, epoch)
        assert_holds(written, snapshot)


def test_a_snapshot_out_of_an_older_one_and_changes_is_the_same(written: WrittenCheckpoint) -> None:
    compact(written.storage, Epoch(4), generation=FIRST)
    for epoch in range(4):  # nothing before the snapshot is needed any more
        manifest = paths.manifest_file(Epoch(epoch), FIRST)
        written.storage.delete(manifest)
    assert_holds(written, compact(written.storage, Epoch(7), generation=FIRST))


@pytest.mark.parametrize("rows_max", [2, 20])
def test_memory_is_bounded_by_working_through_ranges_of_key_groups(
    written: WrittenCheckpoint, rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "RANGE_ROWS_MAX", rows_max)
    assert_holds(written, compact(written.storage, Epoch(3), generation=FIRST))
    snapshot = compact(written.storage, Epoch(7), generation=FIRST)
    assert_holds(written, snapshot)
    assert len(snapshot.files_of(2, "visits")) > 1
    for file in snapshot.files:
        assert file.rows <= rows_max or file.first_group == file.last_group


def test_wide_rows_make_narrow_ranges(written: WrittenCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_RANGE_BYTES_MAX", 4000)
    snapshot = compact(written.storage, Epoch(7), generation=FIRST)
    assert_holds(written, snapshot)
    assert len(snapshot.files_of(2, "seen")) > 4


def test_a_snapshot_that_is_there_is_not_made_again(written: WrittenCheckpoint) -> None:
    first = compact(written.storage, Epoch(5), generation=FIRST)
    assert compact(written.storage, Epoch(5), generation=FIRST) == first


def test_a_snapshot_of_a_run_that_was_rolled_back_is_replaced(written: WrittenCheckpoint) -> None:
    first = compact(written.storage, Epoch(7), generation=FIRST)
    written.write_random([7], seed=1, run=99)
    second = compact(written.storage, Epoch(7), generation=FIRST)
    assert (first.run, second.run) == (7, 99)
    assert_holds(written, second)


def test_a_savepoint_is_a_snapshot_in_another_storage(written: WrittenCheckpoint, tmp_path: Path) -> None:
    compact(written.storage, Epoch(6), generation=FIRST)
    savepoint = Storage(str(tmp_path / "savepoint"), durable=False)
    snapshot = compact(written.storage, Epoch(6), generation=FIRST, write_to=savepoint)
    assert read_snapshot(savepoint, Epoch(6)) == snapshot
    assert state_files(savepoint, Epoch(6)).snapshot == snapshot
    assert_holds(written, snapshot, savepoint)


def test_a_driver_that_was_replaced_publishes_no_snapshot(written: WrittenCheckpoint) -> None:
    claim_generation(written.storage, {})
    with pytest.raises(FencedError, match="newer driver"):
        compact(written.storage, Epoch(7), generation=FIRST)
    assert snapshot_epochs(written.storage) == []
    assert_holds(written, compact(written.storage, Epoch(7), generation=Generation(2)))


def test_before_the_first_epoch_there_is_nothing_to_compact(storage: Storage, stage: StageSpec) -> None:
    WrittenCheckpoint(storage, stage)
    with pytest.raises(CheckpointError, match="Wait for the first epoch"):
        compact(storage, NO_EPOCH, generation=FIRST)


def test_an_epoch_without_any_state_has_a_snapshot_without_files(storage: Storage, stage: StageSpec) -> None:
    WrittenCheckpoint(storage, stage).write(0, {})
    assert compact(storage, Epoch(0), generation=FIRST).files == ()


def test_damaged_changes_make_no_snapshot(written: WrittenCheckpoint) -> None:
    file = state_files(written.storage, Epoch(7)).change_files[-1]
    written.storage.write(file.path, written.storage.read(file.path)[:-9] + b"123456789")
    with pytest.raises(CheckpointError, match=file.path):
        compact(written.storage, Epoch(7), generation=FIRST)
    assert snapshot_epochs(written.storage) == []


def test_ranges_shrink_when_state_turns_out_larger_than_any_epoch_of_changes(
    storage: Storage, stage: StageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "RANGE_ROWS_MAX", 100)
    written = WrittenCheckpoint(storage, stage, key_groups=64)
    for epoch in range(10):
        written.write(epoch, {"value": [(0, key, None, (key, epoch)) for key in range(epoch * 60, epoch * 60 + 60)]})
    files = state_files(storage, Epoch(9))
    parts = list(state_rows(storage, files, stage, "value", key_groups=64))
    assert 6 <= len(parts) <= 16
    assert max(part.num_rows for part in parts) <= 100
    assert entries_of(stage.layouts["value"], pa.concat_tables(parts)) == written.states[9]["value"]


def test_an_export_has_the_users_columns_and_nothing_else(written: WrittenCheckpoint, tmp_path: Path) -> None:
    compact(written.storage, Epoch(2), generation=FIRST)
    rows = export(written.storage, Epoch(5), str(tmp_path / "export"))
    layouts = written.stage.layouts
    assert rows == {f"stage2/{name}.parquet": len(written.states[5][name]) for name in layouts}
    for variable, layout in layouts.items():
        table = pq.read_table(tmp_path / "export" / "stage2" / f"{variable}.parquet")
        assert table.schema.names == layout.rows.names[1:]
        assert entries_of(layout, table) == written.states[5][variable]
    found = duckdb.sql(f"select count(*), sum(count) from '{tmp_path}/export/stage2/value.parquet'").fetchall()
    values = written.states[5]["value"].values()
    assert found == [(len(values), sum(value[0] for value in values))]


def test_an_export_of_nothing_has_files_without_rows(storage: Storage, stage: StageSpec, tmp_path: Path) -> None:
    WrittenCheckpoint(storage, stage).write(0, {})
    assert set(export(storage, Epoch(0), str(tmp_path / "export")).values()) == {0}
    assert pq.read_table(tmp_path / "export" / "stage2" / "seen.parquet").schema.names == ["user", "_position", "page"]


def test_an_export_overwrites_nothing(written: WrittenCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        export(written.storage, Epoch(5), str(tmp_path / "full"))
    with pytest.raises(CheckpointError, match="local folders only"):
        export(written.storage, Epoch(5), "s3://bucket/export")
    with pytest.raises(CheckpointError, match="Cannot write"):
        export(written.storage, Epoch(5), str(tmp_path / "full" / "notes" / "export"))


def run_process(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "anabranch.worker.compaction", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_process_prints_one_line_about_the_snapshot(written: WrittenCheckpoint) -> None:
    done = run_process(written.storage.location, "7")
    assert (done.returncode, done.stderr) == (0, "")
    snapshot = read_snapshot(written.storage, Epoch(7))
    assert_holds(written, snapshot)
    assert json.loads(done.stdout) == {
        "epoch": 7,
        "files": len(snapshot.files),
        "rows": sum(file.rows for file in snapshot.files),
        "bytes": sum(file.bytes for file in snapshot.files),
    }


def test_the_process_says_what_went_wrong(
    written: WrittenCheckpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    niceness: list[int] = []
    monkeypatch.setattr(compaction.os, "nice", niceness.append)  # the tests themselves go on as they are
    assert main([written.storage.location, "9"]) == 1
    assert niceness == [19]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("There is no snapshot of epoch 9: The manifest of epoch 8 is missing")
    claim_generation(written.storage, {})
    assert main([written.storage.location, "7", "--generation", "1"]) == 1
    assert "newer driver" in capsys.readouterr().err
    assert snapshot_epochs(written.storage) == []
