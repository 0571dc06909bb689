"""What is built for others to install: the whole package with its types, command and licence, and nothing else."""

import configparser
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from anabranch import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a wheel that was built as pip would, from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def about(wheel: dict[str, bytes], name: str) -> str:
    (found,) = [path for path in wheel if path.endswith(f".dist-info/{name}")]
    return wheel[found].decode()


def test_a_wheel_has_the_whole_package_and_nothing_else(wheel: dict[str, bytes]) -> None:
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "anabranch").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {path for path in wheel if ".dist-info/" not in path}
    assert packed == expected
    assert {"anabranch/__init__.py", "anabranch/cli/__init__.py", "anabranch/py.typed"} <= packed
    assert not [path for path in wheel if Path(path).name.startswith(("test_", "conftest"))]


def test_a_wheel_brings_the_command_and_the_licence(wheel: dict[str, bytes]) -> None:
    commands = configparser.ConfigParser()
    commands.read_string(about(wheel, "entry_points.txt"))
    assert dict(commands["console_scripts"]) == {"anabranch": f"{cli.__name__}:{cli.main.__name__}"}
    assert about(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    metadata = Parser().parsestr(about(wheel, "METADATA"))
    assert (metadata["Name"], metadata["License-Expression"]) == ("anabranch", "Apache-2.0")
    assert "pyspark==4.3.*" in (metadata.get_all("Requires-Dist") or [])
