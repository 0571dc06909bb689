"""The command workgen: what it writes, and one clear sentence for each mistake."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from anabranch.core.errors import SettingsError
from anabranch.workload import WorkloadSpec, generate
from anabranch.workload.command import parse_size, workgen
from support.sentences import says


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(workgen)
    return app


def test_the_command_writes_the_events_that_its_options_describe(app: typer.Typer, tmp_path: Path) -> None:
    options = "--rows 500 --files 2 --format parquet --keys 20 --skew 1.1 --ids 5 --payload-bytes 4 --seed 3"
    done = CliRunner().invoke(app, [str(tmp_path), *options.split()])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("500 events")
    expected = generate(WorkloadSpec(keys=20, skew=1.1, ids=5, payload_bytes=4, seed=3), 0, 500)
    assert pq.read_table(tmp_path).to_pylist() == expected.to_pylist()


def test_a_size_is_kept(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(tmp_path), "--size", "1MB", "--files", "8"])
    assert done.exit_code == 0, done.output
    sizes = [path.stat().st_size for path in tmp_path.glob("*.json")]
    assert len(sizes) == 8
    assert sum(sizes) == pytest.approx(1_000_000, rel=0.001)


def test_overwrite_replaces_the_files(app: typer.Typer, tmp_path: Path) -> None:
    for options, code in ((["--rows", "3"], 0), (["--rows", "4"], 2), (["--rows", "5", "--overwrite"], 0)):
        assert CliRunner().invoke(app, [str(tmp_path), *options]).exit_code == code
    assert len((tmp_path / "events-00000.json").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("", "Neither --rows nor --size … Give one of the two"),
        ("--rows 1 --size 1GB", "Both --rows and --size … Give one of the two"),
        ("--rows -1", "--rows is -1 … --files is 1 … at least 1"),
        ("--size 12XB", "--size is '12XB' … Give something like 500MB, 1GB or 64MiB"),
        ("--rows 9 --files 0", "--files is 0 … between 1 and 100000"),
        ("--rows 9 --format xml", "The format 'xml' … one of json, csv, parquet"),
        (
            "--rows 9 --skew -1",
            "--skew is -1.0 … between 0.0 and 100.0. Choose",
        ),
        (
            "--rows 9 --payload-bytes -1",
            "--payload-bytes is -1 … between 0 and 16777216. Choose",
        ),
        ("--rows 9 --keys 0", "--keys is 0 … between 1 and 2147483647. Choose"),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(
    app: typer.Typer, tmp_path: Path, options: str, sentence: str
) -> None:
    done = CliRunner().invoke(app, [str(tmp_path / "out"), *options.split()])
    assert done.exit_code == 2
    assert says(done.stderr, f"anabranch workgen: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_disk_that_refuses_is_not_a_mistake_in_the_options(app: typer.Typer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, [str(tmp_path / "file" / "below"), "--rows", "1"])
    assert done.exit_code == 1
    assert "Check the disk and the permissions" in done.stderr


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("1GB", 10**9), ("1.5 mb", 1_500_000), ("64MiB", 2**26), ("2k", 2000), ("10B", 10)],
)
def test_sizes_are_understood(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "1 GB more"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="not a size"):
        parse_size(text)
