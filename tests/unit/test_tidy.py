"""The tree stays tidy: every habit that a program can check is checked here, one rule and one test each."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = PurePosixPath("src/anabranch")
#: Names the words that it looks for.
THIS_FILE = PurePosixPath("tests/unit/test_tidy.py")

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}
#: Paths, from the project's root, of modules that may sleep. Waiting on an event or a condition can be woken: do that.
MAY_SLEEP: frozenset[str] = frozenset()
#: Paths, from the package, of modules and packages whose output is for people.
MAY_PRINT = ("cli/__init__.py", "demo", "demo.py", "api/stream.py", "api/query.py", "engine/spark/sinks.py")
LEFTOVER = re.compile(r"\b(TODO|FIXME|XXX)\b")
PRIVATE_PATH = re.compile(r"(?<![\w.*})])/(?:home|root|Users|work|workspace)/[\w.{<$]")
#: What makes a decision depend on when or where it is taken. The core is given times and seeds instead.
IMPURE = re.compile(
    r"time\.(time|time_ns|monotonic|monotonic_ns|perf_counter|perf_counter_ns|localtime|gmtime|sleep)$"
    r"|datetime\.(datetime|date)\.(now|utcnow|today)$"
    r"|(random|secrets|uuid|numpy\.random)(\.|$)|os\.urandom$"
)
#: Private parts of Spark and of other libraries, and what every named tuple has: no change of ours gives them another
#: name.
MAY_BE_REACHED = {"_jvm", "_jsc", "_jdf", "_gateway", "_temp_dir", "_registry", "_levelToName", "_asdict", "_replace"}
#: Tests that reach into private attributes, and plant mistakes and shortcuts there. Only ever take one off this list.
REACHES_INSIDE = frozenset(
    {
        "tests/faults/test_rescaling_under_faults.py",
        "tests/integration/test_aggregate_sizes.py",
        "tests/integration/test_changed_operators.py",
        "tests/integration/test_checks_against_spark.py",
        "tests/integration/test_rescaling.py",
        "tests/property/worker/test_due_properties.py",
        "tests/property/worker/test_redis_store_properties.py",
        "tests/simulated/checks.py",
        "tests/simulated/observation.py",
        "tests/simulated/shortcuts.py",
        "tests/simulated/tasks.py",
        "tests/simulated/world.py",
        "tests/simulation/test_mistakes.py",
        "tests/simulation/test_mistakes_of_changes.py",
        "tests/support/state_workers.py",
        "tests/unit/api/test_starting_spark.py",
        "tests/unit/checkpoint/test_interrupted_rewinds.py",
        "tests/unit/operators/test_process_frames.py",
        "tests/unit/test_cli_control.py",
        "tests/unit/wire/test_worker_client.py",
        "tests/unit/worker/test_bounded_messages.py",
        "tests/unit/worker/test_drain.py",
        "tests/unit/worker/test_large_values.py",
        "tests/unit/worker/test_migrating_worker_drains.py",
        "tests/unit/worker/test_migrating_worker_faults.py",
        "tests/unit/worker/test_migrating_workers.py",
        "tests/unit/worker/test_row_table.py",
        "tests/unit/worker/test_state_stores.py",
        "tests/unit/worker/test_tls.py",
        "tests/unit/worker/test_variable_state.py",
    }
)
BROAD_ERRORS = {"Exception", "BaseException"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".lock", ".html", ".js", ".css", ".json", ".yaml", ".yml", ".sh", ".sql", ""}


@dataclass(frozen=True)
class Source:
    """A file of the project: its path from the root, and its text."""

    path: PurePosixPath
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def at(self, line: int, what: str) -> str:
        return f"{self.path}:{line}: {what}"


Rule = Callable[[Source], Iterator[str]]


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """The Python files below these folders of the project; a folder may be absent."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(Source(PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text("utf-8")) for path in paths)


def texts() -> Iterator[Source]:
    """Every text file of the project, whatever its language, except what a tool has made."""
    made = {".git", "node_modules", "__pycache__", "build", "dist", "results", "demo-output"}
    names = ("src", "bench", "soak", "examples", "tests", "docs", ".ci")
    folders = [path for name in names for path in (ROOT / name).rglob("*")]
    for path in sorted([*ROOT.iterdir(), *folders]):
        where = path.relative_to(ROOT)
        if path.is_file() and path.suffix in TEXT_SUFFIXES and not made.intersection(where.parts):
            yield Source(PurePosixPath(where.as_posix()), path.read_text("utf-8", errors="replace"))


def is_package_path(path: PurePosixPath, *inside: str) -> bool:
    return any(path.is_relative_to(PACKAGE / name) for name in inside)


def dotted_names(source: Source) -> Iterator[tuple[int, str]]:
    """Each name that the module uses, spelt out from the module it was imported from, and its line."""
    imported: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            name, _, rest = ast.unparse(node).partition(".")
            if name in imported:
                yield node.lineno, f"{imported[name]}.{rest}"


def long_files(source: Source) -> Iterator[str]:
    count = len(source.text.splitlines())
    if count > FILE_LINES_MAX:
        yield source.at(1, f"{count} lines, {FILE_LINES_MAX} at most; give each job a file of its own")


def long_functions(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                yield source.at(node.lineno, f"{node.name} has {count} lines, {FUNCTION_LINES_MAX} at most; split it")


def leftovers(source: Source) -> Iterator[str]:
    if source.path == THIS_FILE:
        return
    for line, text in enumerate(source.text.splitlines(), start=1):
        if found := LEFTOVER.search(text):
            yield source.at(line, f"{found[0]} left behind; do it or drop it")


def private_paths(source: Source) -> Iterator[str]:
    for line, text in enumerate(source.text.splitlines(), start=1):
        if found := PRIVATE_PATH.search(text):
            yield source.at(line, f"a path of one machine ({found[0]}…); use a relative or temporary one")


def sleeps(source: Source) -> Iterator[str]:
    if str(source.path) not in MAY_SLEEP:
        for line in sorted({line for line, name in dotted_names(source) if name == "time.sleep"}):
            yield source.at(line, "time.sleep; wait on an event or a condition, which can be woken")


def swallowed_errors(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield source.at(node.lineno, "a bare except; name the errors that are expected")
            elif names_broad_error(node.type) and all(is_empty(statement) for statement in node.body):
                yield source.at(node.lineno, "every error is swallowed; name those expected, or log them")
        elif isinstance(node, ast.Call) and suppresses_broadly(node):
            yield source.at(node.lineno, "every error is swallowed; name those expected, or log them")


def suppresses_broadly(call: ast.Call) -> bool:
    is_suppress = ast.unparse(call.func) in {"suppress", "contextlib.suppress"}
    return is_suppress and any(names_broad_error(argument) for argument in call.args)


def names_broad_error(node: ast.expr) -> bool:
    members = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(isinstance(member, ast.Name) and member.id in BROAD_ERRORS for member in members)


def is_empty(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Continue)


def vague_names(source: Source) -> Iterator[str]:
    for part in source.path.with_suffix("").parts:
        if VAGUE_NAMES.intersection(part.lower().split("_")):
            yield source.at(1, f"'{part}' says nothing; name the module after the thing it is about")


def prints(source: Source) -> Iterator[str]:
    if not is_package_path(source.path, *MAY_PRINT):
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield source.at(node.lineno, "print in a library; use getLogger(__name__)")


def missing_docstrings(source: Source) -> Iterator[str]:
    if not (ast.get_docstring(source.tree) or "").strip():
        yield source.at(1, "no docstring; say in one line what the module is for")


def impurities(source: Source) -> Iterator[str]:
    if is_package_path(source.path, "core"):
        for line, name in sorted({found for found in dotted_names(source) if IMPURE.match(found[1])}):
            yield source.at(line, f"{name} in the core; take the time or the seed as an argument")


def reaches_inside(source: Source) -> Iterator[str]:
    if str(source.path) in REACHES_INSIDE:
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and is_reach(node):
            yield source.at(node.lineno, f"{ast.unparse(node)} is private; test what can be seen from outside")


def is_reach(node: ast.AST) -> bool:
    """A class of the tests' own may extend another, whose methods it calls."""
    if not isinstance(node, ast.Attribute) or node.attr in MAY_BE_REACHED:
        return False
    is_private = node.attr.startswith("_") and not node.attr.startswith("__")
    return is_private and ast.unparse(node.value) not in {"self", "cls", "super()"}


def assert_tidy(rule: Rule, checked: Iterator[Source] | tuple[Source, ...]) -> None:
    found = [finding for source in checked for finding in rule(source)]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


CODE = ("src", "bench", "soak", "examples")


def test_files_are_short() -> None:
    assert_tidy(long_files, sources(*CODE))


def test_functions_fit_a_screen() -> None:
    assert_tidy(long_functions, sources(*CODE))


def test_nothing_is_left_to_do() -> None:
    assert_tidy(leftovers, sources(*CODE, "tests"))


def test_no_file_names_a_path_of_one_machine() -> None:
    assert_tidy(private_paths, texts())


def test_nothing_sleeps() -> None:
    assert_tidy(sleeps, sources("src"))


def test_no_error_is_swallowed() -> None:
    assert_tidy(swallowed_errors, sources(*CODE))


def test_module_names_say_something() -> None:
    assert_tidy(vague_names, sources(*CODE, "tests"))


def test_the_library_does_not_print() -> None:
    assert_tidy(prints, sources("src"))


def test_every_module_says_what_it_is_for() -> None:
    assert_tidy(missing_docstrings, sources(*CODE))


def test_the_core_knows_neither_clock_nor_chance() -> None:
    assert_tidy(impurities, sources("src"))


def test_tests_do_not_reach_inside() -> None:
    assert_tidy(reaches_inside, sources("tests"))


def test_files_that_may_reach_inside_still_do() -> None:
    texts_of = {str(source.path): source for source in sources("tests")}
    assert texts_of.keys() >= REACHES_INSIDE
    done = [path for path in sorted(REACHES_INSIDE) if not any(map(is_reach, texts_of[path].nodes))]
    assert done == [], "take them off the list"


def test_the_tree_that_is_checked_is_not_empty() -> None:
    checked = {str(source.path) for source in texts()}
    assert {"src/anabranch/__init__.py", "tests/unit/test_tidy.py", "pyproject.toml", "run"} <= checked


SLASH = "/"
BREACHES: list[tuple[Rule, str, str]] = [
    (long_files, "src/anabranch/a.py", "\n" * (FILE_LINES_MAX + 1)),
    (long_functions, "src/anabranch/a.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (long_functions, "src/anabranch/a.py", "class C:\n  async def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (leftovers, "src/anabranch/a.py", "x = 1  # TODO: y\n"),
    (leftovers, "src/anabranch/a.py", '"""FIXME."""\n'),
    (leftovers, "src/anabranch/a.py", "# XXX\n"),
    (private_paths, "docs/a.md", f"see {SLASH}home/someone/notes"),
    (private_paths, "run", f'cache="{SLASH}root/.cache"'),
    (private_paths, "src/anabranch/a.py", f"path = '{SLASH}work/data'"),
    (private_paths, "bench/a.py", f"url = 'file://{SLASH}Users/someone'"),
    (sleeps, "src/anabranch/a.py", "import time\ntime.sleep(1)\n"),
    (sleeps, "src/anabranch/a.py", "import time as t\nt.sleep(1)\n"),
    (sleeps, "src/anabranch/a.py", "from time import sleep as pause\n"),
    (swallowed_errors, "src/anabranch/a.py", "try:\n    f()\nexcept:\n    raise\n"),
    (swallowed_errors, "src/anabranch/a.py", "try:\n    f()\nexcept Exception:\n    pass\n"),
    (swallowed_errors, "src/anabranch/a.py", "try:\n    f()\nexcept (OSError, BaseException) as e:\n    ...\n"),
    (swallowed_errors, "src/anabranch/a.py", "with contextlib.suppress(Exception):\n    f()\n"),
    (vague_names, "src/anabranch/wire/utils.py", ""),
    (vague_names, "src/anabranch/helpers/route.py", ""),
    (vague_names, "src/anabranch/state_manager.py", ""),
    (prints, "src/anabranch/wire/client.py", "print(1)\n"),
    (missing_docstrings, "src/anabranch/a.py", "x = 1\n"),
    (missing_docstrings, "src/anabranch/__init__.py", ""),
    (impurities, "src/anabranch/core/a.py", "import time\nx = time.time()\n"),
    (impurities, "src/anabranch/core/a.py", "from time import monotonic\n"),
    (impurities, "src/anabranch/core/a.py", "from datetime import datetime\nx = datetime.now()\n"),
    (impurities, "src/anabranch/core/a.py", "import datetime as d\nx = d.date.today()\n"),
    (impurities, "src/anabranch/core/a.py", "import random\n"),
    (impurities, "src/anabranch/core/a.py", "from uuid import uuid4\n"),
    (impurities, "src/anabranch/core/a.py", "import numpy as np\nx = np.random.default_rng()\n"),
    (reaches_inside, "tests/unit/test_a.py", "assert worker.jobs._open == {}\n"),
]
KEEPERS: list[tuple[Rule, str, str]] = [
    (long_files, "src/anabranch/a.py", "\n" * FILE_LINES_MAX),
    (long_functions, "src/anabranch/a.py", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
    (leftovers, "src/anabranch/a.py", "TODOS = 'MAXXXX'\n"),
    (private_paths, "src/anabranch/a.py", "x = ('/workers/', 'https://example.org/home/x', '~/x', 'a/work/b')"),
    (sleeps, "src/anabranch/a.py", "import time\nx = time.monotonic()\nself.sleep(1)\n"),
    (swallowed_errors, "src/anabranch/a.py", "try:\n    f()\nexcept Exception:\n    log.exception('f')\n"),
    (swallowed_errors, "src/anabranch/a.py", "with suppress(OSError):\n    f()\n"),
    (vague_names, "src/anabranch/core/commonality.py", ""),
    (prints, "src/anabranch/cli/__init__.py", "print(1)\n"),
    (prints, "src/anabranch/demo/stage.py", "print(1)\n"),
    (prints, "src/anabranch/wire/a.py", "console.print(1)\npprint(1)\n"),
    (missing_docstrings, "src/anabranch/a.py", '"""A."""\n'),
    (impurities, "src/anabranch/worker/a.py", "import time\nx = time.time()\n"),
    (impurities, "src/anabranch/core/a.py", "from datetime import datetime\ndef f(at: datetime): time = at.time()\n"),
    (reaches_inside, "tests/unit/test_a.py", "self._x = super()._y(spark._jvm, a.__dict__)\n"),
]


def described(case: tuple[Rule, str, str]) -> str:
    return f"{case[0].__name__}: {case[2].strip()[:40]!r}"


@pytest.mark.parametrize(("rule", "path", "text"), BREACHES, ids=map(described, BREACHES))
def test_a_breach_is_found_and_placed(rule: Rule, path: str, text: str) -> None:
    found = list(rule(Source(PurePosixPath(path), text)))
    assert found
    assert all(re.match(rf"{re.escape(path)}:\d+: ", finding) for finding in found)


@pytest.mark.parametrize(("rule", "path", "text"), KEEPERS, ids=map(described, KEEPERS))
def test_what_keeps_the_rule_is_left_alone(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(PurePosixPath(path), text))) == []


def test_every_rule_is_shown_to_fail() -> None:
    rules = {long_files, long_functions, leftovers, private_paths, sleeps, swallowed_errors}
    rules |= {vague_names, prints, missing_docstrings, impurities, reaches_inside}
    assert {rule for rule, _, _ in BREACHES} == {rule for rule, _, _ in KEEPERS} == rules
