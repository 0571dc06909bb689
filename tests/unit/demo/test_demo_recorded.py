"""Recorded events: found in every format that workgen writes, and refused when the job could not read them."""

from pathlib import Path

import pytest

from anabranch.core.errors import SettingsError
from anabranch.demo.options import find_recorded
from anabranch.workload import WorkloadSpec, write_files


@pytest.mark.parametrize("format", ["json", "parquet"])
def test_columns_with_names_are_chosen(tmp_path: Path, format: str) -> None:
    write_files(WorkloadSpec(), tmp_path, rows=5, files=2, format=format)
    found = find_recorded(tmp_path)
    assert (found.format, found.schema, found.files) == (format, "`id` LONG, `server_name` STRING", 2)


def test_columns_of_csv_files_are_all_named_in_order(tmp_path: Path) -> None:
    write_files(WorkloadSpec(), tmp_path, rows=5, format="csv", columns=["title", "id", "server_name"])
    assert find_recorded(tmp_path).schema == "`title` STRING, `id` LONG, `server_name` STRING"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "which holds no files. Make event files with"),
        ({".hidden.json": "{}", "_SUCCESS": ""}, "which holds no files"),
        ({"a.json": "{}", "b.csv": "id"}, "files of the kinds csv, json. Choose a directory with files of one kind"),
        ({"a.txt": "hello"}, "files of the kinds txt"),
        ({"a.json": "hello\n"}, "cannot be read as json"),
        ({"a.parquet": "hello"}, "cannot be read as parquet"),
        ({"a.json": "[1, 2]\n"}, "have no id and no server_name"),
        ({"a.csv": "id,title\n1,x\n"}, "have no server_name. Choose events like those of anabranch workgen."),
    ],
)
def test_what_the_job_could_not_read_is_refused(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=complaint):
        find_recorded(tmp_path)
