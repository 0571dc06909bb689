"""What the documentation says about settings, files and packages is what the code has."""

import re
from pathlib import Path

from anabranch.core.settings import Settings

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "anabranch"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
#: How many files a reader opens to follow one row, from `start()` to the manifest; and those of one epoch.
WALK_FILES_MAX = 45
EPOCH_FILES_MAX = 25


def test_every_setting_is_documented_with_its_default_and_meaning() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `(anabranch\.\w+)` \|\s*(.*?)\s*\|\s*(.*?)\s*\|$", text, re.MULTILINE)
    shown = [(name, _text(default), meaning) for name, default, meaning in Settings.describe()]
    assert rows == shown


def test_links_in_the_documentation_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_links_to_headings_find_them() -> None:
    for page in PAGES:
        for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
            linked = (page.parent / target) if target else page
            assert heading in _headings(linked), f"{page.name} links to #{heading} of {linked.name}, which is not there"


def test_files_that_the_documentation_names_exist() -> None:
    for page in PAGES:
        for path in re.findall(r"`([\w.-]+/[\w./-]*\.py)`", page.read_text()):
            assert (PACKAGE / path).is_file() or (ROOT / path).is_file(), (
                f"{page.name} names {path}, which is not there"
            )


def test_the_walk_of_one_row_opens_few_files_and_each_once() -> None:
    text = ARCHITECTURE.read_text()
    walk = text.split("\n## The walk of one row\n", 1)[1].split("\n## ", 1)[0]
    epoch = walk.split("\n### One epoch\n", 1)[1]
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py)`", walk, re.MULTILINE)
    files = [file for _, file in steps]
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert len(set(files)) == len(files)
    assert 0 < len(files) <= WALK_FILES_MAX
    assert 0 < len(re.findall(r"^\d+\. `", epoch, re.MULTILINE)) <= EPOCH_FILES_MAX


def test_every_package_is_on_the_map() -> None:
    table = ARCHITECTURE.read_text().split("\n## Packages\n", 1)[1].split("\n## ", 1)[0]
    shown = set(re.findall(r"^\| `([\w/]+)/` \|", table, re.MULTILINE))
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*/__init__.py")}
    # The kinds of stateful stages are one row: each is a package, or a module, of the same form.
    assert shown == {package for package in packages if not package.startswith("operators/")}


def _headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def _text(default: object) -> str:
    if default == () or default == "":
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)
