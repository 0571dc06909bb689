"""Imports go down the tree of packages only, and each outside library stays in the packages that may know it."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "anabranch"
PACKAGES = ["api", "plan", "operators", "engine", "control", "worker", "checkpoint", "wire", "runtime", "core"]
#: import-linter sees outside libraries as a whole, so the rule for this part of pyarrow is checked here.
MAY_USE_FLIGHT = {"wire", "worker"}


#: The only room, from the package, for what PySpark does not promise to keep: its JVM, and what it keeps to itself.
SPARK_ROOM = Path("engine/spark")
#: Packages that another change moves there.
NOT_CHECKED = {"operators", "plan"}
#: Attributes by which PySpark's objects hold on to their twins in the JVM, or that lead there.
SPARK_PRIVATE = {"_jvm", "_jsc", "_jdf", "_jsq", "_jgd", "_jc", "_jwrite", "_jsparkSession", "_gateway", "_sc"}


def imported_names(text: str) -> Iterator[tuple[int, str]]:
    """What a module imports, wherever in it the import stands, and the line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def flight_imports(text: str) -> list[int]:
    return [line for line, name in imported_names(text) if f"{name}.".startswith("pyarrow.flight.")]


def test_only_wire_and_worker_import_flight() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}:{line}: Flight belongs to wire and worker; call a client of anabranch.wire"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in MAY_USE_FLIGHT
        for line in flight_imports(path.read_text("utf-8"))
    ]
    if breaches:
        pytest.fail("\n".join(breaches), pytrace=False)


def private_uses_of_spark(text: str) -> list[tuple[int, str]]:
    """The lines of a module that touch Spark's private parts, and what they touch."""
    found = [(line, name) for line, name in imported_names(text) if f"{name}.".startswith("py4j.")]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in SPARK_PRIVATE:
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Constant) and node.value in SPARK_PRIVATE:
            found.append((node.lineno, str(node.value)))  # as for getattr and hasattr
    return sorted(found)


def test_only_one_room_touches_what_spark_keeps_to_itself() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}:{line}: {name} is Spark's own; call a function of anabranch.engine.spark"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).is_relative_to(SPARK_ROOM)
        and path.relative_to(PACKAGE).parts[0] not in NOT_CHECKED
        for line, name in private_uses_of_spark(path.read_text("utf-8"))
    ]
    if breaches:
        pytest.fail("\n".join(breaches), pytrace=False)


@pytest.mark.parametrize(
    "text",
    [
        "from py4j.protocol import Py4JError",
        "import py4j.java_gateway",
        "def f(rows):\n    return rows._jdf.queryExecution()",
        "jvm = spark._jvm",
        "plan = getattr(rows, '_jdf')",
    ],
)
def test_a_touch_of_what_spark_keeps_to_itself_is_found(text: str) -> None:
    assert private_uses_of_spark(text)
    assert private_uses_of_spark("from pyspark.sql import DataFrame\nself._jobs = rows.sparkSession") == []


@pytest.mark.parametrize(
    "text",
    [
        "import pyarrow.flight\n",
        "import pyarrow.flight as fl\n",
        "from pyarrow import compute, flight\n",
        "from pyarrow.flight import FlightClient\n",
        "def f():\n    import pyarrow.flight\n",
    ],
)
def test_flight_is_noticed_however_it_is_imported(text: str) -> None:
    assert flight_imports(text)


def test_the_rest_of_pyarrow_is_not_taken_for_flight() -> None:
    assert flight_imports("import pyarrow as pa\nfrom pyarrow import compute\nfrom . import flight\n") == []


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """A project with Anabranch's packages and contracts, and no code yet."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ["", *PACKAGES]:
        folder = tmp_path / "anabranch" / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    return tmp_path


def broken_contracts(project: Path) -> str:
    """What import-linter has to say against the project, or nothing."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--no-logo"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_contracts_name_every_package(skeleton: Path) -> None:
    (skeleton / "anabranch" / "cli.py").write_text("from anabranch import api, control, worker\n")
    (skeleton / "anabranch" / "api" / "query.py").write_text("import pyspark\nfrom anabranch import engine\n")
    assert broken_contracts(skeleton) == ""


@pytest.mark.parametrize(
    ("module", "statement", "complaint"),
    [
        (
            "core/route.py",
            "from anabranch.wire import client",
            "anabranch.core is not allowed to import anabranch.wire",
        ),
        (
            "engine/loop.py",
            "from anabranch import control",
            "anabranch.engine is not allowed to import anabranch.control",
        ),
        ("worker/a.py", "from anabranch import engine", "anabranch.worker is not allowed to import anabranch.engine"),
        ("control/a.py", "from anabranch import worker", "anabranch.control is not allowed to import anabranch.worker"),
        ("api/query.py", "from anabranch import cli", "anabranch.api is not allowed to import anabranch.cli"),
        ("wire/client.py", "def f():\n    import pyspark", "anabranch.wire is not allowed to import pyspark"),
        ("loose.py", "", "anabranch.loose"),
    ],
)
def test_an_import_against_the_contracts_is_refused(
    skeleton: Path, module: str, statement: str, complaint: str
) -> None:
    (skeleton / "anabranch" / "wire" / "client.py").write_text("")
    (skeleton / "anabranch" / "cli.py").write_text("")
    (skeleton / "anabranch" / module).write_text(f"{statement}\n")
    assert complaint in broken_contracts(skeleton)
