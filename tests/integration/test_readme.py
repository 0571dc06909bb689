"""The first program of the README runs as it stands there, with the default settings, and what it says happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

README = Path(__file__).parents[2] / "README.md"


def first_program() -> str:
    found = re.search(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def below(folder: Path, program: str) -> str:
    """The program with its places below a folder: relative ones are below the directory that Spark was started in."""
    for option, place in (("path", "out"), ("checkpointLocation", "checkpoint")):
        said = f'.option("{option}", "{place}")'
        assert program.count(said) == 1
        program = program.replace(said, f'.option("{option}", {str(folder / place)!r})')
    return program


@pytest.mark.timeout(240)
def test_the_first_program_of_the_readme_runs(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, names = below(tmp_path, first_program()), dict[str, Any]()
    try:
        exec(compile(program, str(README), "exec"), names)
        query = names["query"]
        assert names["spark"] is spark
        (workers,) = re.findall(r"rescale\(workers=(\d+)\)", program)
        assert len(query.workers()) == int(workers)
        assert query.last_rescale.state == "done"
        assert query.isActive
        assert re.search(r"\|\s*server\s*\|", capsys.readouterr().out), "the state is a table"
        assert list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
        assert (tmp_path / "out").is_dir()
    finally:
        if "query" in names:
            names["query"].stop()
    assert names["query"].exception() is None
