"""Event files: what is in them, how large they are, and that they appear whole or not at all."""

import csv
import json
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.core.errors import SettingsError
from anabranch.workload import WorkloadSpec, files, generate, write_files
from anabranch.workload.events import chunk_rows

SPEC = WorkloadSpec(keys=100, payload_bytes=5, disorder_ms=3)


def read_rows(paths: tuple[Path, ...]) -> list[dict[str, object]]:
    """The events of files of any format, with plain values."""
    rows: list[dict[str, object]] = []
    for path in paths:
        if path.suffix == ".parquet":
            rows += pq.read_table(path).to_pylist()
        elif path.suffix == ".json":
            rows += [json.loads(line) for line in path.read_text().splitlines()]
        else:
            with path.open(newline="") as stream:
                rows += list(csv.DictReader(stream))
    return [{name: plain(name, value) for name, value in row.items()} for row in rows]


def plain(name: str, value: object) -> object:
    if name == "timestamp":
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    if name == "bot":
        return value in (True, "true")
    return int(value) if name in ("id", "namespace", "length_old", "length_new") else value  # type: ignore[call-overload]


@pytest.mark.parametrize("format", ["json", "csv", "parquet"])
def test_files_hold_the_generated_events_in_order(tmp_path: Path, format: str) -> None:
    written = write_files(SPEC, tmp_path / "new" / "out", rows=1000, files=3, format=format)
    assert [path.name for path in written.paths] == [f"events-0000{index}.{format}" for index in range(3)]
    assert sorted((tmp_path / "new" / "out").iterdir()) == list(written.paths)
    assert read_rows(written.paths) == generate(SPEC, 0, 1000).to_pylist()
    assert written.rows == 1000
    assert written.size_bytes == sum(path.stat().st_size for path in written.paths)


def test_only_the_columns_asked_for_are_written(tmp_path: Path) -> None:
    written = write_files(SPEC, tmp_path, rows=2, columns=["server_name", "id"])
    assert [list(row) for row in read_rows(written.paths)] == [["server_name", "id"]] * 2


@pytest.mark.parametrize("format", ["json", "csv"])
@pytest.mark.parametrize("size_bytes", [3000, 20_000_000])
def test_text_files_have_the_size_asked_for_to_a_line(tmp_path: Path, format: str, size_bytes: int) -> None:
    written = write_files(SPEC, tmp_path, size_bytes=size_bytes, files=3, format=format, columns=["id", "title"])
    sizes = [path.stat().st_size for path in written.paths]
    assert written.size_bytes == sum(sizes)
    assert size_bytes - 100 < written.size_bytes <= size_bytes
    assert max(sizes) - min(sizes) < 300
    assert read_rows(written.paths) == generate(SPEC, 0, written.rows, ["id", "title"]).to_pylist()


@pytest.mark.parametrize("size_bytes", [200_000, 15_000_000])
def test_parquet_files_have_about_the_size_asked_for(tmp_path: Path, size_bytes: int) -> None:
    written = write_files(SPEC, tmp_path, size_bytes=size_bytes, files=2, format="parquet")
    assert written.size_bytes == pytest.approx(size_bytes, rel=0.1)
    assert sum(pq.read_metadata(path).num_rows for path in written.paths) == written.rows


def test_each_file_has_an_event_however_small_the_size(tmp_path: Path) -> None:
    written = write_files(SPEC, tmp_path, size_bytes=3, files=3)
    assert read_rows(written.paths) == generate(SPEC, 0, 3).to_pylist()


def test_progress_grows_to_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    rows = 2 * chunk_rows(SPEC) + 10
    written = write_files(SPEC, tmp_path, rows=rows, files=2, columns=["id"], progress=lambda *done: seen.append(done))
    assert len(seen) == 4
    assert seen == sorted(seen)
    assert seen[-1] == (written.rows, written.size_bytes)


def test_an_interrupted_file_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: int, _size_bytes: int) -> None:
        if rows > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_files(SPEC, tmp_path, rows=20, files=2, progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["events-00000.json"]
    names: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: (names.append(path.name), replace(path, to))[1])
    write_files(SPEC, tmp_path, rows=2, overwrite=True)
    assert names == [".events-00000.json.tmp"]


def test_a_directory_with_files_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    first = write_files(SPEC, tmp_path, rows=10, files=3)
    with pytest.raises(SettingsError, match="not empty"):
        write_files(SPEC, tmp_path, rows=1)
    assert read_rows(first.paths) == generate(SPEC, 0, 10).to_pylist()
    second = write_files(SPEC, tmp_path, rows=5, format="csv", overwrite=True)
    assert list(tmp_path.iterdir()) == list(second.paths)


def test_overwriting_never_removes_what_is_not_an_event_file(tmp_path: Path) -> None:
    write_files(SPEC, tmp_path, rows=10)
    (tmp_path / "events-notes.json").write_text("mine")
    with pytest.raises(SettingsError, match=r"holds events-notes\.json"):
        write_files(SPEC, tmp_path, rows=1, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_cannot_be_the_target(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(SettingsError, match="is a file"):
        write_files(SPEC, tmp_path / "out", rows=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Neither rows nor size"),
        ({"rows": 1, "size_bytes": 1}, "Both rows and size"),
        ({"rows": 0}, "rows is 0"),
        ({"size_bytes": -5}, "size is -5"),
        ({"rows": 5, "files": 0}, "files is 0"),
        ({"rows": 5, "files": 6}, "no file can be empty"),
        ({"rows": 5, "format": "xml"}, "format 'xml' is unknown"),
        ({"rows": 5, "columns": ["x"]}, "asks for 'x'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        write_files(SPEC, tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["json", "csv", "parquet"])
def test_memory_stays_bounded_however_many_rows_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    sizes: list[int] = []
    generate_batches = files.generate_batches

    def watched(*arguments: object) -> object:
        for batch in generate_batches(*arguments):  # type: ignore[arg-type]
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(files, "generate_batches", watched)
    write_files(SPEC, tmp_path, rows=200_000, format=format, columns=["id"])
    assert sum(sizes) == 200_000
    assert max(sizes) <= chunk_rows(SPEC)
    assert pa.total_allocated_bytes() < 64 * 2**20
